# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""The certificate: every entry of the matrix against the prices, in float64."""

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit, jit_vector
from equipoise._core._vector import larger
from equipoise.assignment._kernels._choices import Scores

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
def price_rows(
    scores: Scores, z: Ints, prices: Floats, start: int, stop: int, wrong: Ints
) -> tuple[float, float, float, int]:
    """Prices rows `start` to `stop`: what they are worth, what they miss, and which could do better.

    Returns:
        The sum of the scores at z, the sum of regrets `max_j (s_ij - price_j) - (s_iz - price_z)`, the largest
        magnitude of a score at z, and how many rows have a regret; those are written to `wrong`, from `start` on.
    """
    value, regret, largest, count = 0.0, 0.0, 0.0, 0
    for i in range(start, stop):
        if z[i] < 0:
            continue
        own = np.float64(scores[i, z[i]])
        missed = exact_best_offer(scores[i], prices) - (own - prices[z[i]])
        value += own
        regret += missed
        largest = max(largest, abs(own))
        if missed > 0.0:
            wrong[start + count] = i
            count += 1
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
