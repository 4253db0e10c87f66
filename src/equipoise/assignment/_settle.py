# SPDX-License-Identifier: Apache-2.0
"""Settle, solve what is left, prove: the exact solver for scores on a device, or spread over several holders.

What reads all scores stays where they are, in torch. Only a sample and contested rows travel.

1. Prices. The compiled solver (`_primal_dual.py`) solves a sample on the host; Newton steps on all rows start from its
   prices (`_price_steps.py`).
2. Settle. Rows of the least lead are contested, a fixed number for each expert; all others are settled.
3. Solve. The compiled solver solves contested rows on the host, with the capacity that settled rows leave.
4. Prove (`_proof.py`). At the final prices no row has a better offer.

Problems without a proof do the same with eight times as many contested rows, in the end with all of them: so the result
is exact whatever the prices were.

Legend: b problems, n rows, k experts, K experts a row, m rows that travel.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise.assignment._exchange import Alone, Exchange, Meter
from equipoise.assignment._infeasible import check_start
from equipoise.assignment._price_steps import STEPS, count_experts, rank_offers, step_prices
from equipoise.assignment._proof import Proof, prove
from equipoise.assignment._range import Solved

# Rows for each expert in the sample, and as many contested ones. Steps end where counts are right to a row or two, so
# how many rows are contested depends neither on n nor on K.
EACH = 8
# So many times as many are contested where there is no proof; all, if that were half of them.
WIDER = 8
# Entries of a problem below which it is copied at once: to copy so little takes less time than the passes do.
SMALL_ENTRIES = 1 << 14
# A gap of this much of the value, or of the largest score assigned, is rounding.
ROUNDING = 1e-13


class Unsettled(Exception):
    """A problem that cannot be solved from contested rows: its scores are illegal, or leave the rows no room."""


class Problem(NamedTuple):
    """A batch of problems, or the part of one holder.

    Attributes:
        scores: [b, n, k] float32 or float64; finite for masked rows.
        mask: [b, n] or None.
        capacity: [b, k] of the rows of all holders.
        top_k: K.
    """

    scores: Float[Tensor, "b n k"]
    mask: Bool[Tensor, "b n"] | None
    capacity: Int[Tensor, "b k"]
    top_k: int


def settle_in_torch(
    scores: Tensor,
    capacity: Tensor | None,
    mask: Tensor | None,
    prices: Tensor | None,
    top_k: int = 1,
    meter: Meter | None = None,
) -> Solved:
    """Solves a batch of assignment problems exactly, on the device of the scores; see `primal_dual`.

    Args:
        scores: float32 or float64 [..., n, k].
        capacity: int64 [..., k]; or None for ceil(K * rows that are not masked / k).
        mask: bool [..., n] or None.
        prices: floating [..., k] to start from, or None.
        top_k: K.
        meter: counts what is copied.
    """
    meter = Meter() if meter is None else meter
    *batch, n, k = scores.shape
    if n * k <= SMALL_ENTRIES or scores.numel() == 0:
        return copy_whole(scores, capacity, mask, prices, top_k, meter)
    flat = scores.reshape(-1, n, k)
    flat_mask = None if mask is None else mask.reshape(-1, n)
    if flat_mask is not None:
        flat = flat.masked_fill(~flat_mask.unsqueeze(-1), 0.0)
    if capacity is None:
        slots = -(-top_k * count_rows(flat, flat_mask, Alone()).long() // k)
        capacity = slots.unsqueeze(-1).expand(-1, k).reshape([*batch, k])
    problem = Problem(flat, flat_mask, capacity.reshape(-1, k), top_k)
    try:
        proof = settle(problem, None if prices is None else prices.reshape(-1, k).double(), Alone(), meter)
    except Unsettled:  # the compiled solver says what is wrong, or finds that nothing is
        return copy_whole(scores, capacity, mask, prices, top_k, meter)
    z = proof.z if flat_mask is None else proof.z.where(flat_mask.unsqueeze(-1), k)
    return (
        z.reshape([*batch, n, top_k]),
        proof.counts.reshape([*batch, k]),
        capacity.clone(),
        scores.new_ones([*batch, n], dtype=torch.bool) if mask is None else mask.clone(),
        proof.value.reshape(batch),
        proof.prices.reshape([*batch, k]),
        proof.gap.reshape(batch),
    )


def copy_whole(
    scores: Tensor, capacity: Tensor | None, mask: Tensor | None, prices: Tensor | None, top_k: int, meter: Meter
) -> Solved:
    """Solves on the host, with all that there is."""
    device = scores.device
    *batch, n, _ = scores.shape
    meter.trips += 1
    meter.rows += int(np.prod(batch)) * n
    given = (x if x is None else meter.read(x) for x in (capacity, mask, prices))
    return tuple(meter.write(x, device) for x in _compiled(meter.read(scores), *given, top_k))  # pyright: ignore[reportReturnType]


def count_rows(
    scores: Float[Tensor, "b n k"], mask: Bool[Tensor, "b n"] | None, exchange: Exchange
) -> Float[Tensor, "b"]:
    """Rows of all holders that are not masked, for each problem."""
    b, n, _ = scores.shape
    own = torch.full([b], n, dtype=torch.float64, device=scores.device) if mask is None else mask.sum(-1).double()
    return exchange.reduce(own)


def settle(
    problem: Problem, given: Float[Tensor, "b k"] | None, exchange: Exchange, meter: Meter, each: int = EACH
) -> Proof:
    """Solves problems exactly; z of masked rows means nothing.

    Args:
        problem: the problems, or this holder's part of them.
        given: prices to start from, in place of a sample's.
        exchange: how holders of rows tell each other sums, and hand each other rows that travel. Every holder gets the
            same prices, counts, value and gap, and z of its own rows.
        meter: counts what is copied.
        each: contested rows for each expert.

    Raises:
        ValueError: capacities are negative or hold too few rows, or given prices are not finite.
        Unsettled: see there.
    """
    scores, mask, capacity, top_k = problem
    (b, n, k), device = scores.shape, scores.device
    mask = scores.new_ones([b, n], dtype=torch.bool) if mask is None else mask
    total = exchange.total(n)
    whole = 2 * each * k >= total
    number = n if whole else -(-each * k * n // total)  # this holder's part of the contested rows
    prices, target = _start(problem, mask, given, 0 if whole else number, exchange, meter)
    if not whole:
        prices = step_prices(scores, mask, target, prices, top_k, exchange)
        meter.passes += STEPS
    ranked, lead = rank_offers(scores, mask, prices, top_k)
    z, contested = ranked[..., :top_k], lead.topk(number, largest=False, sorted=False).indices
    settled = count_experts(z, mask.scatter(1, contested, False), k)
    settled = exchange.reduce(torch.cat([settled, lead.isnan().sum(-1, keepdim=True)], -1)).long()
    rows, mine = exchange.gather(_take(scores, mask, contested))
    taken, room, before, rows = meter.read_rows(settled, capacity, prices.masked_fill(capacity == 0, 0.0), rows)
    if taken[:, k].any():
        raise Unsettled
    z_of, p_of, solved = _solve(rows, room - taken[:, :k], before, top_k)
    if whole and not solved.all():
        raise Unsettled
    z = z.scatter(1, contested.unsqueeze(-1).expand(-1, -1, top_k), meter.write(z_of[:, mine], device))
    proof = prove(scores, mask, z, meter.write(p_of, device), capacity, exchange)
    meter.passes += 2
    gap, value, largest = meter.read(torch.stack([proof.gap, proof.value, proof.largest]))
    proved = solved & (whole | (gap <= ROUNDING * torch.maximum(value.abs(), largest)))
    left = (~proved).nonzero().flatten()
    if len(left) == 0:
        return proof
    index = meter.write(left, device)
    # Steps go on from these prices, unless they come from prices that were given, which may be far off.
    start = meter.write(p_of[left], device) if given is None else None
    part = Problem(scores[index], mask[index], capacity[index], top_k)
    again = settle(part, start, exchange, meter, WIDER * each)
    return Proof(*(x.index_copy(0, index, y) for x, y in zip(proof, again, strict=True)))


def _start(
    problem: Problem,
    mask: Bool[Tensor, "b n"],
    given: Float[Tensor, "b k"] | None,
    number: int,
    exchange: Exchange,
    meter: Meter,
) -> tuple[Float[Tensor, "b k"], Float[Tensor, "b k"]]:
    """Prices of a sample, or those that are given, with +inf for closed experts; and rows that each expert may have."""
    scores, _, capacity, top_k = problem
    b, n, k = scores.shape
    rows = count_rows(scores, mask, exchange).long().unsqueeze(-1)
    target = torch.minimum(capacity, rows)  # nobody takes more than all rows, whatever the capacity
    # Strides are odd: of rows that alternate, every second one tells half.
    index = torch.arange(number if given is None else 0, device=scores.device) * (n // max(number, 1) | 1) % max(n, 1)
    sample, _ = exchange.gather(_take(scores, mask, index.expand(b, -1)))
    prices = scores.new_zeros([b, k], dtype=torch.float64) if given is None else given
    c, t, r, p, sample = meter.read_rows(capacity, target, rows, prices, sample)
    check_start(c.numpy(), top_k * r[:, 0].numpy(), p.numpy(), top_k)
    if sample.shape[1] > 0:  # capacities of the sample: sums up to each expert, in its measure, rounded up
        up_to = -(-t.cumsum(-1) * sample[..., k].sum(-1, keepdim=True).long() // r.clamp_min(1))
        _, p, _ = _solve(sample, up_to.diff(prepend=torch.zeros_like(r)), p, top_k)
    return meter.write(p.masked_fill(c == 0, torch.inf), scores.device), target.double()


def _take(
    scores: Float[Tensor, "b n k"], mask: Bool[Tensor, "b n"], index: Int[Tensor, "b m"]
) -> Float[Tensor, "b m w"]:
    """Rows of the scores, with a column that is 0 for masked ones."""
    rows = scores.gather(1, index.unsqueeze(-1).expand(-1, -1, scores.shape[-1]))
    return torch.cat([rows, mask.gather(1, index).to(scores.dtype).unsqueeze(-1)], -1)


def _solve(
    rows: Float[Tensor, "b m w"], room: Int[Tensor, "b k"], before: Float[Tensor, "b k"], top_k: int
) -> tuple[Int[Tensor, "b m K"], Float[Tensor, "b k"], Bool[Tensor, "b"]]:
    """Solves rows on the host; returns z, prices, and which problems are solved: their rows fit into the room."""
    b, m, _ = rows.shape
    z, prices, solved = torch.zeros([b, m, top_k], dtype=torch.int64), before.clone(), torch.ones(b, dtype=torch.bool)
    for i in range(b):
        try:
            z_of, *_, p, _ = _compiled(rows[i, :, :-1], room[i], rows[i, :, -1] > 0, before[i], top_k)
        except (ValueError, ArithmeticError):
            solved[i] = False
            continue
        # These rows say little of an expert that others fill: only that none of them prefers it. Such an expert keeps
        # its distance from the others, unless these rows ask for more.
        some = room[i] > 0
        shift = (p - before[i])[some].mean().nan_to_num()
        z[i], prices[i] = z_of.clamp(max=len(p) - 1), torch.where(some, p, torch.maximum(p, before[i] + shift))
    return z, prices, solved


def _compiled(*problem: Any) -> Solved:
    # Imported here because importing Numba takes half a second, and because a device may never need it.
    from equipoise.assignment._primal_dual import primal_dual

    return primal_dual(*problem)
