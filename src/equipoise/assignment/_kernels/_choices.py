# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""One pass over the scores: the rows that still have a choice, and the few experts they could end at.

At prices near the optimal ones a row can only end at an expert whose offer `s_ij - price_j` is within some radius of
its best. Most rows then have no choice at all and are settled; later work is on the rest, a few entries a row, packed
closely. Whether the radius was large enough is not assumed but found out at the end, when every entry is priced
(`_pricing.py`).

Legend: n rows, k experts, m rows with a choice, w candidates of a row. An expert whose price is +inf is closed.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit, jit_inline, jit_vector
from equipoise._core._vector import LANES, larger, lowest_bit, not_below

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
    width = np.empty(n, np.int32)
    for i in range(n):
        width[i] = k if mask[i] else 0
    return Choices(np.arange(n).astype(np.int32), np.arange(k).astype(np.int32).reshape(1, k), scores, width, True)


@jit
def width_of_choices(k: int) -> int:
    """How many candidates a row has room for: few enough that all of them take less memory than the scores."""
    return min(k, max(4, min(8, k // 4)))


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


@jit_vector
def offers_and_best(row: Scores, prices: Scores, offers: Scores) -> float:
    """Writes `row - prices` and returns its maximum."""
    best = row[0] - prices[0]
    for j in range(row.shape[0]):
        offer = row[j] - prices[j]
        offers[j] = offer
        best = larger(best, offer)
    return best


@jit_vector
def best_offer(row: Scores, prices: Scores) -> float:
    """The largest `row - prices`."""
    best = row[0] - prices[0]
    for j in range(row.shape[0]):
        best = larger(best, row[j] - prices[j])
    return best


@jit
def count_within(offers: Scores, floor: float) -> int:
    """Counts the offers that are at least `floor`."""
    count = np.int32(0)
    for j in range(offers.shape[0]):
        count += np.int32(offers[j] >= floor)
    return count


@jit
def first_at_least(offers: Scores, floor: float) -> int:
    """The least index whose offer is at least `floor`."""
    k = offers.shape[0]
    index = np.int32(k)
    for j in range(k):
        index = min(index, np.int32(j) if offers[j] >= floor else np.int32(k))
    return index


@jit_inline
def find_candidates(scores: Scores, i: int, prices: Scores, floor: float, m: int, cols: Ints, vals: Scores) -> int:
    """Writes the experts whose offer to row i is not below the floor to line m, as far as it has room; counts them."""
    k, room = scores.shape[1], cols.shape[1]
    width = 0
    whole = k - k % LANES
    for start in range(0, whole, LANES):
        found = not_below(scores[i], prices, start, floor)
        while found != 0:
            j = start + lowest_bit(found)
            found &= found - np.uint32(1)
            if width < room:
                cols[m, width], vals[m, width] = j, scores[i, j]
            width += 1
    for j in range(whole, k):
        if not scores[i, j] - prices[j] < floor:  # said so that NaN is found
            if width < room:
                cols[m, width], vals[m, width] = j, scores[i, j]
            width += 1
    return width


@jit
def keep_nearest(
    row: Scores, prices: Scores, radii: Scores, turn: int, offers: Scores, found: Ints, cols: Ints, vals: Scores
) -> int:
    """Writes a row's candidates where more than fit are within `radii[0]`; or 0 if the row is illegal.

    The next smaller radius is tried. Where offers are tied, so that this does not help, those kept start at a different
    one for every row (`turn`): tied rows must not all be confined to the same few experts. `offers` and `found` are
    scratch space for k and k + 1 entries.
    """
    room = cols.shape[0]
    for j in range(row.shape[0]):
        if not row[j] < np.inf:
            return 0
    best = offers_and_best(row, prices, offers)
    count, shrink, floor = room + 1, 1, best
    while count > room and shrink < radii.shape[0]:
        floor = best - radii[shrink]
        count = count_within(offers, floor)
        shrink += 1
    within = 0
    for j in range(offers.shape[0]):
        found[within] = j
        within += offers[j] >= floor  # no branch to mispredict
    if within > room:
        turn_to_front(found, within, turn, first_at_least(offers, best))
    width = min(within, room)
    for w in range(width):
        cols[w] = found[w]
        vals[w] = row[found[w]]
    return width


@jit
def turn_to_front(found: Ints, within: int, turn: int, best: int) -> None:
    """Starts the list at another place for every row, but always with the best."""
    turned = np.empty(within, np.int32)
    for w in range(within):
        turned[w] = found[(turn + w) % within]
    found[0] = best
    width = 1
    for w in range(within):
        if turned[w] != best:
            found[width] = turned[w]
            width += 1


@jit
def collect(
    scores: Scores,
    mask: Flags,
    prices: Floats,
    radius: float,
    start: int,
    stop: int,
    stride: int,
    choices: Choices,
    offset: int,
    settled: Floats,
    z: Ints,
) -> tuple[int, int]:
    """Collects the choices of every `stride`-th row from `start` to `stop`, written from `offset` on.

    Rows without a choice are written to z (-1: masked, no expert) and counted in `settled`.

    Returns:
        How many rows have a choice, and the first row that holds a NaN or +inf or has no expert to go to (-1: none).
    """
    k = scores.shape[1]
    offers, found = np.empty(k, scores.dtype), np.empty(k + 1, np.int32)
    # Everything in the scores' own precision: of float32, twice as many entries fit in a vector instruction.
    near_prices = prices.astype(scores.dtype)
    radii = (radius * 0.5 ** np.arange(7)).astype(scores.dtype)
    rows, cols, vals, width = choices.rows, choices.cols, choices.vals, choices.width
    room = cols.shape[1]
    m = offset
    for i in range(start, stop, stride):
        if not mask[i]:
            z[i] = -1
            continue
        best = best_offer(scores[i], near_prices)
        count = find_candidates(scores, i, near_prices, best - radii[0], m, cols, vals)
        # NaN and +inf are among the candidates, if the row holds any.
        legal = best > -np.inf
        for w in range(min(count, room)):
            legal = legal and vals[m, w] < np.inf
        if legal and count > room:
            count = keep_nearest(scores[i], near_prices, radii, i, offers, found, cols[m], vals[m])
        if not legal or count == 0:
            return m - offset, i
        if count == 1:
            j = cols[m, 0]
            z[i] = j
            settled[j] += 1
        else:
            rows[m] = i
            width[m] = count
            m += 1
    return m - offset, -1


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


@jit
def narrow(choices: Choices, prices: Floats, reach: float, settled: Floats, z: Ints) -> Choices:
    """Settles the rows whose best offer is more than `reach` ahead of every other; packs the rest in place."""
    rows, cols, vals, width = choices.rows, choices.cols, choices.vals, choices.width
    kept = 0
    for a in range(rows.shape[0]):
        best, second, expert = -np.inf, -np.inf, -1
        for w in range(width[a]):
            j = cols[a, w]
            offer = vals[a, w] - prices[j]
            if offer > best:
                best, second, expert = offer, best, j
            else:
                second = max(second, offer)
        if best - second > reach:
            settled[expert] += 1
            z[rows[a]] = expert
        else:
            rows[kept], width[kept] = rows[a], width[a]
            for w in range(width[a]):
                cols[kept, w], vals[kept, w] = cols[a, w], vals[a, w]
            kept += 1
    return first(choices, kept)


@jit
def best_counts(choices: Choices, prices: Floats, settled: Floats) -> Floats:
    """Rows at each expert if every row took its best offer."""
    cols, vals, width = choices.cols, choices.vals, choices.width
    counts = settled.copy()
    for a in range(width.shape[0]):
        best, expert = -np.inf, -1
        for w in range(width[a]):
            offer = vals[a, w] - prices[cols[a, w]]
            if offer > best:
                best, expert = offer, cols[a, w]
        counts[expert] += 1
    return counts
