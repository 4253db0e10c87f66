# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""One pass over the scores: which rows have a choice, and what is known of those that have none.

At prices near the optimal ones a row can only end at an expert whose offer `s_ij - price_j` is within some radius of
its best. Whether the radius was large enough is not assumed but found out at the end, when rows are priced
(`_pricing.py`).

Legend: n rows, k experts, m rows with a choice, w candidates of a row. An expert whose price is +inf is closed.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit, jit_inline, jit_vector
from equipoise._core._vector import LANES, count_bits, larger, lowest_bit, not_below
from equipoise.assignment._kernels._choices import Choices, Scores

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Experts whose marks are the bits of one integer; and rows that are marked before their candidates are listed.
WORD = 64
CHUNK_ROWS = 1024


class Listing(NamedTuple):
    """By what candidates are collected, and what that says of rows that have only one.

    Attributes:
        prices: [k] in the scores' own precision: of float32, twice as many entries fit in a vector instruction.
        radius: how far an offer may be below a row's best one.
        alone: [n] the score of a row's only candidate; NaN for a row that has, or had, a choice, or is masked.
    """

    prices: Scores
    radius: float
    alone: Scores


@jit
def new_listing(scores: Scores, prices: Floats, radius: float) -> Listing:
    """A listing of which nothing is collected yet."""
    return Listing(
        prices.astype(scores.dtype), np.float64(scores.dtype.type(radius)), np.empty(scores.shape[0], scores.dtype)
    )


@jit
def all_listed(scores: Scores) -> Listing:
    """Every row has a choice."""
    n, k = scores.shape
    return Listing(np.zeros(k, scores.dtype), 0.0, np.full(n, np.nan, scores.dtype))


@jit
def enlist(listing: Listing, rows: Ints) -> None:
    """Notes that these rows have a choice now."""
    for i in rows:
        listing.alone[i] = np.nan


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


class Chunk(NamedTuple):
    """Rows between reading their scores and listing their candidates.

    Attributes:
        marks: [rows, words] one bit for each candidate.
        counts: [rows] how many those are; 0 for a masked row.
        listed: [rows] where in the chunk those rows stand that have a choice.
        order: [rows] the same, those with the fewest candidates first.
    """

    marks: NDArray[np.uint64]
    counts: Ints
    listed: Ints
    order: Ints


