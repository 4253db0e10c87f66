# SPDX-License-Identifier: Apache-2.0
"""What tests of every layer share."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings
from jaxtyping import config

# Examples take as long as they take on a loaded machine; a failing example is reproduced by its printed seed.
settings.register_profile("equipoise", deadline=None, print_blob=True)
settings.load_profile("equipoise")

# Tests on several processes share the cores; torch's threads would only get into each other's way.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

FreshPython = Callable[..., str]


@pytest.fixture
def generator() -> torch.Generator:
    """A generator with a fixed seed, independent of the global stream."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def fresh_python() -> FreshPython:
    """Runs a script in a new interpreter, without the checking import hook, and returns what it printed."""

    def run(script: str, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switches the run-time check of signatures off, to see what users see."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    """No test changes the number of threads for the next one."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)
