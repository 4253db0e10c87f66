# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Who sits where: rows and vacancies at their experts, and what it costs to move them away.

A row sits at the expert that offers it most. The cost of a move, the least over an expert's rows, is kept up to date as
rows come, and computed anew when some have left and it is asked for.

Free slots are rows too: a vacancy scores 0 everywhere and fills a slot of an expert that no row wants. They are counted
(`vacancies[j]`), never stored. A vacancy can move from j to j' at cost 0, so an expert that holds one is at the least
price, which is what complementary slackness asks of an expert with a free slot.

Legend: m rows with a choice, k experts, w candidates of a row.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit, jit_inline, jit_vector
from equipoise._core._vector import smaller
from equipoise.assignment._kernels._choices import Choices, Scores
from equipoise.assignment._kernels._pricing import exact_best_offer

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
        stale: [k] whether the expert lost a row since its line of `cost` was computed.
    """

    at: Ints
    head: Ints
    after: Ints
    before: Ints
    load: NDArray[np.int64]
    vacancies: NDArray[np.int64]
    cost: Floats
    stale: Flags


@jit
def new_flow(m: int, k: int, settled: Floats) -> Flow:
    """No row with a choice is anywhere; those without are `settled` [k]."""
    return Flow(
        np.full(m, -1, np.int32),
        np.full(k, -1, np.int32),
        np.empty(m, np.int32),
        np.empty(m, np.int32),
        settled.astype(np.int64),
        np.zeros(k, np.int64),
        np.full((k, k), np.inf),
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
    at, after, cost = flow.at, flow.after, flow.cost[j]
    cols, vals, width = choices.cols, choices.vals, choices.width
    if choices.dense:
        _offer_all_moves(at, after, vals, a, chain, cost)
        return
    while a >= 0:
        own = np.float64(vals[a, at[a]])
        for w in range(width[a]):
            cost[cols[a, w]] = min(cost[cols[a, w]], own - np.float64(vals[a, w]))
        a = after[a] if chain else -1


@jit_vector
def _offer_all_moves(at: Ints, after: Ints, vals: Scores, a: int, chain: bool, cost: Floats) -> None:
    while a >= 0:
        own = np.float64(vals[a, at[a]])
        for t in range(cost.shape[0]):
            cost[t] = smaller(cost[t], own - np.float64(vals[a, t]))
        a = after[a] if chain else -1


@jit
def refresh(flow: Flow, choices: Choices, j: int) -> None:
    """Computes the costs of all moves away from expert j anew."""
    flow.cost[j, :] = np.inf
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
def seat_rows(
    flow: Flow,
    choices: Choices,
    capacity: NDArray[np.int64],
    prices: Floats,
    slop: float,
    seated: int,
) -> None:
    """Rows to their best offers; among tied offers to the expert with the most room left, then the lowest index."""
    at, load = flow.at, flow.load
    cols, vals, width, dense = choices.cols, choices.vals, choices.width, choices.dense
    # Backwards, because a list grows at its front: an expert's rows then stand in the order of memory.
    for a in range(choices.rows.shape[0] - 1, seated - 1, -1):
        best = -np.inf
        if dense and width[a] > 0:
            best = exact_best_offer(vals[a], prices)
        elif not dense:
            for w in range(width[a]):
                best = max(best, np.float64(vals[a, w]) - prices[cols[a, w]])
        expert, most_room = -1, 0
        for w in range(width[a]):
            j = w if dense else cols[a, w]
            if np.float64(vals[a, w]) - prices[j] >= best - slop:
                room = capacity[j] - load[j]
                if expert < 0 or room > most_room or (room == most_room and j < expert):
                    expert, most_room = j, room
                    at[a] = w
        if expert >= 0:
            load[expert] += 1
            link(flow, a, expert)


@jit
def keep_seats(flow: Flow, choices: Choices, z: Ints, seated: int) -> None:
    """The first rows, those that are `seated` by an earlier call, to where they are."""
    for a in range(seated - 1, -1, -1):
        expert = z[choices.rows[a]]
        if expert >= 0:
            flow.at[a] = position_of(choices, a, expert)
            flow.load[expert] += 1
            link(flow, a, expert)


@jit_vector
def _least_sum(cost: Floats, prices: Floats) -> float:
    least = cost[0] + prices[0]
    for t in range(cost.shape[0]):
        least = smaller(least, cost[t] + prices[t])
    return least


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
            least = min(mended[j], _least_sum(flow.cost[j], mended))
            # Sums along different paths differ by rounding, which must not pass for a cycle of negative cost.
            if least < mended[j] - 1e-15 * abs(mended[j]):
                mended[j] = least
                changed = True
        if not changed:
            prices[:] = mended
            return True
    return False
