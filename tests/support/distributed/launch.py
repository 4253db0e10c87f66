# SPDX-License-Identifier: Apache-2.0
"""Starting the ranks of a world."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent

Outcomes = Callable[[int], dict[str, list[str]]]


def start(size: int, folder: Path, *arguments: str, script: str = "worker.py") -> list[subprocess.Popen[str]]:
    """Starts every rank; each writes what it prints into a file of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / script), str(rank), str(size), str(folder), *arguments],
            stdout=(folder / f"out-{rank}").open("w"),
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]
