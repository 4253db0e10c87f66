# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Solve: shortest chains of moves on a graph of k experts, until none holds more than it has room for.

Every contested row takes its best offers at the current prices. That is optimal for the counts it happens to lead to,
and what is left is to move rows from experts that hold too many to experts with room. The edge j -> j' costs the least
loss over rows that hold j and not j',

    move_cost[j, j'] = min s_ij - s_ij',

the paper's d_jj' (App. D.2). Reduced by the prices it is never negative, so Dijkstra's algorithm finds the cheapest
chain of moves. Raising the price of every expert on the way by what it is nearer to the source than the end of the
chain keeps it so (successive shortest paths).

A chain may use a row more than once, and that is no problem. The experts that a chain leaves differ from each other,
and so do those that it enters. A row that moves from j to j' and from t to t' holds j and t, but neither j' nor t', so
the four differ, and the row can make both moves at once for the sum of their costs.

Free slots move like rows that score 0 for every expert. They are counted, not listed.

Legend: k experts, m contested rows, whose candidates are in ascending order. `held` marks the entries of the lists that
rows hold. `_records.py` has the types.
"""

import numpy as np

from equipoise._core._jit import jit
from equipoise.assignment._kernels._records import Counts, Flags, Floats, Ints, Lists, Scores

Seats = tuple[Counts, Ints, Scores, Flags, Ints, Counts, Counts, Counts]
"""Who holds what: `first`, `cols` and `vals` of the lists; which entries are `held`; whose each entry is, `owner`; the
entries that expert j holds, as a chain: `head[j]`, then `after[entry]`, until -1; and its free `slots`."""


@jit
def seat_rows(lists: Lists, prices: Floats, held: Flags, load: Counts) -> None:
    """Lets every row hold its best offers; among equal ones, those that it held before, then the first."""
    _, need, first, cols, vals = lists
    for a in range(need.shape[0]):
        begin, end = first[a], first[a + 1]
        for e in range(begin, end):
            held[e] = False
        for _ in range(need[a]):
            best, position = -np.inf, -1
            for e in range(begin, end):
                offer = np.float64(vals[e]) - prices[cols[e]]
                if not held[e] and offer > best:
                    best, position = offer, e
            held[position] = True
            load[cols[position]] += 1


@jit
def link_seats(seats: Seats) -> None:
    """Chains the entries that each expert holds, and notes whose they are."""
    first, cols, _, held, owner, head, after, _ = seats
    head[:] = -1
    for a in range(first.shape[0] - 2, -1, -1):
        for e in range(first[a + 1] - 1, first[a] - 1, -1):
            owner[e] = a
            if held[e]:
                after[e] = head[cols[e]]
                head[cols[e]] = e


@jit
def note_losses(own: float, begin: int, end: int, cols: Ints, vals: Scores, held: Flags, line: Floats) -> None:
    """Lowers the costs of leaving an expert to what a row loses that has these candidates and this score there."""
    for f in range(begin, end):
        loss = own - vals[f]
        t = np.uint32(cols[f])
        if not held[f] and loss < line[t]:
            line[t] = loss


@jit
def note_moves(a: int, seats: Seats, cost: Floats) -> None:
    """Lowers the costs of moves that row a can make."""
    first, cols, vals, held = seats[:4]
    for e in range(first[a], first[a + 1]):
        if held[e]:
            note_losses(np.float64(vals[e]), first[a], first[a + 1], cols, vals, held, cost[cols[e]])


@jit
def leave_cost(j: int, seats: Seats, line: Floats) -> None:
    """Writes the least loss at which expert j can hand a row, or a free slot, to each other expert."""
    first, cols, vals, held, owner, head, after, slots = seats
    line[:] = 0.0 if slots[j] > 0 else np.inf
    e = head[j]
    while e >= 0:
        a = owner[e]
        note_losses(np.float64(vals[e]), first[a], first[a + 1], cols, vals, held, line)
        e = after[e]


@jit
def find(t: int, begin: int, end: int, cols: Ints) -> int:
    """The entry of candidate t between two entries, where candidates are in ascending order; -1 if there is none."""
    while end - begin > 1:
        middle = (begin + end) // 2
        if cols[middle] <= t:
            begin = middle
        else:
            end = middle
    return begin if cols[begin] == t else -1


@jit
def count_movers(j: int, t: int, loss: float, most: int, seats: Seats) -> int:
    """Counts the rows and free slots, up to `most`, that can go from j to t for exactly this loss."""
    first, cols, vals, held, owner, head, after, slots = seats
    count, e = 0, head[j]
    while e >= 0 and count < most:
        a = owner[e]
        f = find(t, first[a], first[a + 1], cols)
        count += f >= 0 and not held[f] and np.float64(vals[e]) - vals[f] == loss
        e = after[e]
    return min(most, count + slots[j]) if loss == 0.0 else count


@jit
def move(j: int, t: int, loss: float, amount: int, seats: Seats, cost: Floats) -> None:
    """Moves so many of them; rows before free slots."""
    first, cols, vals, held, owner, head, after, slots = seats
    e, before = head[j], -1
    while e >= 0 and amount > 0:
        a, following = owner[e], after[e]
        to = find(t, first[a], first[a + 1], cols)
        if to < 0 or held[to] or np.float64(vals[e]) - vals[to] != loss:
            before = e
        else:
            amount -= 1
            if before < 0:
                head[j] = following
            else:
                after[before] = following
            held[e], held[to] = False, True
            after[to] = head[t]
            head[t] = to
            note_moves(np.int64(a), seats, cost)
        e = following
    if amount > 0:
        slots[j] -= amount
        slots[t] += amount
        for u in range(slots.shape[0]):
            cost[t, u] = min(cost[t, u], 0.0)


@jit
def nearest_room(excess: Counts, prices: Floats, cost: Floats, distance: Floats, parent: Counts, done: Flags) -> int:
    """Dijkstra's algorithm from all experts that hold too many; returns the nearest one with room, or -1."""
    k = prices.shape[0]
    for j in range(k):
        distance[j] = 0.0 if excess[j] > 0 else np.inf
        parent[j], done[j] = -1, False
    while True:
        j, least = -1, np.inf
        for t in range(k):
            if not done[t] and distance[t] < least:
                j, least = t, distance[t]
        if j < 0 or excess[j] < 0:
            return j
        done[j] = True
        line, own = cost[j], prices[j]
        for t in range(k):
            through = least + max(0.0, line[t] - own + prices[t])
            if through < distance[t]:
                distance[t], parent[t] = through, j


@jit
def place_slots(free: int, prices: Floats, load: Counts, room: Counts, slots: Counts) -> None:
    """Puts free slots where the price is least, as they fit; what is left over, with the first such expert."""
    lowest, cheapest = np.inf, -1
    for j in range(prices.shape[0]):
        slots[j] = 0
        if prices[j] < lowest and room[j] >= 0:
            lowest, cheapest = prices[j], j
    for j in range(prices.shape[0]):
        if prices[j] == lowest:
            slots[j] = max(0, min(free, room[j] - load[j]))
            free -= slots[j]
    if free > 0:
        slots[cheapest] += free


@jit
def exact_flow(lists: Lists, room: Counts, prices: Floats, held: Flags) -> tuple[int, int]:
    """Finds the optimal places of contested rows, starting from prices that are about right, and the prices.

    Args:
        lists: the contested rows.
        room: [k] the slots that settled rows leave.
        prices: [k], changed in place.
        held: [entries], which candidates each row takes in the end, written here.

    Returns:
        An expert that holds too many, with no chain to one with room among the candidates: -1 if it is solved. And the
        number of chains.
    """
    _, _, first, cols, vals = lists
    k, entries = prices.shape[0], cols.shape[0]
    load, slots, excess = np.zeros(k, np.int64), np.zeros(k, np.int64), np.empty(k, np.int64)
    owner, head, after = np.empty(entries, np.int32), np.empty(k, np.int64), np.empty(entries, np.int64)
    distance, parent, done = np.empty(k), np.empty(k, np.int64), np.empty(k, np.bool_)
    seats = (first, cols, vals, held, owner, head, after, slots)
    seat_rows(lists, prices, held, load)
    link_seats(seats)
    place_slots(room.sum() - load.sum(), prices, load, room, slots)
    # Where rows have left, costs are lower bounds, which serve the search as well: what a chain relies on is looked at
    # before it is taken, and computed anew if no row can move for it any more.
    cost = np.full((k, k), np.inf)
    for a in range(first.shape[0] - 1):
        note_moves(a, seats, cost)
    over = 0
    for j in range(k):
        for t in range(k if slots[j] > 0 else 0):
            cost[j, t] = min(cost[j, t], 0.0)
        excess[j] = load[j] + slots[j] - room[j]
        over += max(0, excess[j])
    chains = 0
    while over > 0:
        chains += 1
        end = nearest_room(excess, prices, cost, distance, parent, done)
        if end < 0:
            return np.argmax(excess), chains
        reach = distance[end]
        for j in range(k):
            if distance[j] < reach:
                prices[j] += reach - distance[j]
        # As many at once as every link of the chain allows: where rows are identical, one at a time is quadratic.
        amount, t = -excess[end], end
        while parent[t] >= 0 and amount > 0:
            j = parent[t]
            amount = count_movers(j, t, cost[j, t], amount, seats)
            if amount == 0:
                leave_cost(j, seats, cost[j])
            t = j
        if amount == 0:
            continue
        amount = min(amount, excess[t])
        excess[t] -= amount
        excess[end] += amount
        over -= amount
        t = end
        while parent[t] >= 0:  # from the end back, so that no link finds rows that have just arrived
            j = parent[t]
            move(j, t, cost[j, t], amount, seats, cost)
            t = j
    return -1, chains
