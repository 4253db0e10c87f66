# SPDX-License-Identifier: Apache-2.0
"""What the tests of checks share."""

from collections.abc import Iterator

import pytest
from jaxtyping import config


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switches the run-time check of signatures off, to see what users see."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
