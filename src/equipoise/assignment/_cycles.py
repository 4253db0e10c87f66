# SPDX-License-Identifier: Apache-2.0
"""Cancels negative cycles of moves between experts, App. D.2.

Legend: b problems, n rows (datapoints), k columns (experts). z = k is a row without an expert.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise.assignment._infeasible import no_room
from equipoise.assignment._move_cost import move_cost
from equipoise.ops import count_groups, negative_cycles, rank_within_groups


class Moves(NamedTuple):
    """Disjoint negative cycles, and the rows that can move along them.

    Attributes:
        successor: the next expert on the cycle; k for experts on none.
        target: where each row would move; k: nowhere.
        rank: what moves ahead of the row: rows of its expert that lose less by it, and free slots, which lose nothing.
        units: how much each expert on the cycles hands on: what is ranked below this moves. 0 where nothing pays.
    """

    successor: Int[Tensor, "b k"]
    target: Int[Tensor, "b n"]
    rank: Int[Tensor, "b n"]
    units: Int[Tensor, "b"]

    def apply(self, z: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
        """Makes the moves."""
        stays = (self.target == self.successor.shape[-1]) | (self.rank >= self.units.unsqueeze(-1))
        return z.where(stays, self.target)


def find_moves(scores: Float[Tensor, "b n k"], z: Int[Tensor, "b n"], capacity: Int[Tensor, "b k"]) -> Moves:
    """Finds negative cycles that have no expert in common, and how many rows to move along them, App. D.2, steps 2-5.

    What the t-th unit around the cycles costs is the sum over their experts of the t-th cheapest moves, free slots at 0
    among them. It grows with t, so units are moved while it is negative: one, or more where rows are nearly tied.

    Args:
        scores: float64, such that sums of 2 k of them are exact; -inf forbids a pair.
        z: the expert of each row, where its score is finite.
        capacity: rows that each expert may take.
    """
    n, k = scores.shape[1:]
    counts = count_groups(z, k + 1)
    size = torch.cat([capacity, counts[:, k:]], -1)  # rows without an expert: one more, without free slots
    successor = negative_cycles(move_cost(scores, z, capacity, counts[:, :k]))
    target = torch.cat([successor, torch.full_like(successor[:, :1], k)], -1).gather(-1, z)
    here, there = (scores.gather(-1, j.clamp(max=k - 1).unsqueeze(-1)).squeeze(-1) for j in (z, target))
    loss = torch.where(target < k, here - there, torch.inf)
    rank = rank_within_groups(z, loss, counts)
    rank = torch.where(loss < 0, rank, rank + (size - counts).gather(-1, z)).clamp_(max=n)
    marginal = scores.new_zeros([len(z), n + 1]).scatter_add_(-1, rank, loss.where(target < k, 0.0))
    # Expert j has c_j rows and free slots to move, and the cycles as many units as the smallest of their experts.
    limit = capacity.where(successor < k, n).amin(-1, keepdim=True)
    units = ((marginal < 0) & (torch.arange(n + 1, device=z.device) < limit)).sum(-1)
    return Moves(successor, target, rank, units)


def cancel_cycles(
    scores: Float[Tensor, "b n k"], z: Int[Tensor, "b n"], capacity: Int[Tensor, "b k"]
) -> Int[Tensor, "b n"]:
    """Moves rows along negative cycles until there is none; arguments as for `find_moves`.

    Every round raises the value of a problem, an integer, or is its last.
    """
    z, live = z.clone(), torch.arange(len(z), device=z.device)
    while len(live):
        moves = find_moves(scores, z[live], capacity[live])
        z[live] = moves.apply(z[live])
        if not bool((left := moves.units > 0).all()):
            live, scores = live[left], scores[left]
    return z


def complete(
    scores: Float[Tensor, "b n k"], z: Int[Tensor, "b n"], capacity: Int[Tensor, "b k"], rows: Bool[Tensor, "b n"]
) -> Int[Tensor, "b n"]:
    """Completes a partial assignment to a feasible one, if there is one.

    Rows without an expert take any free slots. A forbidden pair then scores -1, all others 0, and cancelling cycles
    leaves as few forbidden pairs as there can be.

    Args:
        scores: -inf forbids a pair; so it does for every pair with an expert of capacity 0.
        z: a partial assignment within the capacities; k where a row is still without an expert.
        capacity: rows that each expert may take, enough for all rows together.
        rows: rows that must have an expert.

    Raises:
        ValueError: a forbidden pair is left. Names a row, the experts that it is confined to, and what they hold.
    """
    k = scores.shape[-1]
    waiting = rows & (z == k)
    if not bool(waiting.any()):
        return z
    free = (capacity - count_groups(z, k + 1)[:, :k]).cumsum(-1)
    z = torch.searchsorted(free, waiting.cumsum(-1) - 1, right=True).where(waiting, z)
    forbidden = (scores == -torch.inf) & rows.unsqueeze(-1)
    z = cancel_cycles(-forbidden.double(), z, capacity)
    stuck = forbidden.gather(-1, z.clamp(max=k - 1).unsqueeze(-1)).squeeze(-1)
    if bool(stuck.any()):
        # They are sent where they may be. No chain leads from there to room: it would close a negative cycle.
        first = int(stuck.any(-1).nonzero()[0])
        z = torch.where(stuck, scores.argmax(-1), z)[first]
        overfull = int((count_groups(z, k + 1)[:k] > capacity[first]).nonzero()[0])
        mask, chosen = rows[first].cpu().numpy(), z.int()[:, None].cpu().numpy()
        raise no_room(scores[first].cpu().numpy(), mask, capacity[first].cpu().numpy(), chosen, overfull, first)
    return z
