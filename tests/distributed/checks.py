# SPDX-License-Identifier: Apache-2.0
"""What holds on every rank. Each function is one test, run by all ranks of a world at once."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from models import ROUTERS, ROWS, Model, check_gradients, loss_of, mean_over_ranks, reference, rows_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import equipoise as eq


def mesh_of(*sizes: int) -> DeviceMesh:
    names = ("data", "expert")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def one_axis() -> DeviceMesh:
    return mesh_of(dist.get_world_size())


def parity(folder: Path, options: dict[str, Any], sizes: tuple[int, ...] | None = None) -> None:
    """Loss and gradients of all ranks are those of one process."""
    model, rank = Model(**options), dist.get_rank()
    sizes = sizes or (ROWS,) * dist.get_world_size()
    expected, one = reference(model, list(sizes), seed=3)
    eq.distributed.parallelize(model, one_axis())
    torch.manual_seed(3)
    loss, _ = loss_of(model, rows_of(rank, sizes[rank]))
    loss.backward()
    assert torch.allclose(mean_over_ranks(loss), expected, rtol=1e-12)
    check_gradients(model, one, averaged=False)


CHECKS: dict[str, Callable[[Path], None]] = {
    **{f"parity-{name}": partial(parity, options=options) for name, options in ROUTERS.items()},
}
