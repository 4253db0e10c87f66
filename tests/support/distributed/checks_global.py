# SPDX-License-Identifier: Apache-2.0
"""Scope "global": what is decided over the rows of all ranks is what one process decides that has them all."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import equipoise as eq
from equipoise.balancing import Balanced
from equipoise.balancing._solve import solve_spread
from equipoise.distributed import _shared_solvers
from equipoise.distributed._ranks import Ranks
from equipoise.distributed._scope import MeshScope
from equipoise.sampling import Scope
from support.distributed.models import (
    ROWS,
    Model,
    check_gradients,
    loss_of,
    mean_over_ranks,
    one_axis,
    rows_of,
    streams,
)

ROUTERS: dict[str, dict[str, Any]] = {
    "skip-iw": {"router": "skip-iw", "capacity_factor": 1.0},
    "skip-iw-2": {"router": "skip-iw", "capacity_factor": 1.0, "top_k": 2},
    "skip": {"router": "skip", "capacity_factor": 1.0, "z_loss": 0.1},
    "sample-sinkhorn": {"router": "sample", "sinkhorn_first": True},
    "gm-iw": {"router": "gm-iw", "capacity_factor": 1.0},
    "gm-iw-slack-2": {"router": "gm-iw", "capacity_factor": 1.25, "top_k": 2},
    "gm-sh": {"router": "gm-sh", "capacity_factor": 1.0},
    "gm-iw-mix": {"router": "gm-iw-mix", "capacity_factor": 1.0},
    "gm-iw-avg-mix": {"router": "gm-iw-avg-mix", "capacity_factor": 1.0, "solves": 2},
    "switch": {"router": "switch"},
    "topk-2": {"router": "topk", "top_k": 2},
    "base-2": {"router": "base", "top_k": 2, "capacity_factor": 1.0},
    "s-base": {"router": "s-base"},
    "priced": {"router": "priced"},
}


class AllHere(Scope):
    """All rows in this process, balanced in expectation by the solver that ranks use."""

    def sinkhorn(self, logits: Tensor, capacity: Any = None, **how: Any) -> Balanced:
        *batch, n, k = logits.shape
        target = torch.full([k], n / k) if capacity is None else torch.as_tensor(capacity)
        target = target.double().expand(*batch, k).reshape(-1, k)
        tolerance = how.get("tolerance", 1e-6)
        found = solve_spread(logits.detach().reshape(-1, n, k), None, target, tolerance, 500, lambda x: x)
        shapes = (logits.shape, [*batch, k], batch, batch, batch)
        parts = (found.log_p, found.prices, found.converged, found.iterations, found.error)
        return Balanced(*(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)))


class JoinedNoise:
    """A strategy whose noise for all rows is what ranks draw for theirs, one after the other."""

    def __init__(self, strategy: Any, sizes: list[int], generators: list[torch.Generator]) -> None:
        self._strategy, self._sizes, self._generators = strategy, sizes, generators

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def draw_noise(self, shape: Any, *, generator: Any = None, **how: Any) -> eq.Noise:
        parts = [
            self._strategy.draw_noise([n, shape[-1]], generator=g, **how)
            for n, g in zip(self._sizes, self._generators, strict=True)
        ]
        joined: dict[str, Any] = {"gumbel": torch.cat([p.gumbel for p in parts], -2), "pick": parts[0].pick}
        for name in ("priority", "coin"):
            values = [getattr(p, name) for p in parts]
            joined[name] = None if values[0] is None else torch.cat(values, -1)
        return eq.Noise(**joined)


def all_in_one(model: Model, sizes: list[int], seed: int) -> Model:
    """The model for the rows of all ranks in one process, with the ranks' noise."""
    model = deepcopy(model)
    by_rank = [streams(seed, rank) for rank in range(len(sizes))]
    for number, layer in enumerate(model.layers):
        router: Any = layer.router
        router.scope = AllHere()
        if hasattr(router.rule, "strategy"):
            router.rule.strategy = JoinedNoise(router.rule.strategy, sizes, [g[number] for g in by_rank])
    return model


