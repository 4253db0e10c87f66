# SPDX-License-Identifier: Apache-2.0
"""Solvers whose rows are spread over ranks. Every rank gets the same prices, to the bit.

Sums over rows are summed over ranks; of the rows themselves only those travel that sums leave open. What a rank decides
follows from numbers that all ranks have, so that they agree without asking.

Legend: n rows (datapoints) of this rank, N of all ranks, k columns (experts), K experts a row, ... batch dimensions.
"""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise._core import check_capacity, check_mask, check_matrix
from equipoise.assignment import Assignment, assign
from equipoise.assignment._conditional import detours_from_costs
from equipoise.assignment._exchange import Meter
from equipoise.assignment._move_cost import move_cost
from equipoise.assignment._settle import Problem, Unsettled, count_rows, settle
from equipoise.balancing import Balanced, sinkhorn
from equipoise.balancing._solve import solve_spread
from equipoise.distributed._ranks import Ranks

# Entries of a problem's rows below which every rank takes all of them and solves alone: passes need more messages.
SMALL_ENTRIES = 1 << 20
# What the exact methods of `assign` promise of the gap.
_OPTIMAL = 1e-9
_MAX_ITERATIONS = 500


class RankExchange:
    """How ranks that hold rows of one problem tell each other sums and rows; see `equipoise.assignment`'s settling."""

    def __init__(self, peers: Ranks) -> None:
        """Keeps the ranks."""
        self.peers = peers

    def reduce(self, x: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Returns the sum, or the maximum, over all ranks."""
        return self.peers.all_reduce(x, op)

    def gather(self, rows: Tensor) -> tuple[Tensor, slice]:
        """Returns the rows of all ranks, and which ones are this rank's."""
        return gather_matrix(self.peers, rows, -2)

    def total(self, number: int) -> int:
        """Returns the sum of a number over all ranks; no device waits for it."""
        return sum(each for (each,) in self.peers.gather_numbers([number])())


def gather_matrix(peers: Ranks, x: Tensor, rows_at: int) -> tuple[Tensor, slice]:
    """Gathers the rows of all ranks, and tells which of them are this rank's.

    Args:
        peers: the ranks.
        x: rows along the dimension `rows_at`.
        rows_at: a negative index.
    """
    parts = peers.all_gather(x.movedim(rows_at, 0))
    before = sum(part.shape[0] for part in parts[: peers.rank])
    return torch.cat(parts).movedim(0, rows_at), slice(before, before + x.shape[rows_at])


def shared_assign(
    peers: Ranks, scores: Tensor, capacity: Any = None, *, top_k: int | None = None, mask: Tensor | None = None
) -> Assignment:
    """Solves the balanced assignment of the rows of all ranks, exactly.

    Prices come from sums over ranks (k numbers, and k x k, a pass); contested rows are gathered, and every rank solves
    them to the same answer; the proof is summed over ranks. Small problems are gathered whole, and so are those that
    this leaves open, among them illegal ones: every rank then raises the same error.

    Args:
        peers: the ranks.
        scores: of this rank's rows.
        capacity: of all rows; None: ceil(K N / k).
        top_k: K.
        mask: of this rank's rows.

    Returns:
        z and mask of this rank's rows; the rest of all rows.
    """
    check_matrix("scores", scores)
    *batch, n, k = scores.shape
    check_mask(mask, [*batch, n])
    scores = scores.detach()
    wide = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    flat, flat_mask = _flattened(wide, mask)
    exchange = RankExchange(peers)
    rows = count_rows(flat, flat_mask, exchange)
    if capacity is None:
        slots = -(-(top_k or 1) * rows.long() // k).unsqueeze(-1).expand(-1, k).reshape(*batch, k)
    else:
        slots = check_capacity(capacity, batch, n, k, mask, scores.device)
    if float(rows.max()) * k > SMALL_ENTRIES:
        found = _settled(exchange, flat, flat_mask, slots.reshape(-1, k), top_k or 1)
        if found is not None:
            return _in_shape(found, batch, mask, slots, top_k)
    every, own = gather_matrix(peers, scores, -2)
    masks = None if mask is None else gather_matrix(peers, mask, -1)[0]
    a = assign(every, slots, top_k=top_k, mask=masks)
    z = a.z[..., own] if top_k is None else a.z[..., own, :]
    return replace(a, z=z, mask=a.mask[..., own])


def _flattened(x: Tensor, of_rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Makes one batch dimension of [..., n, k] and [..., n]; a rank may have no rows."""
    *batch, n, k = x.shape
    b = math.prod(batch)
    return x.reshape(b, n, k), None if of_rows is None else of_rows.reshape(b, n)


def _settled(exchange: RankExchange, scores: Tensor, mask: Tensor | None, slots: Tensor, top_k: int) -> Any:
    """Settles, solves what is contested, proves; None where that does not end in a proof."""
    filled = scores if mask is None else scores.masked_fill(~mask.unsqueeze(-1), 0.0)
    try:
        proof = settle(Problem(filled, mask, slots, top_k), None, exchange, Meter())
    except (Unsettled, ValueError):  # on all ranks alike: what they read is the same
        return None
    proved = proof.gap <= _OPTIMAL * torch.maximum(proof.value.abs(), proof.largest)
    return proof if bool(proved.all()) else None


def _in_shape(proof: Any, batch: list[int], mask: Tensor | None, slots: Tensor, top_k: int | None) -> Assignment:
    """Makes the result of a proof, whose batch is flattened."""
    k, n = slots.shape[-1], proof.z.shape[1]
    z = proof.z.reshape(*batch, n, top_k or 1)
    z = z if mask is None else z.where(mask.unsqueeze(-1), k)
    return Assignment(
        z=z.squeeze(-1) if top_k is None else z,
        counts=proof.counts.reshape(*batch, k).long(),
        capacity=slots,
        mask=torch.ones([*batch, n], dtype=torch.bool, device=z.device) if mask is None else mask,
        value=proof.value.reshape(batch),
        prices=proof.prices.reshape(*batch, k),
        gap=proof.gap.reshape(batch),
    )


def shared_detours(peers: Ranks, scores: Tensor, a: Assignment) -> Tensor:
    """Computes what it costs to take a slot at expert j and to give one back at j', over the rows of all ranks.

    The least cost of a move over all rows is the least over ranks; k x k numbers travel.

    Args:
        peers: the ranks.
        scores: of this rank's rows.
        a: from `shared_assign`.

    Returns:
        float64 [..., k, k].
    """
    *batch, _, k = scores.shape
    flat, z = _flattened(scores.double(), a.z)
    assert z is not None
    capacity, counts, prices = (x.reshape(-1, k) for x in (a.capacity, a.counts, a.prices))
    cost = peers.all_reduce(move_cost(flat, z, capacity, counts), "min")
    return detours_from_costs(cost, prices).reshape(*batch, k, k)


def shared_sinkhorn(
    peers: Ranks, logits: Tensor, capacity: Any = None, *, mask: Tensor | None = None, tolerance: float = 1e-6
) -> Balanced:
    """Balances the rows of all ranks in expectation: Newton's steps from column sums and overlaps of all ranks.

    Args:
        peers: the ranks.
        logits: of this rank's rows, without gradient.
        capacity: of all rows; None: columns sum to N / k.
        mask: of this rank's rows.
        tolerance: the relative column error.

    Returns:
        log_p of this rank's rows; the rest of all rows.
    """
    *batch, n, k = logits.shape
    flat, flat_mask = _flattened(logits.detach(), mask)
    rows = count_rows(flat, flat_mask, RankExchange(peers))
    if capacity is None:
        target = (rows / k).unsqueeze(-1).expand(-1, k).contiguous()
    else:
        target = check_capacity(capacity, batch, n, k, mask, logits.device).reshape(-1, k).double()
    legal = (target > 0).all() & (target.sum(-1) >= rows * (1 - 1e-9)).all() & (rows > 0).all()
    finite = peers.all_reduce((~flat.isfinite()).sum())
    if bool(legal) and int(finite) == 0:
        found = solve_spread(flat, flat_mask, target, tolerance, _MAX_ITERATIONS, peers.all_reduce)
        if bool(found.converged.all()):
            return Balanced(
                log_p=found.log_p.reshape(logits.shape),
                prices=found.prices.reshape(*batch, k),
                converged=found.converged.reshape(batch),
                iterations=found.iterations.reshape(batch),
                error=found.error.reshape(batch),
            )
    every, own = gather_matrix(peers, logits.detach(), -2)
    masks = None if mask is None else gather_matrix(peers, mask, -1)[0]
    balanced = sinkhorn(every, capacity, mask=masks, tolerance=tolerance)
    return replace(balanced, log_p=balanced.log_p[..., own, :])
