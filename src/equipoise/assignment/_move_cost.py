# SPDX-License-Identifier: Apache-2.0
"""What it costs to move rows between experts.

An assignment of n rows changes by moving rows between k experts, so everything that decides whether it is optimal fits
into a graph of k nodes. These are its edges, and its nodes' prices.

Legend: b problems, n rows (datapoints), k columns (experts). z = k is a row without an expert.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def move_cost(
    scores: Float[Tensor, "b n k"], z: Int[Tensor, "b n"], capacity: Int[Tensor, "b k"], counts: Int[Tensor, "b k"]
) -> Float[Tensor, "b k k"]:
    r"""Computes the least loss of score at which expert j can hand something to expert j'.

    App. D.2, step 2:

    .. math::
        d_{jj'} = \min_{i : z_i = j} s_{ij} - s_{ij'},

    and +inf where j has no row that may go to j'. A free slot is a dummy row whose score is 0 everywhere, so that
    moving it costs nothing: an expert with one has d_jj' = min(d_jj', 0) for every j' (handing over a free slot means
    taking one more row itself, and j' one less). Dummies are counted, never stored.

    One scatter over the matrix of losses: no loop over rows, and nothing of size n x k x k.

    Args:
        scores: float64; -inf forbids a pair.
        z: the expert of each row, where its score is finite.
        capacity: rows that each expert may take.
        counts: rows that each expert has.

    Returns:
        The costs, `[from, to]`, with a diagonal of 0.
    """
    b, n, k = scores.shape
    here = scores.gather(-1, z.clamp(max=k - 1).unsqueeze(-1))
    first = torch.arange(b, device=z.device) * (k + 1)
    group = (z + first[:, None]).reshape(b * n, 1).expand(b * n, k)
    cost = scores.new_full([b * (k + 1), k], torch.inf)
    # Rows without an expert form group k, whose minima (NaN where such a row is -inf) are cut off below.
    cost = cost.scatter_reduce(0, group, (here - scores).reshape(b * n, k), "amin")
    cost = cost.reshape(b, k + 1, k)[:, :k]
    cost = torch.where((counts < capacity).unsqueeze(-1), cost.clamp(max=0), cost)
    return cost.diagonal_scatter(cost.new_zeros([b, k]), dim1=-2, dim2=-1)


def relax_prices(cost: Float[Tensor, "b k k"], prices: Float[Tensor, "b k"]) -> Float[Tensor, "b k"]:
    """Lowers prices until no row of any expert j prefers another, p_j <= d_jj' + p_j', by k relaxations.

    From 0 this computes the cost of the cheapest chain of moves that starts at each expert, min_t path_cost[j, t]. If
    no cycle is negative, k relaxations reach it (Bellman-Ford). Each adds one rounding error, where Floyd-Warshall, on
    cycles whose cost is zero but for rounding, may double all errors so far.

    Args:
        cost: move costs, with a diagonal of 0.
        prices: where to start.

    Returns:
        The lower prices. Not shifted: they may be negative.
    """
    for _ in range(cost.shape[-1]):
        prices = (cost + prices.unsqueeze(1)).amin(-1)
    return prices


def at_rest(
    prices: Float[Tensor, "b k"], counts: Int[Tensor, "b k"], capacity: Int[Tensor, "b k"]
) -> Float[Tensor, "b k"]:
    """Brings prices to the convention: 0 where there is a free slot, else the least is 0; closed experts aside."""
    least = prices.masked_fill(capacity == 0, torch.inf).amin(-1, keepdim=True)
    return (prices - least).masked_fill((counts < capacity) | (capacity == 0), 0.0)
