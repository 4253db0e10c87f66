# SPDX-License-Identifier: Apache-2.0
"""Newton's method on the k prices, with the damping that makes it safe.

The prices minimise the dual, smooth and convex in k unknowns,

    D(prices) = T sum_i log sum_j exp((x_ij - prices_j) / T) + sum_j c_j prices_j,    prices >= 0 where there is slack,

whose gradient is c - columns, and whose Hessian (1/T) (diag(columns) - P'P) is the Laplacian of a graph: the weight
between experts j and l is the overlap sum_i P_ij P_il.

Legend: b problems of a group, k columns (experts).
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from equipoise.balancing._problem import Problem, evaluate

# A step may move a price by this many temperatures at first. Grows with success, within bounds; shrinks with failure.
RADIUS = 8.0
_RADIUS_MOST = 64.0
# Seven failures in a row, each with a quarter of the step: rounding is all that is left of the gradient.
RADIUS_LEAST = 1e-3
# A problem cools by this factor once its columns are this close: the next temperature's minimum is then within reach.
_COOLING = 4.0
_COOL_BELOW = 0.3
# A step may overshoot the minimum along its direction if the slope there is this much less than at its start.
_OVERSHOOT = 0.3
# The damping that remains when the error is 0: the Laplacian alone is singular.
_DAMPING_LEAST = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Where each problem of a group stands; every field leads with b.

    Attributes:
        prices: float64 [b, k].
        columns: the column sums at these prices and this temperature, [b, k].
        overlap: P'P there, [b, k, k].
        error: the relative column error there, [b].
        temperature: falls to 1, at which the problem is the one that was posed, [b].
        radius: what a step may move, in temperatures, [b].
        iterations: evaluations so far, int64 [b].
    """

    prices: Tensor
    columns: Tensor
    overlap: Tensor
    error: Tensor
    temperature: Tensor
    radius: Tensor
    iterations: Tensor

    def take(self, keep: Tensor) -> "State":
        """The problems where `keep` (bool [b]) is True."""
        return State(*(getattr(self, field.name)[keep] for field in fields(self)))

    def put(self, where: Tensor, other: "State") -> "State":
        """The same with the problems `where` (indices) replaced by those of another state."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return State(*(mine.index_copy(0, where, theirs) for mine, theirs in pairs))


def begin(problem: Problem, prices: Tensor, temperature: Tensor, spent: Tensor | int = 0) -> State:
    """Evaluates a starting point, after `spent` evaluations elsewhere (fewer rows, fewer digits)."""
    prices = canonical(prices, problem)
    columns, overlap = evaluate(problem, prices, temperature)
    return State(
        prices=prices,
        columns=columns,
        overlap=overlap,
        error=relative_error(columns, prices, problem),
        temperature=temperature,
        radius=torch.full_like(temperature, RADIUS),
        iterations=torch.ones_like(temperature, dtype=torch.int64) + spent,
    )


def advance(problem: Problem, state: State, going: Tensor) -> State:
    """Tries one step of the problems that are `going` (bool [b]), at the cost of one evaluation, and keeps what helps.

    Where the columns are close enough to cool, the step is taken at the old temperature and judged at the new one.
    """
    free = state.prices + _newton_step(problem, state)
    free = torch.where(problem.tight, free, free.clamp(min=0))
    prices = canonical(free, problem)
    cools = (state.temperature > 1) & (state.error < _COOL_BELOW) & going
    temperature = torch.where(cools, (state.temperature / _COOLING).clamp(min=1), state.temperature)
    columns, overlap = evaluate(problem, prices, temperature)
    error = relative_error(columns, prices, problem)

    # D is convex, so its slope along the step tells descent from ascent. D itself would not: near the minimum it
    # changes by less than the rounding of a sum of n logarithms, and its slope does not.
    moved = free - state.prices
    slope_before = (moved * (problem.target - state.columns)).sum(-1)
    slope_after = (moved * (problem.target - columns)).sum(-1)
    helps = cools | (slope_after <= -_OVERSHOOT * slope_before) | (error < state.error / 2)
    grown = (state.radius * 2).clamp(max=_RADIUS_MOST)
    radius = torch.where(cools, RADIUS, torch.where(helps, grown, state.radius / 4))
    fresh = State(
        prices=prices,
        columns=columns,
        overlap=overlap,
        error=error,
        temperature=temperature,
        radius=torch.where(going, radius, state.radius),
        iterations=state.iterations + going,
    )
    keep = helps & going
    return fresh if bool(keep.all()) else _mixed(fresh, state, keep)


def _mixed(fresh: State, state: State, keep: Tensor) -> State:
    """Undoes the step of the problems that are not to `keep` it."""
    return replace(
        fresh,
        prices=torch.where(keep[:, None], fresh.prices, state.prices),
        columns=torch.where(keep[:, None], fresh.columns, state.columns),
        overlap=torch.where(keep[:, None, None], fresh.overlap, state.overlap),
        error=torch.where(keep, fresh.error, state.error),
    )


def _newton_step(problem: Problem, state: State) -> Tensor:
    """Solves (Laplacian + m diag(c)) step = T (columns - c) for the columns that are free to move.

    The matrix is an M-matrix whose rows sum to at least m c, so its inverse is nonnegative and the largest entry of
    the step is at most T (relative error) / m. With m = (relative error) / radius this is radius * T: the damping caps
    the step, removes the null direction (adding a constant to all prices) and, as it vanishes with the error, keeps
    the convergence quadratic. A column at price 0 that is below its target stays where it is.
    """
    excess = state.columns - problem.target
    free = (problem.tight | (state.prices > 0) | (excess > 0)).to(excess.dtype)
    # c^(-1/2) on both sides: a diagonal of order 1, whatever the capacities.
    scale = free * problem.target.rsqrt()
    damping = (state.error / state.radius).clamp(min=_DAMPING_LEAST)[:, None]
    matrix = laplacian(state.overlap) * (scale[..., None] * scale[:, None])
    matrix.diagonal(dim1=-2, dim2=-1).add_(torch.where(free > 0, damping, 1.0))
    factor, _ = torch.linalg.cholesky_ex(matrix)
    solution = torch.cholesky_solve((scale * excess)[..., None], factor)[..., 0]
    return state.temperature[:, None] * scale * solution


def laplacian(overlap: Tensor) -> Tensor:
    """diag(columns) - P'P, built from the overlaps between different experts alone.

    The rows of P sum to 1, so a column's sum less its overlap with itself is the sum of its overlaps with the others:
    no cancellation, however sharp P is.
    """
    between = overlap - torch.diag_embed(overlap.diagonal(dim1=-2, dim2=-1))
    return torch.diag_embed(between.sum(-1)) - between


def relative_error(columns: Tensor, prices: Tensor, problem: Problem) -> Tensor:
    """The largest |columns - c| / c; only an excess counts where a price of 0 leaves the column below its target."""
    relative = columns / problem.target - 1
    return torch.where(problem.tight | (prices > 0), relative.abs(), relative).amax(-1).clamp(min=0)


def canonical(prices: Tensor, problem: Problem) -> Tensor:
    """Prices >= 0: shifted so that the least is 0 where every column is tight, else cut off at 0."""
    least = torch.where(problem.tight, prices, torch.inf).amin(-1, keepdim=True)
    return torch.where(problem.tight, prices - least, prices.clamp(min=0))
