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

Where rows and vacancies sit, and what it costs to move them, is in `_seats.py`.

Which rows attain the minimum is looked up only along the chain that is taken. Tied rows move together: a chain carries
as many units as its ends and its thinnest link allow. With identical rows that is the difference between k chains and
n.

Ties between equally short chains go to the lowest-numbered expert; of rows that are tied, the one that comes first in
its expert's list moves.

Legend: m rows with a choice, k experts, w candidates of a row.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit, jit_inline, jit_vector
from equipoise._core._vector import larger, smaller
from equipoise.assignment._kernels._choices import Choices
from equipoise.assignment._kernels._seats import (
    Flow,
    expert_at,
    keep_seats,
    mend_prices,
    move_row,
    new_flow,
    refresh,
    seat_rows,
    settle_vacancies,
)

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


class Search(NamedTuple):
    """Scratch space of a shortest-path search: [k] each. Distances of settled experts are infinite in `pending`."""

    distance: Floats
    pending: Floats
    parent: NDArray[np.int64]


@jit
def new_search(k: int) -> Search:
    """Scratch space for k experts."""
    return Search(np.empty(k), np.empty(k), np.empty(k, np.int64))


@jit_vector
def _least(x: Floats) -> float:
    least = x[0]
    for t in range(x.shape[0]):
        least = smaller(least, x[t])
    return least


@jit_vector
def _relax(
    cost: Floats,
    prices: Floats,
    base: float,
    ceiling: float,
    least: float,
    u: int,
    distance: Floats,
    pending: Floats,
    parent: NDArray[np.int64],
) -> None:
    """Shortens the ways that are shorter through u; there are none to settled experts, which are at most `least` away.

    Rounding may leave a reduced cost of -1e-17, hence the larger of the two: a distance below that of a settled expert
    would undo it.
    """
    for t in range(prices.shape[0]):
        through = larger(base + smaller(cost[u, t], ceiling) + prices[t], least)
        shorter = through < distance[t]
        distance[t] = through if shorter else distance[t]
        pending[t] = through if shorter else pending[t]
        parent[t] = u if shorter else parent[t]


@jit
def shortest_path(
    flow: Flow, search: Search, choices: Choices, capacity: NDArray[np.int64], prices: Floats, source: int
) -> int:
    """Dijkstra from an overfull expert to the nearest one with room; -1 if none can be reached."""
    distance, pending, parent = search.distance, search.pending, search.parent
    cost, load, vacancies, stale = flow.cost, flow.load, flow.vacancies, flow.stale
    distance[:] = np.inf
    pending[:] = np.inf
    distance[source] = pending[source] = 0.0
    while True:
        least = _least(pending)
        if not least < np.inf:
            return -1
        u = 0
        while pending[u] != least:
            u += 1
        if load[u] < capacity[u]:
            return u
        pending[u] = np.inf
        if stale[u]:
            refresh(flow, choices, u)
        ceiling = 0.0 if vacancies[u] > 0 else np.inf
        _relax(cost, prices, least - prices[u], ceiling, least, u, distance, pending, parent)


@jit_inline
def _uses_vacancy(flow: Flow, u: int, v: int) -> bool:
    return flow.vacancies[u] > 0 and flow.cost[u, v] >= 0.0


@jit
def push_along(
    flow: Flow, search: Search, choices: Choices, capacity: NDArray[np.int64], source: int, target: int
) -> int:
    """Moves as many units from source to target as the excess, the room and the thinnest link allow; returns them."""
    units = min(flow.load[source] - capacity[source], capacity[target] - flow.load[target])
    v = target
    while v != source:
        u = search.parent[v]
        units = min(units, flow.vacancies[u] if _uses_vacancy(flow, u, v) else _count_ties(flow, choices, u, v, units))
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
    return units


@jit
def _next_tied(flow: Flow, choices: Choices, a: int, u: int, v: int) -> int:
    """The first row from row a on, in the list of expert u, that moves to v at the least cost; -1 if there is none."""
    at, after, least = flow.at, flow.after, flow.cost[u, v]
    cols, vals, width, dense = choices.cols, choices.vals, choices.width, choices.dense
    while a >= 0:
        own = np.float64(vals[a, at[a]])
        if dense:
            if own - np.float64(vals[a, v]) == least:
                return a
        else:
            for w in range(width[a]):
                if cols[a, w] == v and own - np.float64(vals[a, w]) == least:
                    return a
        a = after[a]
    return -1


@jit
def _count_ties(flow: Flow, choices: Choices, u: int, v: int, most: int) -> int:
    """How many rows would move from u to v at the least cost, as far as that matters."""
    count, a = 0, _next_tied(flow, choices, flow.head[u], u, v)
    while a >= 0 and count < most:
        count += 1
        a = _next_tied(flow, choices, flow.after[a], u, v) if count < most else a
    return count


@jit
def _move_tied_rows(flow: Flow, choices: Choices, u: int, v: int, units: int) -> None:
    a = _next_tied(flow, choices, flow.head[u], u, v) if units > 0 else -1
    for unit in range(units):
        after = flow.after[a]
        move_row(flow, choices, a, v)
        if unit + 1 < units:
            a = _next_tied(flow, choices, after, u, v)


@jit
def balance(
    flow: Flow, search: Search, choices: Choices, capacity: NDArray[np.int64], prices: Floats
) -> tuple[int, int]:
    """Pushes along shortest paths until no expert is overfull.

    Returns:
        The number of paths, and the overfull expert from which no room can be reached (-1: all is well). The search
        then tells how far from it other experts are.
    """
    k = prices.shape[0]
    paths = 0
    for source in range(k):
        while flow.load[source] > capacity[source]:
            target = shortest_path(flow, search, choices, capacity, prices, source)
            if target < 0:
                return paths, source
            reach = search.distance[target]
            for j in range(k):
                prices[j] += max(0.0, reach - search.distance[j])
            if push_along(flow, search, choices, capacity, source, target) == 0:
                return paths, source  # a cost that no row has: inf - inf, from scores that nobody has checked yet
            paths += 1
    return paths, -1


@jit
def exact_flow(
    choices: Choices,
    settled: Floats,
    capacity: NDArray[np.int64],
    prices: Floats,
    z: Ints,
    slop: float,
    seated: int,
    distance: Floats,
) -> int:
    """Every row to its best offer, then chains of moves until no expert is overfull.

    Offers within `slop` of the best count as tied with it, if prices can be mended so that they are. The first rows may
    be `seated`: by an earlier call, which left prices that suit them. They stay where z says until a chain moves them.

    Returns:
        -1 if all is well; else an expert that stays overfull because its rows can go nowhere else. `distance` then says
        what a chain of moves from it to each other expert costs at least, +inf where none leads to.
    """
    m, k = choices.rows.shape[0], prices.shape[0]
    flow = new_flow(m, k, settled)
    keep_seats(flow, choices, z, seated)
    seat_rows(flow, choices, capacity, prices, 0.0 if seated > 0 else slop, seated)
    if slop > 0 and seated == 0 and not mend_prices(flow, choices, prices):
        flow = new_flow(m, k, settled)
        seat_rows(flow, choices, capacity, prices, 0.0, 0)
    settle_vacancies(flow, capacity, prices, capacity.sum() - flow.load.sum())
    search = new_search(k)
    _, stuck = balance(flow, search, choices, capacity, prices)
    distance[:] = search.distance
    for a in range(m):
        z[choices.rows[a]] = expert_at(choices, a, flow.at[a]) if flow.at[a] >= 0 else -1
    return stuck
