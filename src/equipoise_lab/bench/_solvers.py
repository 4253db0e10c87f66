# SPDX-License-Identifier: Apache-2.0
"""The solvers that are compared, ours and the peers', behind one face.

A solver is *prepared* for a score matrix outside the timer (copies, conversions, integer costs) and gives a call that
is timed. Reading the assignment out of what the call returned is not timed either. Both rules favour the peers, which
want other types than a router has and return more than an assignment.

The problem is always the tight one, n = k c with capacity c for each expert, because that is what all of them can do.

Legend: n rows (datapoints), k columns (experts), c = n / k.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

import equipoise as eq

Role = Literal["floor", "ours", "peer"]

# The solver that the others are compared with.
OURS = "primal-dual"
# Integer costs keep 24 bits of the largest score, the precision of float32.
_INTEGER_RANGE = 2.0**24
# POT counts simplex pivots; its default of 1e5 is too few from about 16,384 x 64 on.
_MAX_PIVOTS = 1_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A problem in a solver's own form: `call` is timed, `read` turns what it returned into z."""

    call: Callable[[], Any]
    read: Callable[[Any], Int[Tensor, "..."]]


def _linear(n: int, k: int) -> float:
    return float(n) * k


def _pivoting(n: int, k: int) -> float:
    return float(n) ** 1.5 * k


def _cubic(n: int, k: int) -> float:
    del k
    return float(n) ** 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Solver:
    """A way to assign rows to experts."""

    name: str  # in the results
    title: str  # in figures and progress
    short: str  # in tables
    role: Role  # "floor": no balancing at all
    exact: bool = True  # whether it claims an optimal assignment
    package: str | None = None  # module that must be importable; None: one of our own dependencies
    growth: Callable[[int, int], float] = _linear  # of time in (n, k), to foresee what would exceed the time budget
    relative_tolerance: float = 1e-9  # of its costs: how far from optimal, per row, relative to the largest score
    prepare: Callable[[Float[Tensor, "n k"]], Prepared]  # puts a score matrix into the solver's form


def _argmax(scores: Float[Tensor, "n k"]) -> Prepared:
    return Prepared(call=lambda: torch.argmax(scores, -1), read=lambda z: z)


def _ours(method: str) -> Callable[[Float[Tensor, "n k"]], Prepared]:
    def prepare(scores: Float[Tensor, "n k"]) -> Prepared:
        return Prepared(call=lambda: eq.assign(scores, method=method), read=lambda a: a.z)

    return prepare


def _pot(scores: Float[Tensor, "n k"]) -> Prepared:
    import ot

    n, k = scores.shape
    emd: Callable[..., Any] = ot.emd
    cost, rows, experts = _finite_cost(scores).numpy(), np.ones(n), np.full(k, n / k)
    return Prepared(
        call=lambda: emd(rows, experts, cost, numItermax=_MAX_PIVOTS),
        read=lambda plan: torch.from_numpy(plan).argmax(-1),
    )


def prepare_flow(scores: Float[Tensor, "n k"], top_k: int = 1) -> Prepared:
    """Puts scores into the form of OR-tools' min-cost flow, with K experts a row; z is [n], or [n, K] for K > 1."""
    from ortools.graph.python import min_cost_flow

    n, k = scores.shape
    row, expert = torch.isfinite(scores).nonzero(as_tuple=True)
    largest = float(scores[row, expert].abs().max())
    unit_cost = (-scores[row, expert].double() * (_INTEGER_RANGE / max(largest, 1e-300))).round().long().numpy()
    tails, heads = row.int().numpy(), (expert + n).int().numpy()
    capacity = np.ones(len(tails), dtype=np.int64)
    nodes = np.arange(n + k, dtype=np.int32)
    supply = np.concatenate([np.full(n, top_k, dtype=np.int64), np.full(k, -(top_k * n // k), dtype=np.int64)])

    def call() -> Any:
        flow: Any = min_cost_flow.SimpleMinCostFlow()  # its stubs misstate the arrays' types
        arcs = flow.add_arcs_with_capacity_and_unit_cost(tails, heads, capacity, unit_cost)
        flow.set_nodes_supplies(nodes, supply)
        status = flow.solve()
        if status != flow.OPTIMAL:
            raise RuntimeError(f"OR-tools ended with status {status}")
        return flow, arcs

    def read(result: Any) -> Int[Tensor, "..."]:
        flow, arcs = result
        used = torch.from_numpy(flow.flows(arcs)) == 1  # arcs are in the order of the rows
        return expert[used].reshape([n] if top_k == 1 else [n, top_k])

    return Prepared(call=call, read=read)


def _scipy(scores: Float[Tensor, "n k"]) -> Prepared:
    from scipy.optimize import linear_sum_assignment

    n, k = scores.shape
    # One column for each slot of each expert: the n x n problem that general assignment solvers need.
    slots = scores.double().repeat_interleave(n // k, dim=1).numpy()

    def read(pair: Any) -> Int[Tensor, " n"]:
        return torch.from_numpy(pair[1]) // (n // k)

    return Prepared(call=functools.partial(linear_sum_assignment, slots, maximize=True), read=read)


def _finite_cost(scores: Float[Tensor, "n k"]) -> Float64[Tensor, "n k"]:
    """Costs for solvers that know no forbidden pair: -inf becomes a cost that no optimal assignment pays.

    Replacing one forbidden pair takes at most k moves, each of which changes the value by at most the spread of the
    finite scores.
    """
    finite = scores[torch.isfinite(scores)].double()
    spread = float(finite.max() - finite.min())
    prohibitive = (scores.shape[1] + 2) * max(spread, 1e-300) - float(finite.min())
    return torch.where(torch.isfinite(scores), -scores.double(), prohibitive)


SOLVERS: tuple[Solver, ...] = (
    Solver(name="argmax", title="torch.argmax", short="argmax", role="floor", exact=False, prepare=_argmax),
    Solver(name=OURS, title=f"equipoise {OURS}", short="primal-\ndual", role="ours", prepare=_ours(OURS)),
    Solver(
        name="cycle-cancelling",
        title="equipoise cycle-cancelling",
        short="cycle-\ncancelling",
        role="ours",
        growth=_pivoting,
        prepare=_ours("cycle-cancelling"),
    ),
    Solver(
        name="auction", title="equipoise auction", short="auction", role="ours", exact=False, prepare=_ours("auction")
    ),
    Solver(name="pot", title="POT emd", short="POT", role="peer", package="ot", growth=_pivoting, prepare=_pot),
    Solver(
        name="ortools",
        title="OR-tools min-cost flow",
        short="OR-tools",
        role="peer",
        package="ortools",
        growth=_pivoting,
        relative_tolerance=1.0 / _INTEGER_RANGE,
        prepare=prepare_flow,
    ),
    Solver(
        name="scipy",
        title="scipy, repeated columns",
        short="scipy",
        role="peer",
        package="scipy",
        growth=_cubic,
        prepare=_scipy,
    ),
)
