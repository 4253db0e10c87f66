# SPDX-License-Identifier: Apache-2.0
"""Everything compiles into one graph, gives what it gives without compilation, and still checks its values."""

from collections.abc import Callable
from pathlib import Path

import pytest

CASES = [
    # In one process: to start one, and the compiler in it, takes three seconds.
    "training_steps samplers numbers_and_sizes_that_change values",
    pytest.param("default_backend", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("cases", CASES)
def test_compiled(cases: str, fresh_python: Callable[..., str]) -> None:
    fresh_python((Path(__file__).parent / "compiled.py").read_text(), *cases.split())
