# SPDX-License-Identifier: Apache-2.0
r"""Prices on any device: Newton steps on the smoothed dual of all rows, without waiting for the device once.

The dual of the assignment problem has one variable for each expert,

.. math::
    D(p) = \sum_i \left(\text{sum of the } K \text{ largest } s_{ij} - p_j\right) + \sum_j c_j p_j.

Smoothed over a width mu, row i takes shares x_ij that sum to K. For K = 1 they are the softmax of its offers over mu;
for K > 1 they are sigmoid((s_ij - p_j - t_i) / mu) with t_i such that they sum to K. The gradient of D is capacity -
demand with demand_j = sum_i x_ij. With w = x for K = 1 and w = x (1 - x) else, and |w| their sum in a row, the pair of
experts (j, t) has the curvature -sum_i w_ij w_it / |w_i| / mu.

The number of passes is fixed, and what a step depends on stays on the device. Prices found here decide how many rows
are contested, never what is found.

What is summed over rows passes through an `Exchange`, so that rows may be spread over several holders.

Legend: b problems, n rows, k experts, K experts a row. An expert whose price is +inf is closed.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise.assignment._exchange import Exchange

# mu as a part of how far offers differ, from much smoothing to little. Each is 2.5 times the next.
WIDTHS = (0.5, 0.2, 0.08, 0.032, 0.0128)
# Where prices are given, much smoothing would only forget them.
WARM_WIDTHS = WIDTHS[2:]
# Newton steps at each width, and at the first of them.
STEPS, FIRST_STEPS = 2, 4
# Sinkhorn's steps before: where an expert has hardly a row, or nearly all of them, Newton's model does not hold.
OPENING_STEPS = 3
# Newton steps in the end, with the experts that rows really take in place of shares.
HARD_STEPS = 3
# Rows that tell how far offers differ.
SPREAD_ROWS = 256
# In units of mu: how far apart a step may move two experts; and how far an expert may move that shares too few rows.
FARTHEST, ALONE = 4.0, 1.5
# What ties every price to where it is, as a part of the expert's rows: it decides only where rows are few.
ANCHOR = 1e-3
# Newton's steps for the threshold of a row's shares, K > 1.
THRESHOLD_STEPS = 4


class Demand(NamedTuple):
    """What rows take at some prices, summed over rows.

    Attributes:
        shares: [b, k] how many rows each expert has, in shares.
        pairs: [b, k, k] mu times the curvature between two experts, with any diagonal.
    """

    shares: Float[Tensor, "b k"]
    pairs: Float[Tensor, "b k k"]


class Start(NamedTuple):
    """Where the exact part starts.

    Attributes:
        prices: [b, k]; +inf for closed experts.
        radius: [b] how far two prices may still move apart, as far as the last step tells.
        passes: how often all scores were read.
    """

    prices: Float[Tensor, "b k"]
    radius: Float[Tensor, "b"]
    passes: int


def find_prices(
    scores: Float[Tensor, "b n k"],
    mask: Bool[Tensor, "b n"] | None,
    target: Float[Tensor, "b k"],
    free: Float[Tensor, "b"],
    top_k: int,
    given: Float[Tensor, "b k"] | None,
    exchange: Exchange,
) -> Start:
    """Finds prices at which experts have about as many rows as they should.

    Args:
        scores: -inf forbids a pair; finite for masked rows.
        mask: rows that take experts; None: all.
        target: rows that each expert should have, those of all holders, free slots included; 0: it is closed.
        free: free slots, which count as so many rows that score 0 for every expert.
        top_k: K.
        given: prices to start from.
        exchange: sums over holders of rows.
    """
    closed = target <= 0
    spread = spread_of_offers(scores, mask, top_k, exchange)
    prices = (torch.zeros_like(target) if given is None else given.double()).masked_fill(closed, torch.inf)
    passes = 0
    if given is None:
        mu = WIDTHS[0] * spread
        for _ in range(OPENING_STEPS):
            demand = smoothed_demand(scores, mask, free, prices, mu, top_k, exchange)
            grown = (demand.shares.clamp_min(1e-3) / target.clamp_min(1e-3)).log()
            prices = lowered(prices + mu.unsqueeze(-1) * grown)
        passes += OPENING_STEPS
    demand, mu = None, spread
    for number, width in enumerate(WIDTHS if given is None else WARM_WIDTHS):
        mu = width * spread
        for _ in range(STEPS if number else FIRST_STEPS):
            demand = smoothed_demand(scores, mask, free, prices, mu, top_k, exchange)
            prices = lowered(prices + newton_step(demand.shares, demand.pairs, target, mu))
            passes += 1
    assert demand is not None
    apart = torch.zeros_like(mu)
    for _ in range(HARD_STEPS):
        z, _ = best_experts(scores, prices, top_k)
        counts = exchange.reduce(count_experts(z, mask, target.shape[-1]))
        slots = free_shares(prices, mu) * free.unsqueeze(-1)
        step = newton_step(counts + slots, demand.pairs, target, mu)
        # An expert that has a free slot, and would have one at a slightly lower price, has price 0 in the end.
        idle = (counts < target) & (slots >= 1.0)
        prices = lowered(prices + step).masked_fill(idle, 0.0)
        apart = step.masked_fill(idle, 0.0)
        apart = apart.amax(-1) - apart.amin(-1)
    return Start(prices, apart, passes + HARD_STEPS)


def lowered(prices: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
    """Shifts prices so that the least is 0."""
    return prices - prices.amin(-1, keepdim=True)


def spread_of_offers(
    scores: Float[Tensor, "b n k"], mask: Bool[Tensor, "b n"] | None, top_k: int, exchange: Exchange
) -> Float[Tensor, "b"]:
    """How far offers differ that a row might take: the best and the one of the upper quartile, in the median row.

    From a few rows of each holder, and averaged over holders. Not the mean over rows: many routers bar an expert with a
    huge negative score.
    """
    n, k = scores.shape[-2:]
    few = scores[:, :: max(1, n // SPREAD_ROWS)]
    rank = min(k, top_k + 1 + (k - top_k) // 4)
    top = few.topk(rank, -1).values.double()
    apart = top[..., 0] - top[..., -1]
    legal = apart.isfinite()
    if mask is not None:
        legal = legal & mask[:, :: max(1, n // SPREAD_ROWS)]
    middle = apart.where(legal, torch.nan).nanmedian(-1).values if n else apart.new_full([len(scores)], torch.nan)
    known = middle.isfinite()
    total = exchange.reduce(torch.stack([middle.where(known, 0.0), known.double()]))
    return total[0] / total[1].clamp_min(1.0)


def smoothed_demand(
    scores: Float[Tensor, "b n k"],
    mask: Bool[Tensor, "b n"] | None,
    free: Float[Tensor, "b"],
    prices: Float[Tensor, "b k"],
    mu: Float[Tensor, "b"],
    top_k: int,
    exchange: Exchange,
) -> Demand:
    """Sums shares and curvature over all rows and free slots: one pass over the scores."""
    width = mu.to(scores.dtype)[:, None, None].clamp_min(torch.finfo(scores.dtype).tiny)
    offers = scores - prices.to(scores.dtype).unsqueeze(1)
    x, weight, total = row_shares(offers, width, top_k)
    if mask is not None:
        x, weight = x * mask.unsqueeze(-1), weight * mask.unsqueeze(-1)
    k = scores.shape[-1]
    sums = torch.cat([x.sum(1, dtype=torch.float64).unsqueeze(1), (weight.mT @ (weight / total)).double()], 1)
    sums = exchange.reduce(sums)
    slots = free_shares(prices, mu)
    count = free[:, None, None]
    return Demand(
        sums[:, 0] + free.unsqueeze(-1) * slots, sums[:, 1 : k + 1] + count * slots.unsqueeze(1) * slots.unsqueeze(2)
    )


def row_shares(
    offers: Float[Tensor, "b n k"], mu: Float[Tensor, "b 1 1"], top_k: int
) -> tuple[Float[Tensor, "b n k"], Float[Tensor, "b n k"], Float[Tensor, "b #n 1"]]:
    """Shares that sum to K in every row, weights w so that a pair's curvature is -w_j w_t / total / mu, and that total.

    Example:
        >>> x, _, _ = row_shares(torch.tensor([[[2.0, 1.0, -99.0]]]), torch.ones(1, 1, 1), 2)
        >>> round(x.sum().item(), 6), x.round(decimals=2).tolist()
        (2.0, [[[1.0, 1.0, 0.0]]])
    """
    if top_k == 1:
        x = ((offers - offers.amax(-1, keepdim=True)) / mu).softmax(-1)
        return x, x, torch.ones_like(mu)
    if top_k == offers.shape[-1]:
        return torch.ones_like(offers), torch.zeros_like(offers), torch.ones_like(mu)
    top = offers.topk(top_k + 1, -1).values[..., -2:]
    last, following = top[..., :1], top[..., 1:]
    # Where a row may take no more than K experts, a threshold far below all of them.
    threshold = torch.where(following.isfinite(), (last + following) / 2, last - 20 * mu)
    x = ((offers - threshold) / mu).sigmoid()
    for _ in range(THRESHOLD_STEPS):
        total = (x * (1 - x)).sum(-1, keepdim=True)
        excess = x.sum(-1, keepdim=True) - top_k
        threshold = threshold + mu * (excess / total.clamp_min(0.05)).clamp(-3, 3)
        x = ((offers - threshold) / mu).sigmoid()
    weight = x * (1 - x)
    total = weight.sum(-1, keepdim=True).clamp_min(1e-6)
    return x * (top_k / x.sum(-1, keepdim=True)), weight, total


def free_shares(prices: Float[Tensor, "b k"], mu: Float[Tensor, "b"]) -> Float[Tensor, "b k"]:
    """The experts at which a free slot is, in shares that sum to 1: those whose price is near the least."""
    width = mu.clamp_min(torch.finfo(torch.float64).tiny).unsqueeze(-1)
    return (-prices / width).softmax(-1)


def newton_step(
    counts: Float[Tensor, "b k"], pairs: Float[Tensor, "b k k"], target: Float[Tensor, "b k"], mu: Float[Tensor, "b"]
) -> Float[Tensor, "b k"]:
    """The Newton step for the prices, limited in all; 0 for closed experts.

    Args:
        counts: rows that each expert has.
        pairs: mu times the curvature between two experts.
        target: rows that each expert should have.
        mu: the width.
    """
    closed = target <= 0
    apart = pairs - torch.diag_embed(pairs.diagonal(dim1=-2, dim2=-1))
    own = apart.sum(-1)
    excess = (counts - target).masked_fill(closed, 0.0)
    # An expert that shares too few rows to mend its excess by a step of a few mu is held back.
    held = torch.maximum(ANCHOR * target + 1e-9, excess.abs() / ALONE - own).masked_fill(closed, 1.0)
    system = torch.diag_embed(own + held) - apart
    # Without the check of linalg.solve, which reads a number of the device. The system is positive definite.
    step, _ = torch.linalg.solve_ex(system, excess.unsqueeze(-1))
    step = step.squeeze(-1)
    longest = step.amax(-1, keepdim=True) - step.amin(-1, keepdim=True)
    return step * mu.unsqueeze(-1) * (FARTHEST / longest.clamp_min(FARTHEST))


def best_experts(
    scores: Float[Tensor, "b n k"], prices: Float[Tensor, "b k"], top_k: int
) -> tuple[Int[Tensor, "b n K"], Float[Tensor, "b n"]]:
    """The K best offers of each row, and the lead of the K-th over the next.

    The lead is NaN where scores are NaN or +inf, or a row may take fewer than K experts.
    """
    k = scores.shape[-1]
    offers = scores - prices.to(scores.dtype).unsqueeze(1)
    top = offers.topk(min(top_k + 1, k), -1)
    last = top.values[..., top_k - 1]
    legal = top.values[..., 0].isfinite() & last.isfinite()
    lead = last - top.values[..., top_k] if top_k < k else torch.full_like(last, torch.inf)
    return top.indices[..., :top_k], lead.where(legal, torch.nan)


def count_experts(z: Int[Tensor, "b n K"], rows: Bool[Tensor, "b n"] | None, k: int) -> Float[Tensor, "b k"]:
    """How many of the rows have each expert, in float64."""
    counts = torch.zeros([len(z), k + 1], dtype=torch.float64, device=z.device)
    group = z if rows is None else z.where(rows.unsqueeze(-1), k)
    one = torch.ones([], dtype=torch.float64, device=z.device)
    return counts.scatter_add(1, group.flatten(1), one.expand(group.flatten(1).shape))[:, :k]
