# SPDX-License-Identifier: Apache-2.0
"""The auction: a good assignment in a few rounds, and the start of cycle cancelling.

Legend: b problems, n rows (datapoints), k columns (experts). z = k is a row without an expert; `rows` is True for rows
that must have one.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from equipoise.assignment._checks import check_scores
from equipoise.assignment._cycles import complete
from equipoise.assignment._move_cost import at_rest, move_cost, relax_prices
from equipoise.assignment._proof import certify
from equipoise.ops import count_groups, rank_within_groups

# Epsilon grows by 5% a round, 130 times in 100 rounds, because identical rows and scores of low rank lead by little and
# have far to go. Without it they take twice as long. Rows that are left after 100 rounds are placed by `complete`.
_MAX_ROUNDS, _GROWTH = 100, 1.05

# A bid is above the price by this many increments at most. A row may have no second choice, or one of -1e38 that stands
# for none; a bid as high as that would round all other scores away.
_LARGEST_RAISE = 16.0


def auction_assign(
    scores: Float[Tensor, "b n k"],
    capacity: Int[Tensor, "b k"],
    mask: Bool[Tensor, "b n"] | None,
    prices: Float[Tensor, "b k"] | None,
) -> tuple[Int[Tensor, "b n"], Float[Tensor, "b k"]]:
    r"""Assigns every row by auction: feasible, and within n epsilon of the best where the bidding ends by itself.

    App. D.2, step 1. Every row without an expert bids for the one where :math:`s_{ij} - p_j` is largest; its bid is the
    price at which its second choice would be as good, plus epsilon. An expert keeps its c_j highest bids, and its price
    is its lowest bid once it is full. All rows without an expert, of all problems, bid at once.

    Prices only rise, so a row that holds a slot never regrets it by more than epsilon; and an expert that was full
    stays full, so one with a free slot still has price 0. So the gap of the certificate is at most n epsilon, the last
    one. (In BASE layers the experts bid for rows, prices belong to rows, and every slot must be filled.)

    Epsilon begins as the median lead of a row's best score over its second. For Gumbel noise over k experts that is
    log((2 k - 1) / (k - 1)), between 0.7 and 1.1. It is in proportion to the scores, so that a problem multiplied by a
    number takes the same rounds (by a power of two: to the same assignment). After 100 rounds any feasible completion
    is taken; the gap then says what it is worth.

    Args:
        scores: any floating dtype; -inf forbids a pair.
        capacity: rows that each expert may take, enough for all rows together.
        mask: rows that must have an expert; None: all.
        prices: finite prices to start from; None: 0. With slots to spare bidding starts from 0 in any case.

    Returns:
        The expert of each row (k where it is masked), and prices >= 0: 0 for every expert with a free slot, and the
        least is 0 when none has one.

    Raises:
        ValueError: a score is NaN or +inf, or nothing feasible is left by those that are -inf.

    References:
        Lewis, Bhosale, Dettmers, Goyal, Zettlemoyer, BASE layers (2021).
        Bertsekas, Castanon, The auction algorithm for the transportation problem (1989).
    """
    rows = torch.ones(scores.shape[:2], dtype=torch.bool, device=scores.device) if mask is None else mask
    z, bid_prices = auction_start(scores, capacity, rows, prices)
    if z.numel() == 0:
        return z, bid_prices
    # The bids' prices are good after a contest. Those that fit the assignment best are optimal if it is, as it tends to
    # be where slots are plenty or rows are tied, and the bids were too high by an epsilon.
    wide = scores.double().masked_fill(~rows.unsqueeze(-1), 0.0)
    counts = count_groups(z, scores.shape[-1] + 1)[:, :-1]
    fitted = relax_prices(move_cost(wide, z, capacity, counts), bid_prices)
    bids, fit = (certify(wide, z, at_rest(p, counts, capacity), capacity, rows) for p in (bid_prices, fitted))
    return z, torch.where((bids.gap < fit.gap).unsqueeze(-1), bids.prices, fit.prices)


def auction_start(
    scores: Float[Tensor, "b n k"],
    capacity: Int[Tensor, "b k"],
    rows: Bool[Tensor, "b n"],
    prices: Float[Tensor, "b k"] | None,
) -> tuple[Int[Tensor, "b n"], Float[Tensor, "b k"]]:
    """Runs the auction of `auction_assign`, and returns the assignment with the prices that the bids led to."""
    b, n, k = scores.shape
    if b == 0 or n == 0:
        return torch.full([b, n], k, device=scores.device), scores.new_zeros([b, k], dtype=torch.float64)
    # An expert without slots takes no bids. Its score may still be NaN, which is checked on the whole matrix.
    wide = scores.double().masked_fill((capacity == 0).unsqueeze(1), -torch.inf)
    check_scores(scores, wide, capacity, rows)
    start = torch.zeros_like(wide[:, 0])
    if prices is not None:
        # An expert that keeps a free slot must end at 0, and prices never fall.
        tight = capacity.sum(-1, keepdim=True) == rows.sum(-1, keepdim=True)
        start = (prices - prices.amin(-1, keepdim=True)).where(tight, start)
    z, bid_prices = _bid(wide, capacity, rows, start, _epsilon(wide, rows))
    return complete(wide, z, capacity, rows), bid_prices


def _epsilon(scores: Float[Tensor, "b n k"], rows: Bool[Tensor, "b n"]) -> Float[Tensor, "b"]:
    """The first increment of the bids: about 1 for Gumbel noise, in proportion to the scores otherwise, always > 0."""
    best, second = pad(scores, [0, 1], value=-torch.inf).topk(2).values.unbind(-1)  # k may be 1
    lead = (best - second).where(rows & (second > -torch.inf), torch.nan)
    epsilon = lead.nanmedian(-1).values  # a mean would follow heavy tails
    return epsilon.where(epsilon > 0, 1.0)


def _bid(
    scores: Tensor, capacity: Tensor, rows: Tensor, prices: Tensor, epsilon: Tensor
) -> tuple[Int[Tensor, "b n"], Float[Tensor, "b k"]]:
    """Runs rounds of bids until every row has an expert, at most `_MAX_ROUNDS`."""
    k = scores.shape[-1]
    z, bids, prices = torch.full(rows.shape, k, device=scores.device), torch.zeros_like(scores[..., 0]), prices.clone()
    slots = torch.cat([capacity, torch.zeros_like(capacity[:, :1])], -1)
    for _ in range(_MAX_ROUNDS):
        problem, row = (rows & (z == k)).nonzero(as_tuple=True)
        if len(problem) == 0:
            break
        offers = scores[problem, row] - prices[problem]
        best, expert = offers.max(-1)
        second = offers.scatter_(-1, expert.unsqueeze(-1), -torch.inf).amax(-1)
        raised = torch.minimum(best - second, _LARGEST_RAISE * epsilon[problem]) + epsilon[problem]
        z[problem, row], bids[problem, row] = expert, prices[problem, expert] + raised
        # Every expert keeps its highest bids (of equal ones the lowest rows'), and full experts raise their prices.
        live = problem.unique()  # problems that are through are not sorted again
        chosen, offered, size = z[live], bids[live], slots[live]
        rank = rank_within_groups(chosen, -offered, count_groups(chosen, k + 1))
        kept = chosen.where(rank < size.gather(-1, chosen), k)
        lowest = torch.full_like(size, torch.inf, dtype=bids.dtype).scatter_reduce(-1, kept, offered, "amin")
        full = (count_groups(kept, k + 1) == size) & (size > 0)
        z[live], prices[live] = kept, lowest[:, :k].where(full[:, :k], prices[live])
        epsilon = _GROWTH * epsilon
    return z, prices
