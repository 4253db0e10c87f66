# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism on 1, 2 and 4 gloo ranks against one process. The checks are in `checks*.py`."""

import sys
from collections.abc import Callable
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


# One rank is enough: its threads are those of any other.
AFTER_THE_END = """
import atexit, glob

def threads():
    return [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]

atexit.register(lambda: print("in the end", [name for name in threads() if "gloo" in name]))  # runs last

import torch, torch.distributed as dist, torch.distributed.nn  # whose defaults would hold the group of all ranks
import equipoise as eq

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "expert"))
moe = eq.nn.MoE(8, 4, router="switch")
eq.distributed.parallelize(moe, mesh, scope="global")
optimizer = torch.optim.AdamW(moe.parameters())
moe(torch.randn(16, 8)).square().mean().backward()
eq.distributed.clip_grad_norm_(moe.parameters(), 1.0)
optimizer.step()  # torch keeps the mesh of the experts' DTensors, and that keeps its groups
dist.destroy_process_group()
print("destroyed", [name for name in threads() if "gloo" in name][:1])
try:
    moe(torch.randn(16, 8))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_threads_of_destroyed_groups_end_before_the_interpreter(fresh_python: Callable[[str], str]) -> None:
    """One that outlives it aborts the process, now and then: it needs the interpreter to drop its last message."""
    destroyed, error, end = fresh_python(AFTER_THE_END).splitlines()
    assert destroyed != "destroyed []"  # else the rest shows nothing
    assert error.startswith("process groups must exist while a parallelised model is used")
    assert end == "in the end []"
