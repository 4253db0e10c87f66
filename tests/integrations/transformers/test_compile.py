# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).with_name("compiled_model.py"))


def run(*arguments):
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_swapped_model_is_one_graph():
    """With the backend that compiles no kernels: the test is that nothing breaks the graph."""
    run("eager", "float32", "priced", "skip-iw", "trainer")


@pytest.mark.slow
def test_bfloat16_compiles_with_inductor():
    """As transformers itself: float32 has no compiled grouped product."""
    run("inductor", "bfloat16", "priced")
