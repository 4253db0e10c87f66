# SPDX-License-Identifier: Apache-2.0
"""Prove: at the final prices, which rows have a better offer? For any K, on any device, for rows of several holders.

Legend: b problems, n rows, k experts, K experts a row. z = k is a row without an expert.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise.assignment._exchange import Alone, Exchange
from equipoise.assignment._price_steps import count_experts

# Entries of the matrix that are turned into float64 at once.
BLOCK_ENTRIES = 1 << 22


class Proof(NamedTuple):
    """What is known of an assignment at some prices; sums are over the rows of all holders.

    Attributes:
        z: [b, n, K] the experts of each row, best offer first.
        missed: [b, n] what each row misses: its K best offers less those it has.
        counts: [b, k] rows that each expert has.
        value: [b] the sum of the scores assigned.
        largest: [b] the largest of them, without sign.
        prices: [b, k], with those of closed experts.
        gap: [b] what rows miss and free slots cost.
    """

    z: Int[Tensor, "b n K"]
    missed: Float[Tensor, "b n"]
    counts: Int[Tensor, "b k"]
    value: Float[Tensor, "b"]
    largest: Float[Tensor, "b"]
    prices: Float[Tensor, "b k"]
    gap: Float[Tensor, "b"]


def prove(
    scores: Float[Tensor, "b n k"],
    mask: Bool[Tensor, "b n"] | None,
    z: Int[Tensor, "b n K"],
    prices: Float[Tensor, "b k"],
    capacity: Int[Tensor, "b k"],
    exchange: Exchange,
) -> Proof:
    r"""Computes the value of an assignment, and the gap to the dual value of the prices, in float64.

    .. math::
        \sum_i \left[\text{sum of the } K \text{ largest } (s_{ij} - p_j) - \sum_{j \in z_i} (s_{ij} - p_j)\right]
        + \sum_j (c_j - n_j) p_j.

    By weak duality no assignment is better than this one by more than the gap, whatever the prices. Value and dual
    value are sums over all rows, nearly equal at an optimum, and their difference would be rounding error. Written like
    this, each term is >= 0, and exactly 0 where it is 0: both sets of offers are in order when they are subtracted.

    Args:
        scores: -inf forbids a pair; finite for masked rows.
        mask: rows that take experts; None: all.
        z: the experts of each row, anything for masked rows.
        prices: >= 0. Closed experts, those of capacity 0, get the least price at which no row would rather have them.
        capacity: of all holders' rows together.
        exchange: sums over holders.
    """
    b, n, k = scores.shape
    closed = capacity == 0
    open_prices = prices.masked_fill(closed, torch.inf)
    size = max(1, BLOCK_ENTRIES // max(1, b * k))
    blocks = [slice(i, i + size) for i in range(0, max(n, 1), size)]
    parts = [_read_block(scores[:, i], mask if mask is None else mask[:, i], z[:, i], open_prices) for i in blocks]
    zs, misses, values, most = zip(*parts, strict=True)
    z, missed, value = torch.cat(zs, 1), torch.cat(misses, 1), torch.stack(values).sum(0)
    largest = exchange.reduce(torch.stack(most).amax(0), "max")
    prices = torch.where(closed, largest[:, :k].clamp_min(0.0), prices)
    sums = torch.cat([count_experts(z, mask, k), value.unsqueeze(-1), missed.sum(-1, keepdim=True)], -1)
    sums = exchange.reduce(sums)
    counts, value, total = sums[:, :k].long(), sums[:, k].clone(), sums[:, k + 1]
    gap = total + ((capacity - counts) * prices).sum(-1)
    return Proof(z, missed, counts, value, largest[:, k], prices, gap)


def certify(
    scores: Float[Tensor, "b n k"],
    z: Int[Tensor, "b n"],
    prices: Float[Tensor, "b k"],
    capacity: Int[Tensor, "b k"],
    mask: Bool[Tensor, "b n"] | None,
) -> Proof:
    """Proves an assignment of one expert a row, of rows that are all in one place; z is anything for masked rows."""
    experts = z.clamp(max=scores.shape[-1] - 1).unsqueeze(-1)
    return prove(scores, mask, experts, prices.double(), capacity, Alone())


def _read_block(
    scores: Tensor, mask: Tensor | None, z: Tensor, prices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reads some of the rows, in float64.

    Returns:
        z and what each row misses; the value; and [b, k + 1] what the row that wants an expert most would gain there,
        with the largest score assigned.
    """
    top_k = z.shape[-1]
    wide = scores.double()
    offers = wide - prices.unsqueeze(1)
    z = z.sort(-1).values  # among equal offers the first expert comes first
    own, order = offers.gather(-1, z).sort(dim=-1, descending=True, stable=True)
    z = z.gather(-1, order)
    here = wide.gather(-1, z)
    best = offers.topk(top_k, -1).values if top_k > 1 else offers.amax(-1, keepdim=True)
    missed, wish = (best - own).sum(-1).clamp_min(0.0), wide - own[..., -1:]
    if mask is not None:
        here, missed = here.where(mask.unsqueeze(-1), 0.0), missed.where(mask, 0.0)
        wish = wish.where(mask.unsqueeze(-1), -torch.inf)
    most = torch.cat([wish, here.abs().amax(-1, keepdim=True)], -1)
    return z, missed, here.sum((1, 2)), most.amax(1) if z.shape[1] > 0 else most.sum(1)
