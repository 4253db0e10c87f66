# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a world once, for all of its checks."""

import json
from functools import cache

import pytest

from support.distributed.launch import Outcomes, start


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Runs checks on ranks that are started once for all of them; returns each rank's error by check."""

    @cache
    def run(size: int, names: tuple[str, ...]) -> dict[str, list[str]]:
        folder = tmp_path_factory.mktemp(f"world-{size}")
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
