# SPDX-License-Identifier: Apache-2.0
"""Completes a partial assignment to one that is feasible, if there is one.

Legend: b problems, n rows (datapoints), k columns (experts). z = k is a row without an expert; `rows` is True for rows
that must have one. Experts of capacity 0 are forbidden (-inf) in `scores`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise.assignment._infeasible import no_room
from equipoise.assignment._move_cost import rank_movers
from equipoise.ops import count_groups, floyd_warshall, rank_within_groups, visited


def complete(
    scores: Float[Tensor, "b n k"],
    z: Int[Tensor, "b n"],
    capacity: Int[Tensor, "b k"],
    rows: Bool[Tensor, "b n"],
) -> Int[Tensor, "b n"]:
    """Gives every row an expert: free slots first, then chains of moves that make room.

    Any feasible completion will do; within each step, higher scores go first.

    Args:
        scores: float64; -inf forbids a pair.
        z: a partial assignment within the capacities; k where a row is still without an expert.
        capacity: rows that each expert may take.
        rows: rows that must have an expert.

    Returns:
        An assignment of all of `rows`, within the capacities.

    Raises:
        ValueError: there is none. Names a row, the experts that it is confined to, and what they hold.
    """
    k = scores.shape[-1]
    unfinished = (rows & (z == k)).any(-1).nonzero().squeeze(-1)
    if len(unfinished) == 0:
        return z
    part, size, here = scores[unfinished], capacity[unfinished], rows[unfinished]
    chosen = _fill_free_slots(part, z[unfinished], size, here)
    # Rows that found no free slot overfill the expert they like best; chains of moves then spread the excess.
    chosen = torch.where(here & (chosen == k), part.argmax(-1), chosen)
    return z.index_copy(0, unfinished, _spread_excess(part, chosen, size, unfinished))


def _fill_free_slots(scores: Tensor, z: Tensor, capacity: Tensor, rows: Tensor) -> Tensor:
    """Lets rows apply for their favourite among the experts with free slots, until none is left for them.

    Every pass accepts all applications or fills an expert, so there are at most k + 1.
    """
    k = scores.shape[-1]
    while True:
        room = capacity - count_groups(z, k + 1)[:, :k]
        waiting = rows & (z == k)
        problem, row = waiting.nonzero(as_tuple=True)
        best, expert = scores[problem, row].masked_fill_(room[problem] == 0, -torch.inf).max(-1)
        possible = best > -torch.inf
        if not bool(possible.any()):
            return z
        applied = torch.full_like(z, k).index_put_((problem, row), expert.where(possible, k))
        loss = scores.new_zeros(z.shape).index_put_((problem, row), -best)
        rank = rank_within_groups(applied, loss, count_groups(applied, k + 1))
        accepted = rank < torch.cat([room, room.new_zeros([len(room), 1])], -1).gather(-1, applied)
        z = torch.where(accepted, applied, z)


def _spread_excess(scores: Tensor, z: Tensor, capacity: Tensor, problems: Tensor) -> Tensor:
    """Moves rows along chains of experts from overfull ones to free slots, until no expert is overfull.

    The shortest augmenting paths of a maximum flow, on the graph of k experts with an edge for every move that is
    allowed. A chain moves as many rows as the excess, the free slots and its narrowest edge let through, and so uses up
    one of the three. As chains are shortest, an edge that was used up comes back only when its expert has got farther
    from the free slots (Edmonds and Karp), which happens at most k times: with k^2 edges, at most about k^3 chains,
    whatever n. In practice there are a handful.
    """
    b, n, k = scores.shape
    allowed = (scores > -torch.inf).double().reshape(b * n, k)
    first = torch.arange(b, device=z.device) * (k + 1)
    while True:
        counts = count_groups(z, k + 1)[:, :k]
        excess, room = (counts - capacity).clamp(min=0), (capacity - counts).clamp(min=0)
        if not bool(excess.any()):
            return z
        group = (z + first[:, None]).reshape(b * n, 1).expand(b * n, k)
        width = allowed.new_zeros([b * (k + 1), k]).scatter_add_(0, group, allowed).reshape(b, k + 1, k)[:, :k]
        successor, units = _shortest_chain(width, excess, room)
        stuck = excess.any(-1) & (units == 0)
        if bool(stuck.any()):
            which = int(stuck.nonzero()[0])
            raise _no_room(scores[which], z[which], capacity[which], int(problems[which]))
        target, _, rank = rank_movers(scores, z, successor)
        z = torch.where((target < k) & (rank < units.unsqueeze(-1)), target, z)


def _shortest_chain(width: Tensor, excess: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the chain of fewest moves from an overfull expert to a free slot, and how many rows fit through it.

    Args:
        width: rows of j that may go to j' [b, k, k].
        excess: rows that each expert has too many [b, k].
        room: free slots of each expert [b, k].

    Returns:
        The next expert on the chain, k off it [b, k]; the rows that can move along it, 0 where there is no chain [b].
    """
    k = excess.shape[-1]
    hops = floyd_warshall(torch.where(width > 0, 1.0, torch.inf).to(width.dtype))
    useful = (excess > 0).unsqueeze(-1) & (room > 0).unsqueeze(-2)
    length, pair = hops.cost.where(useful, torch.inf).flatten(1).min(-1)
    source, end = pair // k, pair % k
    pointer = hops.next_node.gather(-1, end[:, None, None].expand(-1, k, 1)).squeeze(-1)
    pointer = pointer.scatter(-1, end.unsqueeze(-1), end.unsqueeze(-1))  # the walk stays where it arrives
    moving = visited(pointer, source).scatter_(-1, end.unsqueeze(-1), False) & (length < torch.inf).unsqueeze(-1)
    narrowest = width.gather(-1, pointer.unsqueeze(-1)).squeeze(-1).where(moving, torch.inf).amin(-1)
    ends = torch.minimum(excess.gather(-1, source.unsqueeze(-1)), room.gather(-1, end.unsqueeze(-1))).squeeze(-1)
    units = torch.minimum(narrowest, ends.to(width.dtype)).long()
    return pointer.where(moving, k), units.where(length < torch.inf, 0)


def _no_room(scores: Tensor, z: Tensor, capacity: Tensor, problem: int) -> ValueError:
    """The error for one problem with an overfull expert from which no chain leads to a free slot."""
    k = scores.shape[-1]
    overfull = (count_groups(z, k + 1)[:k] > capacity).nonzero()[:, 0]
    return no_room(
        scores.cpu().numpy(),
        (z < k).cpu().numpy(),
        capacity.cpu().numpy(),
        z.int().cpu().numpy()[:, None],
        int(overfull[0]),
        problem,
    )
