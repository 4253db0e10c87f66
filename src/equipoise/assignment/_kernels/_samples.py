# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""What some of the rows say about prices, and how far prices that are known from so many rows may be off.

Legend: n rows, k experts, m rows of a sample. An expert whose price is +inf is closed.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit
from equipoise._core._vector import count_bits
from equipoise.assignment._kernels._choices import WORD, Scores, best_expert, best_offer, candidate_bits
from equipoise.assignment._kernels._smoothing import imbalance, quantile, sorted_leads

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# The first sample has this many rows for each expert, every later one is this many times as large.
COARSE_ROWS_PER_EXPERT = 16
LEVEL_RATIO = 8
# The part of the rows that tells how far prices are off.
NEAR = 0.125
# When so few rows are left with a choice, the next sample may be the whole.
FEW_WITH_A_CHOICE = 0.2


@jit
def coarse_stride(n: int, k: int) -> int:
    """How many rows apart those of the first sample are."""
    return max(1, n // (COARSE_ROWS_PER_EXPERT * k))


@jit
def next_stride(n: int, k: int, stride: int, found: bool) -> int:
    """How many rows apart those of the next sample are; 1: all of them are next, of which few will need a choice."""
    last = stride < 4 * LEVEL_RATIO or radius_fraction(n, k, error_variance(stride, found)) <= FEW_WITH_A_CHOICE
    return 1 if last else stride // LEVEL_RATIO


@jit
def agrees(scores: Scores, mask: Flags, stride: int, target: Floats, slack: bool, prices: Floats) -> bool:
    """Whether every `stride`-th row is as balanced at these prices as chance allows.

    An expert's count among m rows varies by sqrt(m/k), so that at the right prices 0.4 sqrt(m k) of them are out of
    place, with a standard deviation of 0.3 sqrt(m). Three of those are allowed for.
    """
    rows = mask[stride // 2 :: stride].sum()
    chance = 0.4 * np.sqrt(prices.shape[0] * rows) + 0.9 * np.sqrt(rows)
    return held_out(scores, mask, stride, target, slack, prices) <= chance


@jit
def held_out(scores: Scores, mask: Flags, stride: int, target: Floats, slack: bool, prices: Floats) -> float:
    """The imbalance at these prices of rows that had no part in finding them."""
    k = prices.shape[0]
    counts, near_prices = np.zeros(k), prices.astype(scores.dtype)
    for i in range(stride // 2, scores.shape[0], stride):
        if mask[i]:
            best = best_offer(scores[i], near_prices)
            if best > -np.inf:
                counts[best_expert(scores, i, near_prices, best)] += 1
    return imbalance(counts, target * (1.0 / stride if slack else counts.sum() / target.sum()), prices, slack)


@jit
def sampling_radius(scores: Scores, mask: Flags, prices: Floats, stride: int, variance: float) -> float:
    """How far prices may be off; `variance`: of their error, in units of what every `stride`-th row leaves unknown."""
    n, k = scores.shape
    fraction = radius_fraction(max(1, n // stride), k, variance)
    return radius_of(sorted_leads(scores, mask, max(stride, leads_stride(n, fraction)), prices), fraction)


@jit
def radius_of(leads: Floats, fraction: float) -> float:
    """How far prices move where an expert gains or loses a fraction of its rows.

    As far as these rows' best offers are ahead of their second ones, so that it is right for scores of any scale. Of
    larger fractions it is estimated from the eighth that is nearest to a tie, and never so far that more than half of
    the rows are concerned.
    """
    near = min(NEAR, fraction)
    return min(quantile(leads, 0.5), quantile(leads, near) * (fraction / near))


@jit
def leads_stride(n: int, fraction: float) -> int:
    """How many rows apart those are that tell a radius, to about one part in six."""
    return max(1, n // min(1024, int(32 / min(NEAR, fraction))))


@jit
def radius_fraction(rows: int, k: int, variance: float) -> float:
    """How far prices may be off, in rows of an expert.

    With m rows, counts are known to about sqrt(m/k), a fraction sqrt(k/m) of an expert's rows. Between the experts that
    are furthest off to either side there are about 2 sqrt(2 log k) standard deviations.
    """
    return np.sqrt(8.0 * np.log(k) * variance * k / rows)


@jit
def error_variance(ratio: int, found: bool) -> float:
    """The variance of the error of prices that one row in `ratio` led to, in units of what all rows leave unknown.

    Those rows are among all of them, and the smoothing has a part of its own even if they are all. Prices that were not
    `found` on the rows, but agree with them, contain none of their noise, only what may have gone unnoticed in it.
    """
    return max(1.0, ratio - 1.0) if found else 1.0 + ratio / 128


@jit
def is_noise(scores: Scores, mask: Flags, prices: Floats) -> bool:
    """Whether an earlier draw's prices differ by little more than chance, so that equal ones are the better start.

    Let v be the variance that chance gives to prices p. Those of another draw are nearest to m + f (p - m), where m is
    their mean and f = 1 - v / var p (James and Stein, 1961). Below f = 2/3 a start from p took longer than one from
    equal prices, as measured on draws with experts of different popularity.

    The standard deviation sqrt(v) is as far as prices move where an expert gains or loses sqrt(k/n) of its rows, and
    about so many rows have their second offer within it; a quarter of them within a distance that is larger in
    proportion. So v need not be known: within less there are fewer.
    """
    n, k = scores.shape
    distance = np.sqrt(variance_of(prices) / 3)
    return contested(scores, mask, max(1, n // 128), prices, distance * 0.25 / np.sqrt(k / n)) < 0.25


@jit
def variance_of(prices: Floats) -> float:
    """The variance of those that are finite."""
    mean, total, count = 0.0, 0.0, 0
    for j in range(prices.shape[0]):
        if prices[j] < np.inf:
            count += 1
            change = prices[j] - mean
            mean += change / count
            total += change * (prices[j] - mean)
    return total / max(1, count - 1)


@jit
def contested(scores: Scores, mask: Flags, stride: int, prices: Floats, distance: float) -> float:
    """The part of every `stride`-th row whose second offer is within a distance of the best."""
    rows, close, near_prices = 0, 0, prices.astype(scores.dtype)
    for i in range(0, scores.shape[0], stride):
        if mask[i]:
            best = best_offer(scores[i], near_prices)
            count = 0
            for start in range(0, prices.shape[0], WORD):
                count += count_bits(candidate_bits(scores, i, near_prices, best - distance, start))
            close += count > 1
            rows += 1
    return close / max(1, rows)
