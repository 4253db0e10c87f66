# SPDX-License-Identifier: Apache-2.0
"""What holds on every rank. Each function is one test, run by all ranks of a world at once."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import equipoise as eq
from support.distributed.checks_global import GLOBAL_CHECKS
from support.distributed.checks_runs import RUN_CHECKS
from support.distributed.checks_transformers import swapped
from support.distributed.models import (
    ROUTERS,
    ROWS,
    Model,
    check_gradients,
    loss_of,
    mean_over_ranks,
    mesh_of,
    one_axis,
    reference,
    rows_of,
)


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
    eq.distributed.average_gradients(model.parameters(), one_axis())
    check_gradients(model, one, averaged=True)


def parity_ddp(folder: Path, options: dict[str, Any]) -> None:
    """The same under DDP on a mesh of two axes, with gradients of two micro-batches added up."""
    model, rank, size = Model(**options), dist.get_rank(), dist.get_world_size()
    one = Model(**options)
    for step in range(2):
        reference(one, [ROWS] * size, seed=step, step=step, copy=False)
    eq.distributed.parallelize(model, mesh_of(2, size // 2))
    ddp = DistributedDataParallel(model)
    for step in range(2):
        torch.manual_seed(step)
        loss, _ = loss_of(ddp, rows_of(rank, ROWS, step))
        loss.backward()
    check_gradients(ddp, one, averaged=True)


def parity_fsdp(folder: Path, options: dict[str, Any]) -> None:
    """The same under FSDP2: experts over the data axis, the rest over all ranks."""
    model, rank, size = Model(**options), dist.get_rank(), dist.get_world_size()
    expected, one = reference(model, [ROWS] * size, seed=3)
    mesh = mesh_of(2, size // 2)
    eq.distributed.parallelize(model, mesh)
    for layer in model.layers:
        fully_shard(layer.experts, mesh=mesh["data"])
        fully_shard(layer, mesh=mesh._flatten("all"))
    fully_shard(model, mesh=mesh._flatten("all"))
    torch.manual_seed(3)
    loss, _ = loss_of(model, rows_of(rank))
    loss.backward()
    assert torch.allclose(mean_over_ranks(loss), expected, rtol=1e-12)
    check_gradients(model, one, averaged=True)
    norm = eq.distributed.clip_grad_norm_(model.parameters(), 1e-3)
    wanted = torch.nn.utils.clip_grad_norm_(one.parameters(), 1e-3)
    assert torch.allclose(norm, wanted, rtol=1e-12)
    check_gradients(model, one, averaged=True)


def clip(folder: Path) -> None:
    """The norm over experts that are spread and parameters that are not is that of one process."""
    model = Model(router="topk")
    _, one = reference(model, [ROWS] * dist.get_world_size(), seed=3)
    eq.distributed.parallelize(model, one_axis())
    ddp = DistributedDataParallel(model)
    for p in (2.0, 1.0, float("inf")):
        ddp.zero_grad()
        loss_of(ddp, rows_of(dist.get_rank()))[0].backward()
        single = deepcopy(one)
        for a, b in zip(single.parameters(), one.parameters(), strict=True):
            a.grad = None if b.grad is None else b.grad.clone()
        wanted = torch.nn.utils.clip_grad_norm_(single.parameters(), 1e-2, p)
        norm = eq.distributed.clip_grad_norm_(ddp.parameters(), 1e-2, p)
        assert torch.allclose(norm, wanted, rtol=1e-12)
        check_gradients(ddp, single, averaged=True)


def uneven(folder: Path, router: str) -> None:
    """Ranks with other numbers of tokens, one with none, take uneven splits together."""
    size = dist.get_world_size()
    parity(folder, {"router": router, "capacity_factor": 1.0, "marginal_entropy": 0.0}, (ROWS, 0, 16, 8)[:size])


def equal_splits(folder: Path) -> None:
    """Where all ranks are balanced no counts travel; where one is not, they do, on all ranks."""
    model = Model(router="gm-iw", capacity_factor=1.0)
    eq.distributed.parallelize(model, one_axis())
    from equipoise.distributed._exchange import _Equal

    rank = dist.get_rank()
    ways: list[str] = []
    for rows in (ROWS, ROWS if rank else ROWS // 2):
        for layer in model.layers:
            dispatcher: Any = layer.dispatcher
            x = rows_of(rank, rows)
            _, metadata = dispatcher.dispatch(x, layer.router(x))
            ways.append("equal" if isinstance(metadata.way, _Equal) else "uneven")
    assert ways == ["equal"] * 2 + ["uneven"] * 2, ways


def observed(folder: Path, options: dict[str, Any]) -> None:
    """What routers keep between steps is the same on all ranks, and moves."""
    model, rank = Model(**options), dist.get_rank()
    before = {name: x.clone() for name, x in model.named_buffers()}
    eq.distributed.parallelize(model, one_axis())
    for step in range(12):
        # Ranks whose data differ: without communication their statistics would, too.
        x = rows_of(rank, ROWS if rank else ROWS // 2, step) + rank
        _, routings = loss_of(model, x)
        routings.update()
    moved = 0
    for name, x in model.named_buffers():
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        assert all(torch.equal(part, x) for part in parts), name
        moved += not torch.equal(x, before[name])
    assert moved >= 2


def loss_free_counts_all_rows(folder: Path) -> None:
    """The bias moves by the load of all ranks: here an expert is crowded on one rank, and not overall."""
    model, rank, size = Model(router="loss-free", top_k=1), dist.get_rank(), dist.get_world_size()
    one = deepcopy(model)
    eq.distributed.parallelize(model, one_axis())
    _, routings = loss_of(model, rows_of(rank))
    routings.update()
    _, routings = loss_of(one, torch.cat([rows_of(r) for r in range(size)]))
    routings.update()
    a, b = (m.layers[0].router.rule.bias for m in (model, one))  # pyright: ignore
    assert torch.equal(a, b)


def noise(folder: Path) -> None:
    """Ranks draw independent noise from equal seeds, the same again from the same seed, and from a generator given."""
    model = Model(router="sample")
    eq.distributed.parallelize(model, one_axis())
    x = rows_of(0)

    def draw(seed: int, generator: torch.Generator | None = None) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.layers[0].router(x, generator=generator).indices.squeeze(1)  # pyright: ignore

    first = draw(0)
    assert torch.equal(first, draw(0))
    assert not torch.equal(first, draw(1))
    given = [draw(seed, torch.Generator().manual_seed(5)) for seed in (0, 1)]
    assert torch.equal(*given)
    parts = [torch.empty_like(first) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, first)
    assert len({tuple(part.tolist()) for part in parts}) == dist.get_world_size()
    model.eval()
    state = torch.get_rng_state()
    draw_again = model.layers[0].router(x).indices
    assert torch.equal(torch.get_rng_state(), state)
    assert draw_again.shape == (ROWS, 1)


def checkpointed(folder: Path, reentrant: bool) -> None:
    """Activation checkpointing exchanges rows again and finds the same gradients."""
    model = Model(router="gm-iw-mix", capacity_factor=1.0)
    _, one = reference(model, [ROWS] * dist.get_world_size(), seed=3)
    eq.distributed.parallelize(model, one_axis())
    torch.manual_seed(3)
    x = rows_of(dist.get_rank()).requires_grad_()
    with eq.nn.capture(model) as routings:
        losses = checkpoint(model, x, use_reentrant=reentrant)
    eq.nn.Surrogate(baseline=0.3)(losses, routings).backward()
    check_gradients(model, one, averaged=False)


def copies(folder: Path) -> None:
    """A copy works and learns like the model; pickling says what to do instead."""
    import pickle

    size = dist.get_world_size()
    model = Model(router="topk")
    _, one = reference(model, [ROWS] * size, seed=3)
    eq.distributed.parallelize(model, mesh_of(2, size // 2) if size > 2 else one_axis())
    copy = deepcopy(model)
    loss_of(copy, rows_of(dist.get_rank()))[0].backward()
    check_gradients(copy, one, averaged=False)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(TypeError, match="must not be pickled"):
        pickle.dumps(model)


def bad_input(folder: Path) -> None:
    """What cannot be spread is refused, with the same message on all ranks."""
    mesh = one_axis()
    with pytest.raises(ValueError, match="must hold a layer with experts"):
        eq.distributed.parallelize(torch.nn.Linear(2, 2), mesh)
    with pytest.raises(ValueError, match="scope must be"):
        eq.distributed.parallelize(Model(), mesh, scope="all")
    with pytest.raises(ValueError, match=r"stacked parameters \[8, ...\]"):
        eq.distributed.parallelize(eq.nn.MoE(4, 8, experts=torch.nn.Linear(4, 4)), mesh)
    with pytest.raises(ValueError, match="3 experts of layer '' must be a multiple"):
        eq.distributed.parallelize(eq.nn.MoE(4, 3), mesh)
    with pytest.raises(ValueError, match="mesh must be a DeviceMesh, got NoneType: make it with init_device_mesh"):
        eq.distributed.parallelize(Model(), None)
    wrapped = DistributedDataParallel(Model())
    with pytest.raises(
        ValueError, match="model must not be wrapped yet, got DistributedDataParallel, .*: call parallel"
    ):
        eq.distributed.parallelize(wrapped, mesh)
    with pytest.raises(ValueError, match="got DistributedDataParallel in '0'"):
        eq.distributed.parallelize(torch.nn.Sequential(wrapped), mesh)
    done = eq.distributed.parallelize(Model(), mesh)
    with pytest.raises(ValueError, match="must not be sharded yet"):
        eq.distributed.parallelize(done, mesh)


def disagreement(folder: Path) -> None:
    """Ranks with other settings all raise, and say which."""
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"router '0.router' is .*skip-iw.* on rank 0 and .*gm-iw.* on rank 1"):
        eq.distributed.parallelize(Model(router="gm-iw" if rank == 1 else "skip-iw").layers, one_axis())
    with pytest.raises(ValueError, match="scope is local on rank 0 and global on rank 1"):
        eq.distributed.parallelize(Model(), one_axis(), scope="global" if rank == 1 else "local")
    model = eq.distributed.parallelize(Model(router="gm-iw"), one_axis())
    model.train(rank == 0)
    with pytest.raises(ValueError, match="must be in one mode, got"):
        model(rows_of(rank))


CHECKS: dict[str, Callable[[Path], None]] = {
    **GLOBAL_CHECKS,
    **RUN_CHECKS,
    **{f"parity-{name}": partial(parity, options=options) for name, options in ROUTERS.items()},
    **{f"ddp-{name}": partial(parity_ddp, options=ROUTERS[name]) for name in ("skip-iw", "gm-iw-mix", "topk-2")},
    **{f"fsdp-{name}": partial(parity_fsdp, options=ROUTERS[name]) for name in ("skip-iw", "gm-iw-mix", "priced-2")},
    **{f"uneven-{name}": partial(uneven, router=name) for name in ("gm-iw", "skip-iw")},
    **{
        f"observed-{name}": partial(observed, options=options)
        for name, options in {
            "priced": {"router": "priced", "top_k": 2},
            "loss-free": {"router": "loss-free"},
            "quantile": {"router": "quantile"},
            "auto": {"router": "gm-iw-mix", "eps": "auto", "temperature": "auto"},
            "evaluation": {"router": "skip-iw", "evaluation": "priced"},
        }.items()
    },
    "transformers-topk": partial(swapped, router="topk"),
    "transformers-base": partial(swapped, router="base", capacity_factor=1.0),
    "equal-splits": equal_splits,
    "clip": clip,
    "loss-free": loss_free_counts_all_rows,
    "noise": noise,
    "checkpointing": partial(checkpointed, reentrant=False),
    "checkpointing-reentrant": partial(checkpointed, reentrant=True),
    "copies": copies,
    "bad-input": bad_input,
    "disagreement": disagreement,
}
