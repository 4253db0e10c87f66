# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Settle and list: one pass over the scores that tells settled rows from contested ones.

At some prices, sort a row's offers `s_ij - price_j`. Its K-th offer leads the next by some margin. If that lead exceeds
the radius, the row is settled: it takes its K best offers, and keeps them as long as no two prices move apart by more
than the radius. Otherwise the row is contested. Offers that lead the best one left out by more than the radius are
certain, offers that trail the worst one taken by more than the radius are out of the question, and those in between
are its candidates: the row still needs some of them.

Legend: n rows, k experts, K experts a row, m contested rows. An expert whose price is +inf is closed. `_records.py` has
the types.
"""

from typing import Any

import numpy as np

from equipoise._core._jit import jit, jit_inline, jit_vector
from equipoise._core._vector import LANES, count_bits, larger, lowest_bit, not_below, smaller
from equipoise.assignment._kernels._records import Counts, Flags, Floats, Ints, Lists, Problem, Scores, Settled

# Experts whose marks are the bits of one integer.
WORD = 64


@jit
def copy_to(x: Floats, out: Floats) -> None:
    """Copies one to the other. `out[:] = x` takes two seconds to compile, for what it says where shapes differ."""
    for j in range(x.shape[0]):
        out[j] = x[j]


@jit_vector
def best_offer(row: Scores, prices: Scores) -> float:
    """The largest `row - prices`."""
    best = row[0] - prices[0]
    for j in range(row.shape[0]):
        best = larger(best, row[j] - prices[j])
    return best


@jit_inline
def offers_from(row: Scores, prices: Scores, floor: float, start: int) -> int:
    """One bit for each of 64 experts from `start` on, as far as there are: whether its offer is not below the floor.

    NaN is not below anything, so that whoever reads the offers behind the bits finds every illegal score.
    """
    stop = min(row.shape[0], start + WORD)
    whole = stop - (stop - start) % LANES
    bits = np.uint64(0)
    for lanes in range(start, whole, LANES):
        bits |= not_below(row, prices, lanes, floor) << np.uint64(lanes - start)
    for j in range(whole, stop):
        bits |= np.uint64(not row[j] - prices[j] < floor) << np.uint64(j - start)
    return bits


@jit
def insert(top: Scores, offer: float) -> None:
    """Puts an offer into its place among the largest so far, in descending order; the last one drops out.

    Where it belongs cannot be foreseen, so there is no branch on it.
    """
    for t in range(top.shape[0]):
        above, offer = larger(top[t], offer), smaller(top[t], offer)
        top[t] = above


@jit
def largest_offers(row: Scores, prices: Scores, top: Scores) -> bool:
    """Finds the largest offers, as many as `top` has room for, in descending order; False if one is NaN or +inf."""
    top[:] = -np.inf
    for start in range(0, row.shape[0], WORD):
        for lanes in range(start, min(row.shape[0], start + WORD), LANES):
            last = min(row.shape[0], lanes + LANES)
            floor = top[-1]
            if last == lanes + LANES:
                bits = not_below(row, prices, lanes, floor)
            else:
                bits = np.uint64((1 << (last - lanes)) - 1)
            while bits != 0:
                offer = row[lanes + lowest_bit(bits)] - prices[lanes + lowest_bit(bits)]
                bits &= bits - np.uint64(1)
                if not offer < np.inf:
                    return False
                if offer > top[-1]:
                    insert(top, offer)
    return True


@jit
def last_of_largest(row: Scores, prices: Scores, marks: Any, top: Scores) -> float:
    """The last of the largest offers, as many as `top` has room for; NaN if one of them is +inf.

    `top` holds those of another row, which is the guess: with luck few offers are above its last, and enough. A NaN in
    the row may pass unseen here; the bits of `offers_from`, with which the caller goes on, show it.
    """
    size, count = top.shape[0], 0
    guess = top[-1] - (top[0] - top[-1]) / size  # lower by what two neighbours differ by on average
    if guess > -np.inf:
        for word in range(marks.shape[0]):
            marks[word] = offers_from(row, prices, guess, word * WORD)
            count += count_bits(marks[word])
    if count >= size:
        last = best_left_out(row, prices, marks, top)
        return last if top[0] < np.inf else last * np.nan
    return top[-1] if largest_offers(row, prices, top) else top[-1] * np.nan


@jit
def best_left_out(row: Scores, prices: Scores, marks: Any, top: Scores) -> float:
    """The last of the largest offers of the experts that are marked, as many as `top` has room for."""
    nothing = top.dtype.type(-np.inf)
    top[:] = nothing
    for word in range(marks.shape[0]):
        bits = marks[word]
        while bits != 0:
            j = word * WORD + lowest_bit(bits)
            bits &= bits - np.uint64(1)
            offer = row[j] - prices[j]
            insert(top, offer if offer > nothing else nothing)  # NaN has no place in an order
    return top[-1]


@jit_vector
def least_leads(row: Scores, own: float, line: Scores) -> None:
    """Lowers `line` to the lead of a row's own score over its others, where that is less."""
    for j in range(row.shape[0]):
        line[j] = smaller(line[j], own - row[j])


