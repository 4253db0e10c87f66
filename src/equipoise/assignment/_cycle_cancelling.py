# SPDX-License-Identifier: Apache-2.0
"""Cycle cancelling, the paper's exact solver (App. D.2): pure tensor operations, a batch at a time, on any device.

An assignment is optimal if and only if no cycle of moves between experts has a negative cost. So: start from the
auction, find negative cycles in the graph of k experts, move rows along them, and repeat until there is none. The paper
cancels the first cycle that Floyd-Warshall meets. Here a round cancels several disjoint ones, which Bellman-Ford finds
at once (`ops.negative_cycles`).

**Exact arithmetic.** A computed cost of -1e-16 may be a negative cycle or rounding error, and where ties abound cycles
cost zero but for rounding (with all rows identical all of them do). So scores are first rounded to integers of
53 - log2(2 k) bits: sums of up to 2 k of them are exact in float64, zero is zero, and "negative" means at least one
unit of about 1e-14 of the scale, far less than 1e-12 of it. Where that is too coarse (one score of 1e30 among scores of
1), the certificate says so, and the rest is solved again in finer units: see `_refine`.

Legend: b problems, n rows (datapoints), k columns (experts). z = k is a row without an expert; `rows` is True for rows
that must have one.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise.assignment._auction import auction_start
from equipoise.assignment._move_cost import move_cost, rank_movers, relax_prices
from equipoise.assignment._proof import certify
from equipoise.ops import count_groups, negative_cycles

# Each pass shrinks the unit by about 1e-14, so four reach from the largest float32 to the smallest that matters beside
# it.
_MAX_PASSES = 4

# The sum of n terms, each a difference of scores and prices, is not resolved below this many times their magnitude.
_ROUNDING = 2.0**-49


def cycle_cancelling(
    scores: Float[Tensor, "b n k"],
    capacity: Int[Tensor, "b k"],
    mask: Bool[Tensor, "b n"] | None,
    prices: Float[Tensor, "b k"] | None,
) -> tuple[Int[Tensor, "b n"], Float[Tensor, "b k"]]:
    r"""Solves the assignment problem exactly by cancelling negative cycles, App. D.2.

    1. Start from the auction.
    2. Compute the cost :math:`d_{jj'}` of moving the cheapest row (or a free slot) from j to j'.
    3. Look for negative cycles among the k experts, several that have no expert in common.
    4. If there is none, the assignment is optimal.
    5. Else move rows along the cycles, as many as they pay for, and go to 2.

    Every round strictly raises an integer (the value, in units of the grid) that is bounded, so this ends, ties or not.
    Problems of a batch take their steps together, and leave it when they are optimal.

    Args:
        scores: any floating dtype; -inf forbids a pair.
        capacity: rows that each expert may take, enough for all rows together.
        mask: rows that must have an expert; None: all.
        prices: finite prices for the auction to start from; None: 0.

    Returns:
        The expert of each row (k where it is masked), and optimal prices >= 0: 0 for every expert with a free slot, and
        the least is 0 when none has one.

    Raises:
        ValueError: a score is NaN or +inf, or nothing feasible is left by those that are -inf.

    References:
        Kool, Maddison, Mnih (2021), appendix D.2.
        Klein, A primal method for minimal cost flows (1967).
    """
    rows = torch.ones(scores.shape[:2], dtype=torch.bool, device=scores.device) if mask is None else mask
    z, _ = auction_start(scores, capacity, rows, prices)
    if z.numel() == 0:
        return z, capacity.new_zeros(capacity.shape, dtype=torch.float64)
    wide = scores.double().masked_fill(~rows.unsqueeze(-1), 0.0)
    z = _cancel_cycles(_to_grid(wide), z, capacity)
    return _refine(wide, z, _dual_prices(wide, z, capacity), capacity, rows)


def _to_grid(scores: Float[Tensor, "b n k"]) -> Float[Tensor, "b n k"]:
    """Rounds scores to integers, so small that sums of 2 k of them are exact, after a shift of each row and a factor.

    Only differences within a row matter, so each is shifted to a maximum of 0. The result is between -2^bits and 0.
    """
    bits = 53 - (2 * scores.shape[-1] - 1).bit_length()
    shifted = scores - scores.amax(-1, keepdim=True)
    scale = shifted.where(shifted > -torch.inf, 0.0).amin((1, 2), keepdim=True)
    exponent = torch.frexp(scale).exponent.double().clamp(min=-1000)  # 2^1000 is still a float64
    return (shifted * torch.exp2(-exponent)).mul_(2.0**bits).round_()


def _cancel_cycles(
    scores: Float[Tensor, "b n k"], z: Int[Tensor, "b n"], capacity: Int[Tensor, "b k"]
) -> Int[Tensor, "b n"]:
    """Cancels negative cycles of every problem that has some, until none has; scores are on the grid."""
    result = z.clone()
    problems = torch.arange(len(z), device=z.device)
    while len(problems):
        z, cancelled = _cancel_once(scores, z, capacity)
        moved = (cancelled < scores.shape[-1]).any(-1)
        if not bool(moved.all()):
            result.index_copy_(0, problems[~moved], z[~moved])
            problems, scores, z, capacity = problems[moved], scores[moved], z[moved], capacity[moved]
    return result


def _cancel_once(
    scores: Float[Tensor, "b n k"], z: Int[Tensor, "b n"], capacity: Int[Tensor, "b k"], most: int | None = None
) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b k"]]:
    """Takes one step of every problem: finds disjoint negative cycles, moves along them, and returns them as well.

    Off the grid a cycle could be found that is not negative. Then nothing moves along it, and the problem leaves the
    loop with a gap that says so.
    """
    k = scores.shape[-1]
    counts = count_groups(z, k + 1)[:, :-1]
    successor = negative_cycles(move_cost(scores, z, capacity, counts))
    z, moved = _move_along_cycles(scores, z, capacity, counts, successor, most)
    return z, successor.where(moved.unsqueeze(-1), k)


def count_cycles(
    scores: Float[Tensor, "b n k"], capacity: Int[Tensor, "b k"], *, most: int | None = None
) -> Int[Tensor, " b"]:
    """Counts the improvements that `cycle_cancelling` makes after the auction, for those who study it.

    Args:
        scores: any floating dtype; -inf forbids a pair.
        capacity: rows that each expert may take, enough for all rows together.
        most: rows that a cycle moves out of each of its experts: 1 is the paper's step; None, what the solver does, is
            as many as it pays for.

    Returns:
        The number of cycles cancelled in each problem.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> count_cycles(scores, torch.ones(1, 2, dtype=torch.int64))  # the auction's start is optimal
        tensor([0])
    """
    rows = torch.ones(scores.shape[:2], dtype=torch.bool, device=scores.device)
    z, _ = auction_start(scores, capacity, rows, None)
    grid = _to_grid(scores.double())
    cycles = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    while True:
        z, successor = _cancel_once(grid, z, capacity, most)
        cancelled = _number_of_cycles(successor)
        if not bool(cancelled.any()):
            return cycles
        cycles += cancelled


def _number_of_cycles(successor: Int[Tensor, "b k"]) -> Int[Tensor, "b"]:
    """Counts cycles: each has one node that is the lowest of those that walks from it visit."""
    k = successor.shape[-1]
    own = torch.arange(k, device=successor.device).expand_as(successor)
    lowest, jump = own, successor.where(successor < k, own)
    for _ in range((k - 1).bit_length()):
        lowest, jump = torch.minimum(lowest, lowest.gather(-1, jump)), jump.gather(-1, jump)
    return ((lowest == own) & (successor < k)).sum(-1)


def _move_along_cycles(
    scores: Tensor, z: Tensor, capacity: Tensor, counts: Tensor, successor: Tensor, most: int | None = None
) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b"]]:
    """Moves rows along the cycles of each problem, App. D.2, step 5, as many from each expert as lower the cost.

    What the t-th unit around the cycles costs is the sum over their experts of the t-th cheapest moves, free slots at 0
    among them. It grows with t, so units are moved while it is negative. The first is that of the cycles themselves,
    hence negative; more than one pays where rows are tied or nearly so, which would take as many rounds otherwise.

    `most` caps the units; at 1 each cycle is the paper's step to the letter.

    Returns:
        The new assignment, and whether anything moved.
    """
    n, k = scores.shape[1:]
    target, loss, rank = rank_movers(scores, z, successor)
    # An expert's free slots come before its rows that lose by moving.
    free = torch.cat([capacity - counts, torch.zeros_like(counts[:, :1])], -1).gather(-1, z)
    rank = torch.where(loss < 0, rank, rank + free).clamp_(max=n)
    marginal = scores.new_zeros([len(z), n + 1]).scatter_add_(-1, rank, loss.where(target < k, 0.0))
    # Expert j has c_j rows and free slots to move, and the cycles as many units as the smallest of their experts.
    limit = capacity.where(successor < k, n).amin(-1, keepdim=True)
    if most is not None:
        limit = limit.clamp_max(most)
    unit = torch.arange(n + 1, device=z.device)
    units = ((marginal < 0) & (unit < limit)).sum(-1, keepdim=True)
    return z.where((target == k) | (rank >= units), target), units.squeeze(-1) > 0


def _dual_prices(
    scores: Float[Tensor, "b n k"], z: Int[Tensor, "b n"], capacity: Int[Tensor, "b k"]
) -> Float[Tensor, "b k"]:
    """Computes prices that prove z optimal: the cost of the cheapest chain of moves that starts at each expert.

    p_j = min_t path_cost[j, t] satisfies p_j <= d_jj' + p_j', which says that no row of j prefers j'. An expert with a
    free slot has d_jj' <= 0 for all j', so its price is the least of all, and the shift makes it 0. The empty chain
    costs 0, so all prices are finite, those of experts without rows included.
    """
    counts = count_groups(z, scores.shape[-1] + 1)[:, :-1]
    cost = move_cost(scores, z, capacity, counts)
    prices = relax_prices(cost, cost.new_zeros(capacity.shape))
    return (prices - prices.amin(-1, keepdim=True)).masked_fill(counts < capacity, 0.0)


def _refine(
    scores: Tensor, z: Tensor, prices: Tensor, capacity: Tensor, rows: Tensor
) -> tuple[Int[Tensor, "b n"], Float[Tensor, "b k"]]:
    """Solves again, in finer units, the problems whose gap the grid left above rounding error.

    A pair (i, j) at which row i would lose more than the gap, max_j' (s_ij' - p_j') - (s_ij - p_j) > gap, is in no
    better assignment: its value would be farther below the dual value than the present one. Without those pairs the
    scores of a row differ by no more than prices do and the gap, and that is the scale of the finer grid.
    """
    for _ in range(_MAX_PASSES):
        gap = certify(scores, z, prices, capacity, rows).gap
        expert = z.clamp(max=scores.shape[-1] - 1).unsqueeze(-1)
        # Rows that are masked have scores of 0 here, and add at most a price to the magnitude.
        terms = scores.gather(-1, expert).squeeze(-1).abs() + prices.gather(-1, expert.squeeze(-1))
        coarse = (gap > _ROUNDING * terms.sum(-1)).nonzero().squeeze(-1)
        if len(coarse) == 0:
            break
        offer = scores[coarse] - prices[coarse].unsqueeze(1)
        possible = (offer.amax(-1, keepdim=True) - offer <= gap[coarse, None, None]).scatter_(-1, expert[coarse], True)
        finer = _cancel_cycles(_to_grid(scores[coarse].where(possible, -torch.inf)), z[coarse], capacity[coarse])
        z = z.index_copy(0, coarse, finer)
        prices = prices.index_copy(0, coarse, _dual_prices(scores[coarse], finer, capacity[coarse]))
    return z, prices