def parity(
    folder: Path, options: dict[str, Any], settled: bool = True, sizes: tuple[int, ...] = (), credit: str = "token"
) -> None:
    """Loss, gradients, telemetry and what is learnt are those of one process with all rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = sizes[:world] or (ROWS,) * world
    model = Model(**options)
    one = all_in_one(model, list(sizes), seed=3)
    surrogates = [eq.nn.Surrogate(credit=credit) for _ in range(2)]
    expected, all_routings = loss_of(
        one, torch.cat([rows_of(r, n) for r, n in enumerate(sizes)]), surrogate=surrogates[0]
    )
    expected.backward()
    all_routings.update()
    eq.distributed.parallelize(model, one_axis(), scope="global")
    torch.manual_seed(3)
    before = _shared_solvers.SMALL_ENTRIES
    _shared_solvers.SMALL_ENTRIES = 0 if settled else before  # so few rows would be gathered whole
    loss, routings = loss_of(model, rows_of(rank, sizes[rank]), surrogate=surrogates[1])
    loss.backward()
    _shared_solvers.SMALL_ENTRIES = before
    routings.update()  # of several optimal prices, gathered rows give those that one process finds
    assert torch.allclose(mean_over_ranks(loss), expected, rtol=1e-9)
    check_gradients(model, one, averaged=False, tolerance=1e-8)
    for mine, whole in zip(routings, all_routings, strict=True):
        for name, value in whole.stats.to_dict().items():
            found = torch.tensor(mine.stats.to_dict()[name], dtype=torch.float64)
            if name not in ("gap", "work"):
                assert torch.allclose(found, torch.tensor(value, dtype=torch.float64), rtol=1e-8), name
    assert torch.allclose(surrogates[0].baseline.value, surrogates[1].baseline.value)
    for (name, a), b in zip(one.named_buffers(), model.buffers(), strict=True):
        assert torch.allclose(a.double(), b.double(), atol=1e-6), name


def exact(folder: Path) -> None:
    """The assignment of rows on all ranks is optimal, and its prices are the same to the bit."""
    ranks = Ranks(one_axis())
    before = _shared_solvers.SMALL_ENTRIES
    _shared_solvers.SMALL_ENTRIES = 0
    for rows, k, top_k, factor in ((1024, 16, None, 1.0), (900, 16, 2, 1.2), (700, 2, None, 1.0), (0, 4, None, 1.0)):
        generator = torch.Generator().manual_seed(ranks.rank)
        n = rows if ranks.rank else rows // 2
        scores = torch.randn(n, k, generator=generator) + ranks.rank * torch.linspace(0, 2, k)
        mask = torch.rand(n, generator=generator) < 0.9
        total = ranks.all_reduce(mask.sum())
        capacity = -(-int(factor * int(total) * (top_k or 1)) // k) + 1
        a = _shared_solvers.shared_assign(ranks, scores, capacity, top_k=top_k, mask=mask)
        every, own = _shared_solvers.gather_matrix(ranks, scores, -2)
        masks, _ = _shared_solvers.gather_matrix(ranks, mask, -1)
        b = eq.assign(every, capacity, top_k=top_k, mask=masks)
        assert torch.allclose(a.value, b.value, rtol=1e-12)
        assert float(a.gap) <= 1e-9 * max(1.0, abs(float(a.value)))
        assert torch.equal(a.counts.sum(), b.counts.sum())
        assert (a.counts <= a.capacity).all()
        prices = ranks.all_gather(a.prices.unsqueeze(0))
        assert all(torch.equal(p, prices[0]) for p in prices)
        if top_k is None and rows:
            wanted = eq.conditional_values(every, b)[own] - b.value
            detours = _shared_solvers.shared_detours(ranks, scores.double(), a)
            z = a.z.clamp_max(k - 1)
            here = scores.double().gather(1, z[:, None])
            found = scores.double() - here - detours.T[z]
            assert torch.allclose(found[mask], wanted[mask], atol=1e-6)
    _shared_solvers.SMALL_ENTRIES = before


def gain(folder: Path) -> None:
    """Where ranks see different data, one assignment of all rows is worth more than one a rank."""
    ranks = Ranks(one_axis())
    generator = torch.Generator().manual_seed(ranks.rank)
    shift = torch.randn(16, generator=generator)  # each rank has experts that its data prefer
    scores = torch.randn(512, 16, generator=generator) + shift
    local = mean_over_ranks(eq.assign(scores).value) / 512
    everywhere = MeshScope(ranks, shared=True).assign(scores, 512 * ranks.size // 16).value / (512 * ranks.size)
    free = mean_over_ranks(scores.amax(1).sum().double()) / 512
    assert float(local) + 0.1 < float(everywhere) < float(free)


GLOBAL_CHECKS: dict[str, Callable[[Path], None]] = {
    **{f"global-{name}": partial(parity, options=options) for name, options in ROUTERS.items()},
    "global-gathered": partial(parity, options=ROUTERS["gm-iw"], settled=False),
    "global-uneven-gm": partial(parity, options=ROUTERS["gm-iw-mix"], sizes=(ROWS, 0, 16, 8)),
    "global-uneven-skip": partial(parity, options=ROUTERS["skip-iw-2"], sizes=(ROWS, 0, 16, 8)),
    "global-uneven-switch": partial(parity, options={"router": "switch"}, sizes=(ROWS, 0, 16, 8)),
    "global-credit": partial(parity, options=ROUTERS["skip-iw"], credit="batch"),
    "global-exact": exact,
    "global-gain": gain,
}
