# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism on 1, 2 and 4 gloo ranks against one process. The checks are in `checks*.py`."""

from pathlib import Path

import pytest

from support.distributed.launch import Outcomes, start
from support.distributed.worlds import SLOW_WORLDS, WORLDS


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, names in WORLDS.items() for name in names])
def test_ranks(outcomes: Outcomes, size: int, name: str) -> None:
    errors = outcomes(size, WORLDS[size])[name]
    assert not any(errors), next(error for error in errors if error)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), [(size, name) for size, names in SLOW_WORLDS.items() for name in names])
def test_every_router_on_every_number_of_ranks(outcomes: Outcomes, size: int, name: str) -> None:
    errors = outcomes(size, SLOW_WORLDS[size])[name]
    assert not any(errors), next(error for error in errors if error)


@pytest.mark.parametrize("fault", ["dies", "raises"])
def test_a_rank_that_fails_ends_the_others_with_one_error(fault: str, tmp_path: Path) -> None:
    processes = start(2, tmp_path, fault, script="faults.py")
    codes = [process.wait(120) for process in processes]
    assert all(codes)
    survivor, failed = ((tmp_path / f"out-{rank}").read_text() for rank in (0, 1))
    assert "did not complete on rank 0: another rank ended, raised an error" in survivor
    assert survivor.strip().splitlines()[-1].startswith(("equipoise.distributed._ranks.RankError", "[rank0]"))
    if fault == "raises":
        assert "ValueError" in failed
    _check_loads(tmp_path / "checkpoint")


def _check_loads(folder: Path) -> None:
    """The last checkpoint loads, here onto one process without any group."""

    from support.distributed.checks_runs import build, state_of

    run = build(None)
    before = {name: x.clone() for name, x in run[0].state_dict().items()}
    for parameter in run[0].parameters():
        parameter.data.zero_()
    state_of(run).load(folder)
    after = run[0].state_dict()
    assert all((after[name] == before[name]).all() for name in before)
