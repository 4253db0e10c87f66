# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a world once, for all of its checks."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

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


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Runs all checks of a world size, the first time that one is asked for; returns each rank's error by check."""
    from test_distributed import WORLDS

    @cache
    def run(size: int) -> dict[str, list[str]]:
        folder = tmp_path_factory.mktemp(f"world-{size}")
        names = WORLDS[size]
        for process in start(size, folder, *names):
            process.wait()
        found: dict[str, list[str]] = {name: [] for name in names}
        for rank in range(size):
            path = folder / f"results-{rank}.json"
            results = json.loads(path.read_text()) if path.exists() else {}
            ended = (folder / f"out-{rank}").read_text()[-3000:]
            for name in names:
                found[name].append(results.get(name, f"rank {rank} did not finish:\n{ended}"))
        return found

    return run
