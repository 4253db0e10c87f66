# SPDX-License-Identifier: Apache-2.0
"""One rank of the tests: runs every check of its world, and writes down which held.

Starting a process costs seconds, so all checks of a world size run in one start. `conftest.py` starts the ranks.
"""

import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=30)


def main(rank: int, size: int, folder: Path, names: list[str]) -> None:
    from support.distributed.checks import CHECKS

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=TIMEOUT)
    results: dict[str, str] = {}
    for name in names:
        start = time.monotonic()
        results[name] = run(CHECKS[name], folder / name)
        sys.stdout.write(f"{name} {time.monotonic() - start:.1f} s\n")
        sys.stdout.flush()
        (folder / f"results-{rank}.json").write_text(json.dumps(results))
        dist.barrier()
    dist.destroy_process_group()


def run(check: Callable[[Path], None], folder: Path) -> str:
    try:
        check(folder)
    except Exception:  # noqa: BLE001
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
