# SPDX-License-Identifier: Apache-2.0
"""The solvers that are compared, ours and the peers', behind one face.

A solver is *prepared* for a score matrix outside the timer (copies, conversions, integer costs) and gives a call that
is timed. Reading the assignment out of what the call returned is not timed either. Both rules favour the peers, which
want other types than a router has and return more than an assignment.

The problem is always the tight one, n = k c with capacity c for each expert, because that is what all of them can do.

Legend: n rows (datapoints), k columns (experts), c = n / k.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
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


@dataclass(frozen=True, slots=True)
class Prepared:
    """A problem in a solver's own form: `call` is timed, `read` turns what it returned into z."""

    call: Callable[[], Any]
    read: Callable[[Any], Int[Tensor, "..."]]


@dataclass(frozen=True, slots=True)
class Solver:
    """A way to assign rows to experts."""

    name: str  # in the results
    title: str  # in figures and progress
    short: str  # in tables
    role: Role  # "floor": no balancing at all
    prepare: Callable[[Float[Tensor, "n k"]], Prepared]  # puts a score matrix into the solver's form
    _: KW_ONLY
    exact: bool = True  # whether it claims an optimal assignment
    package: str | None = None  # module that must be importable; None: one of our own dependencies
    growth: tuple[float, float] = (1.0, 1.0)  # exponents of time in n and k, to foresee what would exceed the budget
    relative_tolerance: float = 1e-9  # of its costs: how far from optimal, per row, relative to the largest score


def _argmax(scores: Float[Tensor, "n k"]) -> Prepared:
    return Prepared(lambda: torch.argmax(scores, -1), lambda z: z)


def _ours(method: str, short: str, **how: Any) -> Solver:
    def prepare(scores: Float[Tensor, "n k"]) -> Prepared:
        return Prepared(lambda: eq.assign(scores, method=method), lambda assignment: assignment.z)

    return Solver(method, f"equipoise {method}", short, "ours", prepare, **how)


def _pot(scores: Float[Tensor, "n k"]) -> Prepared:
    import ot

    n, k = scores.shape
    emd: Callable[..., Any] = ot.emd
    cost, rows, experts = _finite_cost(scores).numpy(), np.ones(n), np.full(k, n / k)
    return Prepared(
        lambda: emd(rows, experts, cost, numItermax=_MAX_PIVOTS), lambda plan: torch.from_numpy(plan).argmax(-1)
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

    return Prepared(call, read)


def _scipy(scores: Float[Tensor, "n k"]) -> Prepared:
    from scipy.optimize import linear_sum_assignment

    n, k = scores.shape
    # One column for each slot of each expert: the n x n problem that general assignment solvers need.
    slots = scores.double().repeat_interleave(n // k, dim=1).numpy()
    call = partial(linear_sum_assignment, slots, maximize=True)
    return Prepared(call, lambda pair: torch.from_numpy(pair[1]) // (n // k))


def _finite_cost(scores: Float[Tensor, "n k"]) -> Float64[Tensor, "n k"]:
    """Costs for solvers that know no forbidden pair: -inf becomes a cost that no optimal assignment pays.

    Replacing one forbidden pair takes at most k moves, each of which changes the value by at most the spread of the
    finite scores.
    """
    finite = scores[torch.isfinite(scores)].double()
    spread = float(finite.max() - finite.min())
    prohibitive = (scores.shape[1] + 2) * max(spread, 1e-300) - float(finite.min())
    return torch.where(torch.isfinite(scores), -scores.double(), prohibitive)


_PIVOTING, _CUBIC = (1.5, 1.0), (3.0, 0.0)
FLOW = Solver(
    "ortools",
    "OR-tools min-cost flow",
    "OR-tools",
    "peer",
    prepare_flow,
    package="ortools",
    growth=_PIVOTING,
    relative_tolerance=1.0 / _INTEGER_RANGE,
)
SOLVERS: tuple[Solver, ...] = (
    Solver("argmax", "torch.argmax", "argmax", "floor", _argmax, exact=False),
    _ours(OURS, "primal-\ndual"),
    _ours("cycle-cancelling", "cycle-\ncancelling", growth=_PIVOTING),
    _ours("auction", "auction", exact=False),
    Solver("pot", "POT emd", "POT", "peer", _pot, package="ot", growth=_PIVOTING),
    FLOW,
    Solver("scipy", "scipy, repeated columns", "scipy", "peer", _scipy, package="scipy", growth=_CUBIC),
)