@jit
def new_chunk(rows: int, k: int) -> Chunk:
    """Scratch space for so many rows."""
    marks = np.empty((rows, (k + WORD - 1) // WORD), np.uint64)
    return Chunk(marks, np.empty(rows, np.int32), np.empty(rows, np.int32), np.empty(rows, np.int32))


@jit_inline
def candidate_bits(scores: Scores, i: int, prices: Scores, floor: float, start: int) -> int:
    """One bit for each of 64 experts from `start` on, as far as there are: whether its offer is not below the floor."""
    stop = min(scores.shape[1], start + WORD)
    whole = stop - (stop - start) % LANES
    bits = np.uint64(0)
    for lanes in range(start, whole, LANES):
        bits |= not_below(scores[i], prices, lanes, floor) << np.uint64(lanes - start)
    for j in range(whole, stop):
        bits |= np.uint64(not scores[i, j] - prices[j] < floor) << np.uint64(j - start)  # said so that NaN is found
    return bits


@jit_inline
def best_expert(scores: Scores, i: int, prices: Scores, best: float) -> int:
    """The first expert that makes row i its best offer, which is given."""
    start, bits = 0, candidate_bits(scores, i, prices, best, 0)
    while bits == 0 and start + WORD < scores.shape[1]:
        start += WORD
        bits = candidate_bits(scores, i, prices, best, start)
    return start + lowest_bit(bits) if bits != 0 else 0


@jit
def mark_candidates(
    scores: Scores,
    mask: Flags,
    prices: Scores,
    radius: float,
    start: int,
    stop: int,
    stride: int,
    marks: NDArray[np.uint64],
) -> int:
    """Marks the candidates of every `stride`-th row.

    Returns:
        A row that is found to be illegal (-1: none). A NaN beside legal scores is not: it is marked, and found later.
    """
    illegal = -1
    for r, i in enumerate(range(start, stop, stride)):
        best = best_offer(scores[i], prices)
        illegal = i if mask[i] and not (best > -np.inf and best < np.inf) else illegal
        marks[r, 0] = candidate_bits(scores, i, prices, best - radius, 0)  # in most cases there is no other word
        for word in range(1, marks.shape[1]):
            marks[r, word] = candidate_bits(scores, i, prices, best - radius, word * WORD)
    return illegal


@jit
def count_candidates(
    scores: Scores, mask: Flags, start: int, stop: int, stride: int, chunk: Chunk, z: Ints, alone: Scores
) -> None:
    """Counts the candidates that were marked, and writes one of them to z, its score to `alone` if it is the only one.

    None for a masked row.
    """
    marks, counts = chunk.marks, chunk.counts
    for r, i in enumerate(range(start, stop, stride)):
        bits = marks[r, 0]
        count, expert = count_bits(bits), lowest_bit(bits) if bits != 0 else 0
        for word in range(1, marks.shape[1]):
            bits = marks[r, word]
            count += count_bits(bits)
            expert = word * WORD + lowest_bit(bits) if bits != 0 else expert
        z[i], counts[r] = expert if mask[i] else -1, count if mask[i] else 0
        own = scores[i, np.uint32(expert)]
        alone[i] = own if (count == 1) & mask[i] else np.nan


@jit
def settle(start: int, stop: int, stride: int, chunk: Chunk, settled: Floats, z: Ints) -> int:
    """Counts the rows that have no choice at their expert and finds the others; returns how many those are.

    Which rows these are no processor can foresee, so there is no branch: what is written for a row without a choice,
    the next one overwrites. Apart from marking and counting, where an addition would wait for all that comes before.
    """
    counts, listed = chunk.counts, chunk.listed
    m = 0
    for r, i in enumerate(range(start, stop, stride)):
        settled[z[i]] += counts[r] == 1  # for a masked row 0 is added to the last expert
        listed[m] = r
        m += counts[r] > 1
    return m


@jit
def order_by_count(chunk: Chunk, m: int, most: int) -> int:
    """Puts the m rows that have a choice in the order of their counts; returns how many have at most `most`."""
    counts, listed, order = chunk.counts, chunk.listed, chunk.order
    place = np.zeros(most + 3, np.int32)
    for a in range(m):
        place[min(counts[listed[a]], most + 1) + 1] += 1
    for count in range(most + 2):
        place[count + 1] += place[count]
    fitting = place[most + 1]
    for a in range(m):
        count = min(counts[listed[a]], most + 1)
        order[place[count]] = listed[a]
        place[count] += 1
    return fitting


@jit_inline
def list_marked(scores: Scores, i: int, marks: NDArray[np.uint64], a: int, m: int, cols: Ints, vals: Scores) -> bool:
    """Writes the candidates marked in line a to line m; returns whether all their scores are legal."""
    legal, w = True, 0
    for word in range(marks.shape[1]):
        bits = marks[a, word]
        while bits != 0:
            j = word * WORD + lowest_bit(bits)
            bits &= bits - np.uint64(1)
            cols[m, w], vals[m, w] = j, scores[i, j]
            legal &= scores[i, j] < np.inf
            w += 1
    return legal


@jit
def collect(
    scores: Scores,
    mask: Flags,
    listing: Listing,
    start: int,
    stop: int,
    stride: int,
    choices: Choices,
    offset: int,
    settled: Floats,
    z: Ints,
) -> tuple[int, int]:
    """Collects the choices of every `stride`-th row from `start` to `stop`, written from `offset` on.

    Rows without a choice are written to z (-1: masked, no expert) and counted in `settled`. The others are listed in
    chunks, within which those with equally many candidates come together: loops over a few candidates are quick when
    their number is the same as the last time.

    Returns:
        How many rows have a choice, and a row that holds a NaN or +inf or has no expert to go to (-1: none).
    """
    k = scores.shape[1]
    offers, found = np.empty(k, scores.dtype), np.empty(k + 1, np.int32)
    prices = listing.prices
    radii = np.empty(7, scores.dtype)
    for halvings in range(7):
        radii[halvings] = listing.radius * 0.5**halvings
    rows, cols, vals, width = choices.rows, choices.cols, choices.vals, choices.width
    room = cols.shape[1]
    chunk = new_chunk(min(CHUNK_ROWS, stop - start), k)
    marks, counts, order = chunk.marks, chunk.counts, chunk.order
    m = offset
    for begin in range(start, stop, CHUNK_ROWS * stride):
        end = min(stop, begin + CHUNK_ROWS * stride)
        illegal = mark_candidates(scores, mask, prices, radii[0], begin, end, stride, marks)
        if illegal >= 0:
            return m - offset, illegal
        count_candidates(scores, mask, begin, end, stride, chunk, z, listing.alone)
        listed = settle(begin, end, stride, chunk, settled, z)
        fitting = order_by_count(chunk, listed, room)
        # Two loops: a call in the first, even if never made, would double its time.
        for a in range(fitting):
            r = order[a]
            i = begin + r * stride
            if not list_marked(scores, i, marks, r, m, cols, vals):
                return m - offset, i
            rows[m], width[m] = i, counts[r]
            m += 1
        for a in range(fitting, listed):
            i = begin + order[a] * stride
            rows[m], width[m] = i, keep_nearest(scores[i], prices, radii, i, offers, found, cols[m], vals[m])
            if width[m] == 0:
                return m - offset, i
            m += 1
    return m - offset, -1
