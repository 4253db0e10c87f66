# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Choices that rows turn out to need: a better offer that was not on their list, or any way out at all.

Lists of candidates (`_collect.py`) are a guess. Whether it was right shows when rows are priced, and when chains
of moves are looked for among the candidates; here it is put right, for the rows concerned.

Legend: n rows, k experts.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit
from equipoise.assignment._kernels._choices import Choices, Scores, first, room_for_choices
from equipoise.assignment._kernels._collect import collect, new_listing
from equipoise.assignment._kernels._pair import largest
from equipoise.assignment._kernels._pricing import exact_best_offer

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]

# Where rows are shut in with an overfull expert, so many get a way out for each that has to leave.
DOORS = 4


@jit
def reinstate(
    scores: Scores, mask: Flags, prices: Floats, radius: float, wrong: Ints, choices: Choices, settled: Floats, z: Ints
) -> tuple[Choices, int]:
    """Gives the rows that found a better offer elsewhere their choice back.

    Returns:
        The rows with a choice, and how many of them, the first, were not wrong.
    """
    is_wrong = np.zeros(scores.shape[0], np.bool_)
    for i in wrong:
        is_wrong[i] = True
        settled[z[i]] -= 1
    more = room_for_choices(scores, choices.rows.shape[0] + wrong.shape[0])
    m = 0
    for a in range(choices.rows.shape[0]):
        i = choices.rows[a]
        if is_wrong[i]:
            settled[z[i]] += 1  # it had a choice before, so it was never settled
        else:
            more.rows[m] = i
            more.cols[m], more.vals[m], more.width[m] = choices.cols[a], choices.vals[a], choices.width[a]
            m += 1
    right, listing = m, new_listing(scores, prices, radius)
    for i in wrong:
        m += collect(scores, mask, listing, i, i + 1, 1, more, m, settled, z)[0]
    return first(more, m), right


@jit
def ways_out(scores: Scores, z: Ints, prices: Floats, distance: Floats) -> Floats:
    """What it costs the overfull expert to send each row away from those that chains reach; +inf for other rows."""
    n, k = scores.shape
    outside, costs = prices.copy(), np.full(n, np.inf)
    for j in range(k):
        if distance[j] < np.inf:
            outside[j] = np.inf
    for i in range(n):
        if z[i] >= 0 and distance[z[i]] < np.inf:
            offer = exact_best_offer(scores[i], outside)
            if offer > -np.inf:
                costs[i] = distance[z[i]] + np.float64(scores[i, z[i]]) - prices[z[i]] - offer
    return costs


@jit
def open_doors(
    scores: Scores, capacity: Counts, prices: Floats, distance: Floats, choices: Choices, settled: Floats, z: Ints
) -> tuple[Choices, int]:
    """Gives rows that are shut in with an overfull expert candidates outside: those for which it costs least.

    Experts that share no rows with others are a room without a door: no chain of moves among the candidates leads out,
    and none can be found by changing prices inside. So the rows are asked what they would lose by leaving.

    Args:
        scores: [n, k].
        capacity: [k].
        prices: [k].
        distance: [k] of each expert from the overfull one, as `exact_flow` left it.
        choices: the rows with a choice.
        settled: [k] the rows without.
        z: [n] where all of them are.

    Returns:
        The rows with a choice, and how many candidates are new: 0 if no row may leave.
    """
    n, k = scores.shape
    costs = ways_out(scores, z, prices, distance)
    inside = distance < np.inf
    loads = np.zeros(k, np.int64)
    for i in range(n):
        if z[i] >= 0:
            loads[z[i]] += 1
    excess = 0
    for j in range(k):
        excess += max(0, loads[j] - capacity[j]) if inside[j] else 0
    finite, count = np.empty(n), 0
    for i in range(n):
        if costs[i] < np.inf:
            finite[count] = costs[i]
            count += 1
    if count == 0:
        return choices, 0
    most = largest(finite[:count], max(1, count - DOORS * (excess + DOORS)))
    listed, opened, adding = choices.rows.shape[0], 0, 0
    for i in range(n):
        adding += costs[i] <= most
    more = room_for_choices(scores, listed + adding)
    for a in range(listed):
        i, width = choices.rows[a], choices.width[a]
        more.rows[a], more.cols[a], more.vals[a], more.width[a] = i, choices.cols[a], choices.vals[a], width
        if costs[i] <= most:
            add_door(scores, i, inside, prices, z[i], more, a)
            opened += 1
            costs[i] = np.inf
    for i in range(n):
        if costs[i] <= most:
            more.rows[listed], more.width[listed] = i, 1
            more.cols[listed, 0], more.vals[listed, 0] = z[i], scores[i, z[i]]
            settled[z[i]] -= 1
            add_door(scores, i, inside, prices, z[i], more, listed)
            opened += 1
            listed += 1
    return first(more, listed), opened


@jit
def add_door(scores: Scores, i: int, inside: Flags, prices: Floats, own: int, choices: Choices, a: int) -> None:
    """Lists the expert outside that offers row i most; in place of its worst candidate if there is no room."""
    cols, vals, width = choices.cols, choices.vals, choices.width
    best, door = -np.inf, -1
    for j in range(prices.shape[0]):
        offer = np.float64(scores[i, j]) - prices[j]
        if not inside[j] and offer > best:
            best, door = offer, j
    position = width[a]
    if position == cols.shape[1]:
        worst = np.inf
        for w in range(cols.shape[1]):
            offer = np.float64(vals[a, w]) - prices[cols[a, w]]
            if cols[a, w] != own and offer < worst:
                worst, position = offer, w
    else:
        width[a] += 1
    cols[a, position], vals[a, position] = door, scores[i, door]
