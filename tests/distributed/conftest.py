# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a world once, for all of its checks."""

import json
from functools import cache

import pytest

from support.distributed.launch import Outcomes, start
from support.distributed.worlds import WORLDS


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Runs all checks of a world size, the first time that one is asked for; returns each rank's error by check."""

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
