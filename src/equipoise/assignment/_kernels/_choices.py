# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Rows that still have a choice, and the few experts they could end at.

Most rows have none and are settled (`_collect.py`); later work is on the rest, a few entries a row, packed closely.

Legend: n rows, k experts, m rows with a choice, w candidates of a row. An expert whose price is +inf is closed.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit, jit_inline
from equipoise._core._vector import larger, smaller

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Scores = NDArray[np.floating[Any]]


class Choices(NamedTuple):
    """Rows with their candidates and the scores of those.

    Attributes:
        rows: [m] where each row stands in the matrix.
        cols: [m, w] its candidates; [1, k] if `dense`: then every expert is a candidate of every row.
        vals: [m, w] their scores.
        width: [m] how many candidates it has; 0 for a row that takes no expert.
        dense: whether `cols` is shared by all rows, and so position and expert are the same thing.
    """

    rows: Ints
    cols: Ints
    vals: Scores
    width: Ints
    dense: bool


@jit
def all_choices(scores: Scores, mask: Flags) -> Choices:
    """Every expert for every row, without a copy of the scores."""
    n, k = scores.shape
    rows, cols, width = np.empty(n, np.int32), np.empty((1, k), np.int32), np.empty(n, np.int32)
    for i in range(n):
        rows[i], width[i] = i, k if mask[i] else 0
    for j in range(k):
        cols[0, j] = j
    return Choices(rows, cols, scores, width, True)


@jit
def width_of_choices(k: int) -> int:
    """How many candidates a row has room for: few enough that all of them take less memory than the scores."""
    return min(k, max(4, min(8, 3 * k // 8)))


@jit
def room_for_choices(scores: Scores, m: int) -> Choices:
    """Space for m rows; memory that is never written is never really taken."""
    w = width_of_choices(scores.shape[1])
    return Choices(
        np.empty(m, np.int32), np.empty((m, w), np.int32), np.empty((m, w), scores.dtype), np.empty(m, np.int32), False
    )


@jit
def first(choices: Choices, m: int) -> Choices:
    """The first m rows."""
    return Choices(choices.rows[:m], choices.cols[:m], choices.vals[:m], choices.width[:m], False)


@jit
def close_ranks(choices: Choices, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Moves rows that were collected block by block up to each other."""
    rows, cols, vals, width = choices.rows, choices.cols, choices.vals, choices.width
    m = sizes[0] if sizes.shape[0] > 0 else 0
    for block in range(1, starts.shape[0]):
        for a in range(starts[block], starts[block] + sizes[block]):
            rows[m], width[m] = rows[a], width[a]
            for w in range(width[a]):
                cols[m, w], vals[m, w] = cols[a, w], vals[a, w]
            m += 1


@jit_inline
def two_best(cols: Ints, vals: Scores, a: int, width: int, prices: Floats) -> tuple[float, float, int]:
    """The two best offers to a row, and where among its candidates the first stands; without branches."""
    best, second, position = vals[a, 0] - prices[np.uint32(cols[a, 0])], -np.inf, 0
    for w in range(1, width):
        offer = vals[a, w] - prices[np.uint32(cols[a, w])]
        position = w if offer > best else position
        second = larger(second, smaller(best, offer))
        best = larger(best, offer)
    return best, second, position


@jit
def narrow(choices: Choices, prices: Floats, reach: float, settled: Floats, z: Ints, counts: Floats) -> Choices:
    """Settles the rows whose best offer is more than `reach` ahead of every other; packs the rest in place.

    Counts the rows that each expert has the best offer for, settled ones included. As in `_collect.py`,
    there is no branch that depends on a row, and additions wait for nothing.
    """
    rows, cols, vals, widths = choices.rows, choices.cols, choices.vals, choices.width
    m, k = rows.shape[0], prices.shape[0]
    experts, undecided, kept = np.empty(m, np.int32), np.empty(m, np.bool_), np.empty(m, np.int32)
    for a in range(m):
        best, second, position = two_best(cols, vals, a, widths[a], prices)
        experts[a] = cols[a, position]
        undecided[a] = best - second <= reach
    tally, size = np.zeros((2, k)), 0
    for a in range(m):
        tally[np.uint32(undecided[a]), np.uint32(experts[a])] += 1
        z[rows[a]] = experts[a]
        kept[size] = a
        size += undecided[a]
    for to in range(size):
        a = kept[to]
        rows[to], widths[to] = rows[a], widths[a]
        for w in range(widths[a]):
            cols[to, w], vals[to, w] = cols[a, w], vals[a, w]
    for j in range(k):
        settled[j] += tally[0, j]
        counts[j] = settled[j] + tally[1, j]
    return first(choices, size)


@jit
def crowded(choices: Choices) -> bool:
    """Whether rows have so many candidates, on average, that for some of them a list may not have had the room."""
    return 2 * choices.width.sum() > choices.width.shape[0] * choices.cols.shape[1]


@jit
def count_spread(
    choices: Choices, prices: Floats, reach: float, settled: Floats, target: Floats, resting: Flags, counts: Floats
) -> None:
    """Counts the rows of each expert if each takes, of the offers within `reach` of its best, the one most in need.

    An expert needs as many rows as it lacks of its target; if it is `resting`, it needs none, but can have too many.
    """
    counts[:] = settled
    for a in range(choices.rows.shape[0]):
        best, _, _ = two_best(choices.cols, choices.vals, a, choices.width[a], prices)
        expert, most = -1, -np.inf
        for w in range(choices.width[a]):
            j = choices.cols[a, w]
            need = target[j] - counts[j]
            need = min(need, 0.0) if resting[j] else need
            if need > most and choices.vals[a, w] - prices[j] >= best - reach:
                expert, most = j, need
        counts[expert] += 1
