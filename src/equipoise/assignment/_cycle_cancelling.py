# SPDX-License-Identifier: Apache-2.0
"""Cycle cancelling: the paper's exact solver, batched and vectorised.

Legend: b problems, n rows (datapoints), k columns (experts). z = k is a row without an expert; `rows` is True for rows
that must have one.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise.assignment._auction import auction_start
from equipoise.assignment._cycles import cancel_cycles
from equipoise.assignment._move_cost import at_rest, move_cost, relax_prices
from equipoise.assignment._proof import certify
from equipoise.ops import count_groups

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

    Scores are rounded to a grid first, so that sums are exact. Every round then raises an integer that is bounded, the
    value in units of the grid, so this ends, ties or not. Problems whose gap is above rounding error are solved again
    in finer units: a pair (i, j) at which row i would lose more than the gap, :math:`\max_{j'} (s_{ij'} - p_{j'}) -
    (s_{ij} - p_j) > \text{gap}`, is in no better assignment, as its value would be farther below the dual value than
    the present one. Without those pairs the scores of a row differ by no more than prices do and the gap, and that is
    the scale of the finer grid.

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
    optimal = scores.new_zeros(capacity.shape, dtype=torch.float64)
    if z.numel() == 0:
        return z, optimal
    wide, expert = scores.double().masked_fill(~rows.unsqueeze(-1), 0.0), z.clamp(max=scores.shape[-1] - 1)
    gap, problems = optimal.new_full([len(z)], torch.inf), torch.arange(len(z), device=z.device)
    for _ in range(_MAX_PASSES):
        part, size = wide[problems], capacity[problems]
        offer = part - optimal[problems].unsqueeze(1)
        possible = offer.amax(-1, keepdim=True) - offer <= gap[problems, None, None]
        possible.scatter_(-1, expert[problems].unsqueeze(-1), True)
        z[problems] = cancel_cycles(to_grid(part.where(possible, -torch.inf)), z[problems], size)
        optimal[problems] = _dual_prices(part, z[problems], size)
        *_, optimal, gap = certify(wide, z, optimal, capacity, rows)
        expert = z.clamp(max=scores.shape[-1] - 1)
        # Masked rows have scores of 0 here, and add at most a price to the magnitude.
        terms = wide.gather(-1, expert.unsqueeze(-1)).squeeze(-1).abs() + optimal.gather(-1, expert)
        problems = (gap > _ROUNDING * terms.sum(-1)).nonzero().squeeze(-1)
        if len(problems) == 0:
            break
    return z, optimal


def to_grid(scores: Float[Tensor, "b n k"]) -> Float[Tensor, "b n k"]:
    """Shifts rows to a maximum of 0, and rounds them to integers, in units such that sums of 2 k of them are exact."""
    bits = 53 - (2 * scores.shape[-1] - 1).bit_length()
    shifted = scores - scores.amax(-1, keepdim=True)
    scale = shifted.where(shifted > -torch.inf, 0.0).amin((1, 2), keepdim=True)
    exponent = torch.frexp(scale).exponent.double().clamp(min=-1000)  # 2^1000 is still a float64
    return (shifted * torch.exp2(-exponent)).mul_(2.0**bits).round_()


def _dual_prices(
    scores: Float[Tensor, "b n k"], z: Int[Tensor, "b n"], capacity: Int[Tensor, "b k"]
) -> Float[Tensor, "b k"]:
    """Computes prices that prove z optimal: the cost of the cheapest chain of moves that starts at each expert.

    p_j = min_t path_cost[j, t] satisfies p_j <= d_jj' + p_j', which says that no row of j prefers j'. An expert with a
    free slot has d_jj' <= 0 for all j', so its price is the least of all, and the shift makes it 0.
    """
    counts = count_groups(z, scores.shape[-1] + 1)[:, :-1]
    cost = move_cost(scores, z, capacity, counts)
    return at_rest(relax_prices(cost, torch.zeros_like(cost[..., 0])), counts, capacity)
