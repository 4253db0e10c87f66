# SPDX-License-Identifier: Apache-2.0
r"""Newton steps for prices on any device, over all rows, without waiting for the device once.

The dual of the assignment problem has one variable for each expert,

.. math::
    D(p) = \sum_i \left(\text{sum of the } K \text{ largest } s_{ij} - p_j\right) + \sum_j c_j p_j.

Its slope is capacity less the rows that choose an expert. Where the price of expert j rises, rows whose K-th best offer
is j go to their next best: for each next expert t, as many as have a lead below the rise. So rows of a small lead, over
twice the width within which they were counted, are the curvature between j and t.

From prices of a small sample a few steps lead to where counts are right to a row or two. What a step depends on stays
on the device; what is summed over rows passes through an `Exchange`, so that rows may be spread over several holders.

Legend: b problems, n rows, k experts, K experts a row. An expert whose price is +inf is closed.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise.assignment._exchange import Exchange

# Newton steps; the first looks at half the rows, each next one at half as many. With six, 2 of 27 matrices of 65,536
# rows needed more contested rows, with seven none.
STEPS = 7
# Widths that a price moves at most in a step if its expert shares no rows with others. With 8, prices of heavy tails
# jump about; with 4, eight experts a row take two steps more.
FARTHEST = 6.0


def step_prices(
    scores: Float[Tensor, "b n k"],
    mask: Bool[Tensor, "b n"],
    target: Float[Tensor, "b k"],
    prices: Float[Tensor, "b k"],
    top_k: int,
    exchange: Exchange,
) -> Float[Tensor, "b k"]:
    """Moves prices to where experts have about as many rows as they should; the least becomes 0.

    Args:
        scores: -inf forbids a pair; finite for masked rows.
        mask: rows that take experts.
        target: rows that each expert may have, of all holders; 0: it is closed.
        prices: to start from; +inf for closed experts.
        top_k: K.
        exchange: sums over holders of rows.
    """
    k = scores.shape[-1]
    for number in range(STEPS):
        ranked, lead = rank_offers(scores, mask, prices, top_k)
        density, width = _density(ranked, lead, top_k, k, 0.5 ** (number + 1))
        counts = count_experts(ranked[..., :top_k], mask, k)
        rows = mask.sum(-1, keepdim=True)
        sums = exchange.reduce(torch.cat([counts, density.flatten(1), width * rows, rows], -1))
        prices = newton_step(
            prices,
            sums[:, :k] - target,
            sums[:, k:-2].unflatten(-1, [k, k]),
            sums[:, -2:-1] / sums[:, -1:].clamp_min(1.0),
            target.sum(-1, keepdim=True) > top_k * sums[:, -1:],
        )
    return prices


def _density(
    ranked: Int[Tensor, "b n r"], lead: Float[Tensor, "b n"], top_k: int, k: int, part: float
) -> tuple[Float[Tensor, "b k k"], Float[Tensor, "b 1"]]:
    """Rows that go from one expert to another for each unit of price, and the width within which this part of them is.

    A holder of few rows has a width of its own.
    """
    b, n = lead.shape
    known = lead.isfinite().sum(-1, keepdim=True)
    place = (known * part).long()
    ordered = torch.cat([lead.sort(-1).values, lead.new_zeros(b, 1)], 1)  # a holder may have no rows
    width = ordered.gather(1, torch.where(known > 0, place, n)).double().clamp(1e-150, 1e150)
    weight = torch.where(lead <= width, 0.5 / width, 0.0)
    pair = ranked[..., top_k - 1] * k + ranked[..., -1]
    density = weight.new_zeros(b, k * k).scatter_add(1, pair, weight).unflatten(-1, [k, k])
    return density + density.mT, width


def newton_step(
    prices: Float[Tensor, "b k"],
    excess: Float[Tensor, "b k"],
    density: Float[Tensor, "b k k"],
    width: Float[Tensor, "b 1"],
    slack: Bool[Tensor, "b 1"],
) -> Float[Tensor, "b k"]:
    """The prices after a Newton step.

    Args:
        prices: before it.
        excess: rows that each expert has beyond those it may have.
        density: rows that go from one expert to another for each unit of price.
        width: in whose units the step is limited.
        slack: whether some slots stay free. Then prices are at least 0, and those of experts with room end there.
    """
    fixed = prices.isinf() | slack & (prices <= 0) & (excess < 0)
    # What ties a price to where it is: an expert that shares too few rows with others moves by so many widths at most.
    held = (1 + excess.abs()) / (FARTHEST * width)
    system = torch.diag_embed(density.sum(-1) + held) - density.masked_fill(
        fixed.unsqueeze(-1) | fixed.unsqueeze(-2), 0.0
    )
    # Without the check of linalg.solve, which reads a number of the device. The system is positive definite.
    step, _ = torch.linalg.solve_ex(system, excess.masked_fill(fixed, 0.0).unsqueeze(-1))
    prices = prices + step.squeeze(-1)
    least = prices.amin(-1, keepdim=True)
    return (prices - torch.where(slack, least.clamp_min(0.0), least)).clamp_min(0.0)


def rank_offers(
    scores: Float[Tensor, "b n k"], mask: Bool[Tensor, "b n"], prices: Float[Tensor, "b k"], top_k: int
) -> tuple[Int[Tensor, "b n r"], Float[Tensor, "b n"]]:
    """The K best offers of each row and the next one, and the lead of the K-th over that.

    The lead is NaN where scores are NaN or +inf, or a row may take fewer than K experts; +inf for masked rows.
    """
    top = (scores - prices.to(scores.dtype).unsqueeze(1)).topk(min(top_k + 1, scores.shape[-1]), -1)
    last, following = top.values[..., top_k - 1], top.values[..., -1]
    lead = last - following if top_k < scores.shape[-1] else torch.full_like(last, torch.inf)
    legal = top.values[..., 0].isfinite() & last.isfinite()
    return top.indices, lead.where(legal, torch.nan).masked_fill(~mask, torch.inf)


def count_experts(z: Int[Tensor, "b n K"], rows: Bool[Tensor, "b n"] | None, k: int) -> Float[Tensor, "b k"]:
    """How many of the rows have each expert, in float64."""
    counts = torch.zeros([len(z), k + 1], dtype=torch.float64, device=z.device)
    group = z if rows is None else z.where(rows.unsqueeze(-1), k)
    one = torch.ones([], dtype=torch.float64, device=z.device)
    return counts.scatter_add(1, group.flatten(1), one.expand(group.flatten(1).shape))[:, :k]
