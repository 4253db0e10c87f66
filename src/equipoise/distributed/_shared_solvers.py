# SPDX-License-Identifier: Apache-2.0
"""Solvers whose rows are spread over ranks. Every rank gets the same prices, to the bit.

Legend: n rows (datapoints) of this rank, N of all ranks, k columns (experts), ... batch dimensions.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equipoise.assignment import Assignment, assign
from equipoise.assignment._conditional import detours_from_costs
from equipoise.assignment._move_cost import move_cost
from equipoise.balancing import Balanced, sinkhorn
from equipoise.distributed._ranks import Ranks


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
    """Solves the balanced assignment of the rows of all ranks.

    Args:
        peers: the ranks.
        scores: of this rank's rows.
        capacity: of all rows; None: ceil(K N / k).
        top_k: K.
        mask: of this rank's rows.

    Returns:
        z and mask of this rank's rows; the rest of all rows.
    """
    every, own = gather_matrix(peers, scores, -2)
    masks = None if mask is None else gather_matrix(peers, mask, -1)[0]
    a = assign(every, capacity, top_k=top_k, mask=masks)
    z = a.z[..., own] if top_k is None else a.z[..., own, :]
    return replace(a, z=z, mask=a.mask[..., own])


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
    *batch, n, k = scores.shape
    flat, z = scores.reshape(-1, n, k).double(), a.z.reshape(-1, n)
    capacity, counts, prices = (x.reshape(-1, k) for x in (a.capacity, a.counts, a.prices))
    cost = peers.all_reduce(move_cost(flat, z, capacity, counts), "min")
    return detours_from_costs(cost, prices).reshape(*batch, k, k)


def shared_sinkhorn(peers: Ranks, logits: Tensor, capacity: Any = None, **how: Any) -> Balanced:
    """Balances the rows of all ranks in expectation.

    Args:
        peers: the ranks.
        logits: of this rank's rows.
        capacity: of all rows; None: columns sum to N / k.
        how: mask, tolerance.

    Returns:
        log_p of this rank's rows; the rest of all rows.
    """
    mask = how.pop("mask", None)
    every, own = gather_matrix(peers, logits, -2)
    masks = None if mask is None else gather_matrix(peers, mask, -1)[0]
    balanced = sinkhorn(every, capacity, mask=masks, **how)
    return replace(balanced, log_p=balanced.log_p[..., own, :])
