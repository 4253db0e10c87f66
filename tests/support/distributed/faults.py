# SPDX-License-Identifier: Apache-2.0
"""One rank of a run in which a rank fails: saves a checkpoint, then goes on until something ends it."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main(rank: int, size: int, folder: Path, fault: str) -> None:
    from support.distributed.checks_runs import build, state_of
    from support.distributed.models import loss_of, one_axis, rows_of

    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    run = build(one_axis())
    state_of(run).save(folder / "checkpoint")
    for step in range(1000):
        x = rows_of(rank, 16, step)
        if rank == 1 and step == 3:
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            x = torch.full_like(x, torch.nan)
        model, optimizer, surrogate = run
        loss, routings = loss_of(model, x, surrogate=surrogate)
        loss.backward()
        optimizer.step()
        routings.update()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
