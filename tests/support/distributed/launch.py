# SPDX-License-Identifier: Apache-2.0
"""Starting the ranks of a world."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent

Outcomes = Callable[[int, tuple[str, ...]], dict[str, list[str]]]


def start(size: int, folder: Path, *arguments: str, script: str = "worker.py") -> list[subprocess.Popen[str]]:
    """Starts every rank; each writes what it prints into a file of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[str]] = []
    for rank in range(size):
        command = [sys.executable, str(HERE / script), str(rank), str(size), str(folder), *arguments]
        with (folder / f"out-{rank}").open("w") as out:
            processes.append(
                subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, env=environment)
            )
    return processes
