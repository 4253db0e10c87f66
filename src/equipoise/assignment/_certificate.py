# SPDX-License-Identifier: Apache-2.0
"""The certificate of optimality: how far an assignment can at most be from the best.

Legend: b problems, n rows (datapoints), k columns (experts). z = k is a row without an expert.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise.ops import count_groups


def certificate(
    scores: Float[Tensor, "b n k"],
    z: Int[Tensor, "b n"],
    prices: Float[Tensor, "b k"],
    capacity: Int[Tensor, "b k"],
    mask: Bool[Tensor, "b n"] | None,
) -> tuple[Int[Tensor, "b k"], Float[Tensor, "b"], Float[Tensor, "b"]]:
    r"""Computes the value of an assignment and its distance from the dual value of the prices.

    For any prices p >= 0, weak duality bounds the value of every feasible assignment z:

    .. math::
        \sum_i s_{i z_i} \le \sum_i \max_j (s_{ij} - p_j) + \sum_j c_j p_j.

    The difference of the two sides is the gap. Both are sums over all rows, nearly equal at an optimum, and their
    difference would be rounding error. Written as

    .. math::
        \sum_i \left[ \max_j (s_{ij} - p_j) - (s_{i z_i} - p_{z_i}) \right] + \sum_j (c_j - n_j) p_j,

    every term is >= 0 and each is computed exactly 0 where it is 0 (a row at its favourite expert, a full expert, a
    price of 0), so that the gap is as accurate as its largest terms.

    Args:
        scores: any floating dtype; -inf forbids a pair. The sums are in float64.
        z: the expert of each row; k for rows that are masked.
        prices: any prices >= 0.
        capacity: rows that each expert may take.
        mask: rows that are assigned; None: all.

    Returns:
        The rows that each expert has, the value, and the gap.
    """
    k = scores.shape[-1]
    counts = count_groups(z, k + 1)[:, :k].contiguous()
    wide, prices = scores.double(), prices.double()
    expert = z.clamp(max=k - 1)
    here = wide.gather(-1, expert.unsqueeze(-1)).squeeze(-1)
    offer = here - prices.gather(-1, expert)
    regret = ((wide - prices.unsqueeze(1)) - offer.unsqueeze(-1)).amax(-1)
    if mask is not None:
        here, regret = here.where(mask, 0.0), regret.where(mask, 0.0)
    return counts, here.sum(-1), regret.sum(-1) + (prices * (capacity - counts)).sum(-1)
