# SPDX-License-Identifier: Apache-2.0
"""What several tests of layers share."""

from collections.abc import Iterator

import pytest
import torch
from jaxtyping import config


@pytest.fixture(scope="module")
def many_tiny_passes() -> Iterator[None]:
    """Threads would only wait for each other, and signatures are checked in the other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
    torch.set_num_threads(before)