@jit
def collect(
    problem: Problem, prices: Floats, radius: Floats, start: int, stop: int, stride: int, z: Ints
) -> tuple[Lists, Settled, int]:
    """Settles or lists every `stride`-th row from `start` to `stop`, for prices that may move by the radius.

    Writes a settled row's experts, and the certain ones of a contested row, to `z` [n, K]; -1 for masked rows.

    Returns:
        Contested rows, in ascending order; what is known of settled ones; and an illegal row, or -1.
    """
    scores, mask = problem[:2]
    k, top_k, size, kind = scores.shape[1], z.shape[1], -(-(stop - start) // stride), scores.dtype
    rows, need, first = np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size + 1, np.int64)
    cols, vals = np.empty(size * k, np.int32), np.empty(size * k, kind)
    settled, leads = np.zeros(k, np.int64), np.full((k, k), np.inf, kind)
    words = (k + WORD - 1) // WORD
    low, high = (prices - radius).astype(kind), (prices + radius).astype(kind)
    marks, top, held = np.empty(words, np.uint64), np.empty(top_k + 1, kind), np.empty(top_k, kind)
    best = np.full(top_k, -np.inf, kind)
    m, entry, illegal = 0, 0, -1
    first[0] = 0
    for i in range(start, stop, stride):
        if not mask[i]:
            z[i, :] = -1
            continue
        row = scores[i]
        if top_k == 1:
            floor = best_offer(row, high)
        else:
            floor = last_of_largest(row, high, marks, best)
        if not (floor > -np.inf and floor < np.inf):
            illegal = i
            break
        count = 0
        for word in range(words):
            marks[word] = offers_from(row, low, floor, word * WORD)
            count += count_bits(marks[word])
        ceiling = kind.type(np.inf)
        if count > top_k > 1:
            ceiling = best_left_out(row, low, marks, top)
        taken, begin = 0, entry
        for word in range(words):
            bits = marks[word]
            while bits != 0:
                j = word * WORD + lowest_bit(bits)
                bits &= bits - np.uint64(1)
                score = row[j]
                if not (score < np.inf and score - low[j] > -np.inf):
                    illegal = illegal if score < np.inf else i
                elif count == top_k or score - high[j] > ceiling:
                    z[i, taken] = j
                    settled[j] += 1
                    taken += 1
                else:
                    cols[entry], vals[entry] = j, score
                    entry += 1
        if entry > begin:
            rows[m], need[m] = i, top_k - taken
            m += 1
            first[m] = entry
        elif top_k == 1:
            least_leads(row, row[z[i, 0]], leads[z[i, 0]])
        else:
            for t in range(top_k):
                own = row[z[i, t]]
                for u in range(top_k):  # what the row holds itself does not count
                    held[u] = leads[z[i, t], z[i, u]]
                least_leads(row, own, leads[z[i, t]])
                for u in range(top_k):
                    leads[z[i, t], z[i, u]] = held[u]
    return (rows[:m], need[:m], first[: m + 1], cols[:entry], vals[:entry]), (settled, leads), illegal


@jit
def all_candidates(scores: Scores, mask: Flags, capacity: Counts, top_k: int) -> tuple[Lists, int]:
    """Lists every row with every expert that it may take; returns an illegal row as well, or -1."""
    n, k = scores.shape
    rows, need, first = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n + 1, np.int64)
    cols, vals = np.empty(n * k, np.int32), np.empty(n * k, scores.dtype)
    m, entry, illegal = 0, 0, -1
    first[0] = 0
    for i in range(n):
        if mask[i]:
            for j in range(k):
                score = scores[i, j]
                if not score < np.inf:
                    illegal = i
                elif score > -np.inf and capacity[j] > 0:
                    cols[entry], vals[entry] = j, score
                    entry += 1
            if illegal >= 0 or entry - first[m] < top_k:
                illegal = i
                break
            rows[m], need[m] = i, top_k
            m += 1
            first[m] = entry
    return (rows[:m], need[:m], first[: m + 1], cols[:entry], vals[:entry]), illegal
