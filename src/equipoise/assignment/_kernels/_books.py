# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Prove: final prices, the value, and what rows and free slots miss at these prices.

Legend: n rows, k experts, K experts a row, m contested rows. `_records.py` has the types.
"""

import numpy as np

from equipoise._core._jit import jit, jit_vector
from equipoise.assignment._kernels._contested import insert
from equipoise.assignment._kernels._records import Counts, Flags, Floats, Ints, Lists, Scores

# A gap of this much of the scores assigned, without their signs, is rounding. Stricter than promised by four orders.
ENOUGH = 1e-13


@jit
def rest_prices(prices: Floats, counts: Counts, capacity: Counts) -> None:
    """Shifts prices so that the least is 0, and exactly 0 for every expert with a free slot. Closed ones keep theirs.

    Free slots sit where the price is least, but for rounding, so what is set to 0 here was next to nothing.
    """
    least = np.inf
    for j in range(prices.shape[0]):
        if capacity[j] > 0:
            least = min(least, prices[j])
    for j in range(prices.shape[0]):
        prices[j] = 0.0 if capacity[j] > 0 and counts[j] < capacity[j] else max(0.0, prices[j] - least)


@jit
def count_rows(z: Ints, counts: Counts) -> None:
    """Counts the rows that each expert has."""
    counts[:] = 0
    for i in range(z.shape[0]):
        for t in range(z.shape[1]):
            if z[i, t] >= 0:
                counts[z[i, t]] += 1


@jit
def take_held(lists: Lists, held: Flags, z: Ints) -> None:
    """Writes the candidates that contested rows hold to the end of their rows in z."""
    rows, need, first, cols, _ = lists
    for a in range(rows.shape[0]):
        t = z.shape[1] - need[a]
        for e in range(first[a], first[a + 1]):
            if held[e]:
                z[rows[a], t] = cols[e]
                t += 1


@jit_vector
def _better(row: Scores, prices: Floats, worst: float) -> int:
    """How many offers exceed the worst one that is held."""
    count = 0
    for j in range(row.shape[0]):
        count += np.float64(row[j]) - prices[j] > worst
    return count


@jit
def missed(scores: Scores, rows: Ints, z: Ints, prices: Floats) -> float:
    """What these rows miss, in all: the sum of their K best offers, less that of the offers they hold."""
    k, top_k = scores.shape[1], z.shape[1]
    top, total = np.empty(top_k), 0.0
    for i in rows:
        worst, above = np.inf, 0
        for t in range(top_k):
            worst = min(worst, np.float64(scores[i, z[i, t]]) - prices[z[i, t]])
        for t in range(top_k):
            above += np.float64(scores[i, z[i, t]]) - prices[z[i, t]] > worst
        if _better(scores[i], prices, worst) == above:  # those that it holds itself
            continue
        top[:] = -np.inf
        for j in range(k):
            offer = np.float64(scores[i, j]) - prices[j]
            if offer > top[top_k - 1]:
                insert(top, offer)
        regret = 0.0
        for t in range(top_k):
            regret += top[t] - (np.float64(scores[i, z[i, t]]) - prices[z[i, t]])
        total += max(regret, 0.0)
    return total


@jit
def settled_for_sure(leads: Scores, prices: Floats) -> bool:
    """Whether no settled row has a better offer: every lead covers the difference of the prices, and its rounding."""
    k, rounding = prices.shape[0], np.float64(np.finfo(leads.dtype).eps)
    for j in range(k):
        for t in range(k):
            lead = np.float64(leads[j, t])
            if t != j and prices[t] < np.inf and lead - rounding * abs(lead) < prices[j] - prices[t]:
                return False
    return True


@jit
def total_value(scores: Scores, z: Ints) -> tuple[float, float]:
    """The sum of the scores assigned, and that of their magnitudes."""
    value, magnitude = 0.0, 0.0
    for i in range(z.shape[0]):
        for t in range(z.shape[1] if z[i, 0] >= 0 else 0):
            score = np.float64(scores[i, z[i, t]])
            value += score
            magnitude += abs(score)
    return value, magnitude


@jit
def order_offers(scores: Scores, z: Ints, prices: Floats, out: Counts, counts: Counts) -> None:
    """Writes each row's experts, the best offer first and of equal ones the first expert; k for "no expert"; counts."""
    k, top_k = scores.shape[1], z.shape[1]
    offers = np.empty(top_k)
    for i in range(z.shape[0]):
        if z[i, 0] < 0:
            out[i] = k
            continue
        for t in range(top_k):
            offers[t] = np.float64(scores[i, z[i, t]]) - prices[z[i, t]]
        for t in range(top_k):
            ahead = 0
            for u in range(top_k):
                ahead += (offers[u] > offers[t]) | ((offers[u] == offers[t]) & (z[i, u] < z[i, t]))
            out[i, ahead] = z[i, t]
            counts[z[i, t]] += 1


@jit
def close_prices(scores: Scores, z: Ints, capacity: Counts, prices: Floats) -> None:
    """Gives closed experts the least price at which no row would rather have them."""
    for j in range(prices.shape[0]):
        if capacity[j] == 0:
            price = 0.0
            for i in range(z.shape[0]):
                if z[i, 0] >= 0 and scores[i, j] > -np.inf:
                    worst = np.inf
                    for t in range(z.shape[1]):
                        worst = min(worst, np.float64(scores[i, z[i, t]]) - prices[z[i, t]])
                    price = max(price, np.float64(scores[i, j]) - worst)
            prices[j] = price


@jit
def prove(scores: Scores, rows: Ints, capacity: Counts, prices: Floats, z: Ints) -> tuple[float, float, bool]:
    """Brings prices to rest and sums what rows miss at these prices.

    Args:
        scores: [n, k].
        rows: [m], all rows but those that are known to miss nothing.
        capacity: [k].
        prices: [k], changed in place.
        z: [n, K].

    Returns:
        The value; what the rows miss, of all experts; and whether that is rounding.
    """
    counts = np.empty(prices.shape[0], np.int64)
    count_rows(z, counts)
    rest_prices(prices, counts, capacity)
    value, magnitude = total_value(scores, z)
    close_prices(scores, z, capacity, prices)
    regret = missed(scores, rows, z, prices)
    return value, regret, regret <= ENOUGH * magnitude


@jit
def can_start(capacity: Counts, mask: Flags, masked: bool, prices: Floats, top_k: int) -> bool:
    """Whether capacities hold the rows of every problem and prices are finite; `masked`: whether the mask says more."""
    for b in range(capacity.shape[0]):
        wanted = top_k * (mask[b].sum() if masked else mask.shape[1])
        for j in range(capacity.shape[1]):
            if capacity[b, j] < 0 or not abs(prices[b, j]) < np.inf:
                return False
            wanted -= capacity[b, j]
        if wanted > 0:
            return False
    return True


@jit
def close_books(
    scores: Scores, z: Ints, capacity: Counts, prices: Floats, out: Counts, counts: Counts, gap: Floats
) -> None:
    """Writes z with the best offer first and k for "no expert", counts rows, adds what free slots cost to the gaps."""
    for b in range(z.shape[0]):
        order_offers(scores[b], z[b], prices[b], out[b], counts[b])
        for j in range(capacity.shape[1]):
            gap[b] += (capacity[b, j] - counts[b, j]) * prices[b, j]
