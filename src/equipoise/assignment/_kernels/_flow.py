# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Successive shortest paths on the graph of k experts: from any prices to an optimal assignment.

Rows sit at the expert that offers them most, `max_j s_ij - price_j`. Such an assignment is optimal for the loads it
happens to have. While an expert is overfull, the cheapest chain of moves from it to an expert with room is applied:
row i_1 from j_0 to j_1, row i_2 from j_1 to j_2, and so on. The cost of a move from j to j' is

    cost[j, j'] = min over rows i in j of s_ij - s_ij'          (the paper's d_jj', App. D.2),

its reduced cost `cost[j, j'] - price_j + price_j'` is never negative (that is what "offers most" says), so Dijkstra
applies, and raising the price of every settled expert by `dist(target) - dist(expert)` keeps it so, with equality on
the path. Nothing infeasible remains at the end, and nothing that a row would like better: primal and dual feasible.

Free slots are rows too: a vacancy scores 0 everywhere and fills a slot of an expert that no row wants. They are counted
(`vacancies[j]`), never stored. A vacancy can move from j to j' at cost 0, so an expert that holds one is at the least
price, which is what complementary slackness asks of an expert with a free slot.

Tied rows move together: `ties[j, j']` counts the rows that attain the minimum, and a chain carries as many units as its
ends and its thinnest link allow. With identical rows that is the difference between k chains and n.

Ties between equally short chains go to the lowest-numbered expert; of rows that are tied, the one that comes first in
its expert's list moves.

Legend: m rows with a choice, k experts, w candidates of a row.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit, jit_inline
from equipoise.assignment._kernels._choices import Choices

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Flow(NamedTuple):
    """Everything that moves while rows are moved.

    Attributes:
        at: [m] the candidate that each row is at, as a position among its candidates; -1 if it takes no expert.
        head: [k] the first row of each expert's list; -1 ends a list.
        after: [m] the row behind each row in its list.
        before: [m] the row in front of each row in its list.
        load: [k] rows and vacancies at each expert.
        vacancies: [k] free slots at each expert.
        cost: [k, k] the least cost of moving a row from one expert to another.
        row: [k, k] the row that attains it.
        ties: [k, k] how many rows attain it.
        stale: [k] whether the expert lost a row since its line of `cost` was computed.
    """

    at: Ints
    head: Ints
    after: Ints
    before: Ints
    load: NDArray[np.int64]
    vacancies: NDArray[np.int64]
    cost: Floats
    row: Ints
    ties: Ints
    stale: Flags


@jit
def new_flow(m: int, k: int) -> Flow:
    """An empty flow: no row is anywhere."""
    return Flow(
        np.full(m, -1, np.int32),
        np.full(k, -1, np.int32),
        np.empty(m, np.int32),
        np.empty(m, np.int32),
        np.zeros(k, np.int64),
        np.zeros(k, np.int64),
        np.full((k, k), np.inf),
        np.full((k, k), -1, np.int32),
        np.zeros((k, k), np.int32),
        np.ones(k, np.bool_),
    )


@jit_inline
def expert_at(choices: Choices, a: int, position: int) -> int:
    """The expert that is row a's candidate number `position`."""
    return position if choices.dense else choices.cols[a, position]


@jit_inline
def position_of(choices: Choices, a: int, j: int) -> int:
    """Where expert j stands among row a's candidates; -1 if it is not one of them."""
    if choices.dense:
        return j
    for w in range(choices.width[a]):
        if choices.cols[a, w] == j:
            return w
    return -1


@jit_inline
def link(flow: Flow, a: int, j: int) -> None:
    """Puts row a at the front of expert j's list."""
    first = flow.head[j]
    flow.after[a] = first
    flow.before[a] = -1
    if first >= 0:
        flow.before[first] = a
    flow.head[j] = a


@jit_inline
def unlink(flow: Flow, a: int, j: int) -> None:
    """Takes row a out of expert j's list."""
    after, before = flow.after[a], flow.before[a]
    if before >= 0:
        flow.after[before] = after
    else:
        flow.head[j] = after
    if after >= 0:
        flow.before[after] = before


@jit
def offer_moves(flow: Flow, choices: Choices, a: int, j: int, chain: bool) -> None:
    """Lets row a, which is at expert j, lower the costs of moves away from j; with `chain`, all rows behind it too."""
    # Bound to names once: taking an array out of a tuple counts references, which costs more than using it.
    at, after = flow.at, flow.after
    cost, row, ties = flow.cost[j], flow.row[j], flow.ties[j]
    cols, vals, width, dense = choices.cols, choices.vals, choices.width, choices.dense
    while a >= 0:
        own = np.float64(vals[a, at[a]])
        for w in range(width[a]):
            t = w if dense else cols[a, w]
            delta = own - np.float64(vals[a, w])
            if delta < cost[t]:
                cost[t] = delta
                row[t] = a
                ties[t] = 1
            elif delta == cost[t]:
                ties[t] += 1
        a = after[a] if chain else -1


@jit
def refresh(flow: Flow, choices: Choices, j: int) -> None:
    """Computes the costs of all moves away from expert j anew."""
    cost, ties = flow.cost, flow.ties
    for t in range(cost.shape[0]):
        cost[j, t] = np.inf
        ties[j, t] = 0
    offer_moves(flow, choices, flow.head[j], j, True)
    flow.stale[j] = False


@jit
def move_row(flow: Flow, choices: Choices, a: int, j: int) -> None:
    """Moves row a from where it is to expert j."""
    origin = expert_at(choices, a, flow.at[a])
    unlink(flow, a, origin)
    flow.stale[origin] = True
    flow.at[a] = position_of(choices, a, j)
    link(flow, a, j)
    if not flow.stale[j]:
        offer_moves(flow, choices, a, j, False)


class Search(NamedTuple):
    """Scratch space of a shortest-path search: [k] each."""

    distance: Floats
    parent: Ints
    settled: Flags


@jit
def new_search(k: int) -> Search:
    """Scratch space for k experts."""
    return Search(np.empty(k), np.empty(k, np.int32), np.empty(k, np.bool_))


@jit
def shortest_path(
    flow: Flow, search: Search, choices: Choices, capacity: NDArray[np.int64], prices: Floats, source: int
) -> int:
    """Dijkstra from an overfull expert to the nearest one with room; -1 if none can be reached."""
    k = prices.shape[0]
    distance, parent, settled = search.distance, search.parent, search.settled
    cost, load, vacancies, stale = flow.cost, flow.load, flow.vacancies, flow.stale
    for t in range(k):
        distance[t] = np.inf
        settled[t] = False
    distance[source] = 0.0
    while True:
        u, least = -1, np.inf
        for t in range(k):
            if not settled[t] and distance[t] < least:
                u, least = t, distance[t]
        if u < 0 or load[u] < capacity[u]:
            return u
        settled[u] = True
        if stale[u]:
            refresh(flow, choices, u)
        ceiling = 0.0 if vacancies[u] > 0 else np.inf
        base = least - prices[u]
        for t in range(k):
            through = base + min(cost[u, t], ceiling) + prices[t]
            # Rounding may leave a reduced cost of -1e-17; a distance below that of a settled expert would undo it.
            if not settled[t] and through < distance[t]:
                distance[t] = max(through, least)
                parent[t] = u


@jit_inline
def _uses_vacancy(flow: Flow, u: int, v: int) -> bool:
    return flow.vacancies[u] > 0 and flow.cost[u, v] >= 0.0


@jit
def push_along(
    flow: Flow, search: Search, choices: Choices, capacity: NDArray[np.int64], source: int, target: int
) -> None:
    """Moves as many units from source to target as the excess, the room and the thinnest link allow."""
    units = min(flow.load[source] - capacity[source], capacity[target] - flow.load[target])
    v = target
    while v != source:
        u = search.parent[v]
        units = min(units, flow.vacancies[u] if _uses_vacancy(flow, u, v) else flow.ties[u, v])
        v = u
    # From the far end backwards, so that a row that has just arrived at an expert is not the one that leaves it.
    v = target
    while v != source:
        u = search.parent[v]
        if _uses_vacancy(flow, u, v):
            flow.vacancies[u] -= units
            flow.vacancies[v] += units
        else:
            _move_tied_rows(flow, choices, u, v, units)
        v = u
    flow.load[source] -= units
    flow.load[target] += units


@jit
def _move_tied_rows(flow: Flow, choices: Choices, u: int, v: int, units: int) -> None:
    if units == 1:
        move_row(flow, choices, flow.row[u, v], v)
        return
    cost = flow.cost[u, v]
    a = flow.head[u]
    while units > 0:
        after = flow.after[a]
        w = position_of(choices, a, v)
        if w >= 0 and np.float64(choices.vals[a, flow.at[a]]) - np.float64(choices.vals[a, w]) == cost:
            move_row(flow, choices, a, v)
            units -= 1
        a = after


@jit
def settle_vacancies(flow: Flow, capacity: NDArray[np.int64], prices: Floats, total: int) -> None:
    """Puts `total` vacancies at the cheapest experts, those with room first."""
    least = prices.min()
    last = -1
    for j in range(prices.shape[0]):
        if prices[j] == least:
            units = max(0, min(total, capacity[j] - flow.load[j]))
            flow.vacancies[j] += units
            flow.load[j] += units
            total -= units
            last = j
    flow.vacancies[last] += total
    flow.load[last] += total


@jit
def balance(flow: Flow, choices: Choices, capacity: NDArray[np.int64], prices: Floats) -> tuple[int, int]:
    """Pushes along shortest paths until no expert is overfull.

    Returns:
        The number of paths, and the overfull expert from which no room can be reached (-1: all is well).
    """
    k = prices.shape[0]
    search = new_search(k)
    paths = 0
    for source in range(k):
        while flow.load[source] > capacity[source]:
            target = shortest_path(flow, search, choices, capacity, prices, source)
            if target < 0:
                return paths, source
            reach = search.distance[target]
            for j in range(k):
                if search.settled[j]:
                    prices[j] += reach - search.distance[j]
            push_along(flow, search, choices, capacity, source, target)
            paths += 1
    return paths, -1


@jit
def seat_rows(
    flow: Flow, choices: Choices, capacity: NDArray[np.int64], prices: Floats, settled: Floats, slop: float
) -> None:
    """Every row to its best offer; among tied offers to the expert with the most room left, then the lowest index."""
    at, load = flow.at, flow.load
    cols, vals, width, dense = choices.cols, choices.vals, choices.width, choices.dense
    for j in range(capacity.shape[0]):
        load[j] = int(settled[j])
    # Backwards, because a list grows at its front: an expert's rows then stand in the order of memory.
    for a in range(choices.rows.shape[0] - 1, -1, -1):
        best = -np.inf
        for w in range(width[a]):
            best = max(best, np.float64(vals[a, w]) - prices[w if dense else cols[a, w]])
        expert, most_room = -1, 0
        for w in range(width[a]):
            j = w if dense else cols[a, w]
            room = capacity[j] - load[j]
            tied = np.float64(vals[a, w]) - prices[j] >= best - slop
            if tied and (expert < 0 or room > most_room or (room == most_room and j < expert)):
                expert, most_room = j, room
                at[a] = w
        if expert >= 0:
            load[expert] += 1
            link(flow, a, expert)


@jit
def mend_prices(flow: Flow, choices: Choices, prices: Floats) -> bool:
    """Lowers prices until no row has a better offer than where it sits (Bellman and Ford on the k experts).

    Returns:
        Whether that is possible; if not, prices are as they were.
    """
    k = prices.shape[0]
    mended = prices.copy()
    for j in range(k):
        refresh(flow, choices, j)
    for _ in range(k + 1):
        changed = False
        for j in range(k):
            least = mended[j]
            for t in range(k):
                least = min(least, flow.cost[j, t] + mended[t])
            # Sums along different paths differ by rounding, which must not pass for a cycle of negative cost.
            if least < mended[j] - 1e-15 * abs(mended[j]):
                mended[j] = least
                changed = True
        if not changed:
            prices[:] = mended
            return True
    return False
