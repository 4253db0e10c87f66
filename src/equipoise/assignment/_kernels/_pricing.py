# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""The certificate: what every row misses at the prices, in float64.

Most rows need no second look. When candidates were collected (`_collect.py`), a row that got no choice had every other
offer more than a radius below its own. Another expert can only have caught up if prices moved apart by more than that.
Rows for which they did, and those that had a choice, are priced entry by entry.

Legend: n rows, k experts.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit, jit_vector
from equipoise._core._vector import larger
from equipoise.assignment._kernels._choices import Scores
from equipoise.assignment._kernels._collect import Listing

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


@jit_vector
def exact_best_offer(row: Scores, prices: Floats) -> float:
    """The largest `row - prices`, in float64."""
    best = np.float64(row[0]) - prices[0]
    for j in range(row.shape[0]):
        best = larger(best, np.float64(row[j]) - prices[j])
    return best


@jit
def certain_below(listing: Listing, prices: Floats) -> Floats:
    """Up to which score of its only candidate a row is certain to have no better offer, for each expert.

    Other offers to the row were below its own less the radius. Since then that has changed by at most how much further
    another price fell. What is left of the radius must cover what comparing the offers in the scores' precision, at the
    prices as they were, may have got wrong: half a unit in the last place of two differences.
    """
    fallen = listing.prices - prices  # NaN for a closed expert
    most = -np.inf
    for j in range(prices.shape[0]):
        most = max(most, fallen[j] if prices[j] < np.inf else -np.inf)
    spare = listing.radius + fallen - most
    return spare / np.finfo(listing.prices.dtype).eps - np.abs(listing.prices) - listing.radius


@jit
def price_rows(
    scores: Scores, z: Ints, prices: Floats, listing: Listing, start: int, stop: int, wrong: Ints
) -> tuple[float, float, float, int]:
    """Prices rows `start` to `stop`: what they are worth, what they miss, and which could do better.

    Returns:
        The sum of the scores at z, the sum of regrets `max_j (s_ij - price_j) - (s_iz - price_z)`, the largest
        magnitude of a score at z, and how many rows have a regret; those are written to `wrong`, from `start` on.
    """
    limits = certain_below(listing, prices)
    value, regret, largest, doubtful, count = 0.0, 0.0, 0.0, 0, 0
    for i in range(start, stop):
        own = np.float64(listing.alone[i])
        certain = abs(own) <= limits[np.uint32(max(z[i], 0))]  # False for NaN: a row that had a choice, or is masked
        value += own if certain else 0.0
        largest = larger(largest, abs(own) if certain else 0.0)
        wrong[start + doubtful] = i
        doubtful += not certain
    for a in range(start, start + doubtful):
        i = wrong[a]
        if z[i] >= 0:
            own = np.float64(scores[i, z[i]])
            missed = exact_best_offer(scores[i], prices) - (own - prices[z[i]])
            value += own
            regret += missed
            largest = larger(largest, abs(own))
            wrong[start + count] = i
            count += missed > 0.0
    return value, regret, largest, count


@jit
def final_prices(z: Ints, capacity: NDArray[np.int64], prices: Floats) -> None:
    """Shifts prices so that the least is 0, and makes those of experts with a free slot exactly so.

    They are so already but for rounding: a free slot sits where the price is least.
    """
    free = capacity.copy()
    for i in range(z.shape[0]):
        if z[i] >= 0:
            free[z[i]] -= 1
    least = np.inf
    for j in range(prices.shape[0]):
        least = min(least, prices[j])
    for j in range(prices.shape[0]):
        if prices[j] < np.inf:
            prices[j] = 0.0 if free[j] > 0 else prices[j] - least


@jit
def finite_prices(scores: Scores, z: Ints, prices: Floats) -> None:
    """Gives every closed expert the least finite price at which no row wants it."""
    for j in range(prices.shape[0]):
        if prices[j] == np.inf:
            prices[j] = 0.0
            for i in range(z.shape[0]):
                if z[i] >= 0:
                    offer = np.float64(scores[i, z[i]]) - prices[z[i]]
                    prices[j] = max(prices[j], np.float64(scores[i, j]) - offer)


@jit
def close_books(
    z: Ints,
    capacity: NDArray[np.int64],
    prices: Floats,
    z_out: NDArray[np.int64],
    counts: NDArray[np.int64],
    gap: Floats,
) -> None:
    """Counts the rows of each expert, writes z with k instead of -1, adds what empty slots would cost to the gap."""
    k = counts.shape[1]
    for b in range(z.shape[0]):
        for i in range(z.shape[1]):
            j = z[b, i]
            z_out[b, i] = j if j >= 0 else k
            if j >= 0:
                counts[b, j] += 1
        for j in range(k):
            gap[b] += prices[b, j] * (capacity[b, j] - counts[b, j])
