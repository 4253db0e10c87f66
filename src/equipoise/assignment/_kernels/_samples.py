# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""What some of the rows say about prices, and how far prices that are known from so many rows may be off.

Legend: n rows, k experts, m rows of a sample. An expert whose price is +inf is closed.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit, jit_inline
from equipoise._core._vector import count_bits, lowest_bit
from equipoise.assignment._kernels._choices import Scores
from equipoise.assignment._kernels._collect import WORD, best_expert, best_offer, candidate_bits
from equipoise.assignment._kernels._smoothing import imbalance

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# The first sample has this many rows for each expert, every later one is this many times as large.
COARSE_ROWS_PER_EXPERT = 16
LEVEL_RATIO = 8
# The part of the rows that tells how far prices are off.
NEAR = 0.125
# By so many standard deviations a sample must contradict equal prices, and an earlier draw's; and half of it these, for
# the other half to be asked.
SURE, SURER, UNSURE = 3.0, 4.0, 0.5
# An earlier draw's prices are forgotten if they are at most so many radii apart, and kept if they are further apart
# than the second number of them. In between it is for a sample to say.
CLOSE, FAR = 1.0, 3.0
# With slack, by so many of chance's standard deviations the highest price may be higher than an earlier draw's.
HIGHER = 4.0
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
def last_stride(n: int, k: int) -> int:
    """How many rows apart those of the last sample are, if none of them finds other prices."""
    stride = coarse_stride(n, k)
    finer = next_stride(n, k, stride, False)
    while finer > 1:
        stride = finer
        finer = next_stride(n, k, stride, False)
    return stride


@jit
def agrees(
    scores: Scores, mask: Flags, stride: int, target: Floats, slack: bool, prices: Floats, earlier: bool
) -> bool:
    """Whether every `stride`-th row is as balanced at these prices as chance allows.

    An `earlier` draw's prices have the noise of all its rows, in units of a sample's a variance of 1 / stride. They are
    doubted less readily, because there is more to lose: half of the rows answer for all of them if they leave no doubt.
    """
    counts = np.zeros(prices.shape[0])
    if earlier:
        count_best(scores, mask, stride // 2, 2 * stride, prices, counts)
        allowed = chance(counts.sum(), target, UNSURE) * np.sqrt(1.0 + 0.5 / stride)
        if missed(counts, 2 * stride, target, slack, prices) <= allowed:
            return True
        count_best(scores, mask, stride // 2 + stride, 2 * stride, prices, counts)
    else:
        count_best(scores, mask, stride // 2, stride, prices, counts)
    allowed = chance(counts.sum(), target, SURER if earlier else SURE) * np.sqrt(1.0 + earlier / stride)
    return missed(counts, stride, target, slack, prices) <= allowed


@jit
def chance(rows: float, target: Floats, deviations: float) -> float:
    """How many of a sample's rows may be out of place at the right prices.

    An expert's count among m rows varies by sqrt(m/k), so that 0.4 sqrt(m k) of them are out of place, with a standard
    deviation of 0.3 sqrt(m), of which so many are allowed for.
    """
    return 0.4 * np.sqrt(target.shape[0] * rows) + 0.3 * deviations * np.sqrt(rows)


@jit
def held_out(scores: Scores, mask: Flags, stride: int, target: Floats, slack: bool, prices: Floats) -> float:
    """The imbalance at these prices of rows that had no part in finding them."""
    counts = np.zeros(prices.shape[0])
    count_best(scores, mask, stride // 2, stride, prices, counts)
    return missed(counts, stride, target, slack, prices)


@jit
def count_best(scores: Scores, mask: Flags, start: int, stride: int, prices: Floats, counts: Floats) -> None:
    """Adds every `stride`-th row from `start` on to the count of the expert that makes it its best offer."""
    before, all_rows = start - stride, scores.shape[0] + 1  # the row before the first is left out, and none after it
    count_others(scores, mask, before, stride, all_rows, prices, counts)


@jit
def count_others(
    scores: Scores, mask: Flags, start: int, stride: int, known: int, prices: Floats, counts: Floats
) -> None:
    """What `count_best` does, without the first and every `known`-th row after it, which are counted already.

    One loop for both, since what a row takes in a function of its own is as much again.
    """
    n, near_prices = scores.shape[0], prices.astype(scores.dtype)
    for first in range(start, n, known * stride):
        for i in range(first + stride, min(n, first + known * stride), stride):
            if mask[i]:
                best = best_offer(scores[i], near_prices)
                if best > -np.inf:
                    j = only_best_expert(scores, i, near_prices, best)
                    if j >= 0:
                        counts[j] += 1.0
                    else:
                        share_row(scores, i, near_prices, best, counts)


@jit_inline
def only_best_expert(scores: Scores, i: int, prices: Scores, best: float) -> int:
    """The expert that makes row i its best offer, which is given; -1 if there are several."""
    expert = -1
    for start in range(0, scores.shape[1], WORD):
        bits = candidate_bits(scores, i, prices, best, start)
        if bits != 0:
            if expert >= 0 or bits & (bits - np.uint64(1)) != 0:
                return -1
            expert = start + lowest_bit(bits)
    return expert


@jit
def share_row(scores: Scores, i: int, prices: Scores, best: float, counts: Floats) -> None:
    """Adds row i to the counts of the experts that make it its best offer, in equal parts.

    All of it to the first would favour experts by their number where offers are often tied.
    """
    k, tied = counts.shape[0], 0
    for start in range(0, k, WORD):
        tied += count_bits(candidate_bits(scores, i, prices, best, start))
    for start in range(0, k, WORD):
        bits = candidate_bits(scores, i, prices, best, start)
        while bits != 0:
            counts[start + lowest_bit(bits)] += 1.0 / tied
            bits &= bits - np.uint64(1)


@jit
def missed(counts: Floats, stride: int, target: Floats, slack: bool, prices: Floats) -> float:
    """The imbalance of every `stride`-th row, from how many of them want each expert."""
    return imbalance(counts, target * (1.0 / stride if slack else counts.sum() / target.sum()), prices, slack)


@jit
def sampling_radius(scores: Scores, mask: Flags, prices: Floats, sample: int, stride: int, variance: float) -> float:
    """How far prices may be off that every `sample`-th row agreed with, or led to.

    `variance`: of their error, in units of what every `stride`-th row leaves unknown.
    """
    n, k = scores.shape
    fraction = radius_fraction(max(1, n // stride), k, variance)
    apart = max(stride, leads_stride(n, fraction, sample))
    return radius_of(leads_of(scores, mask, min(sample, apart) // 2, apart, prices, np.zeros(k)), fraction)


@jit
def leads_of(scores: Scores, mask: Flags, start: int, stride: int, prices: Floats, counts: Floats) -> Floats:
    """How far the best offer is ahead of the next one, for every `stride`-th row from `start` on that has two.

    As by `count_best`, rows are added to the `counts` [k] of their best experts.
    """
    n, k = scores.shape
    leads, count, near_prices = np.empty((n + stride - 1) // stride), 0, prices.astype(scores.dtype)
    for i in range(start, n, stride):
        if mask[i]:
            best = best_offer(scores[i], near_prices)
            j = best_expert(scores, i, near_prices, best)
            second = -np.inf
            if j > 0:
                second = best_offer(scores[i, :j], near_prices[:j])
            if j + 1 < k:
                second = max(second, best_offer(scores[i, j + 1 :], near_prices[j + 1 :]))
            if second > -np.inf:  # there is another one
                leads[count] = best - second
                count += 1
            if second < best:
                counts[j] += 1.0
            elif best > -np.inf:
                share_row(scores, i, near_prices, best, counts)
    return leads[:count]


@jit
def quantile(leads: Floats, fraction: float) -> float:
    """The lead that a fraction of them are below; 0 if there are none.

    Numbers that are not negative stand in the order of their bits, among which the one with the right count is found by
    bisection: a few dozen counts, without the branches that make a sort slow.
    """
    count, bits = leads.shape[0], leads.view(np.int64)
    if count == 0:
        return 0.0
    rank = min(count - 1, int(fraction * count))
    found = np.empty(1, np.int64)
    low, high = np.int64(0), bits.max()  # those of -0.0 are negative, and count as 0
    while low < high:
        middle = low + (high - low) // 2
        if count_up_to(bits, middle) > rank:
            high = middle
        else:
            low = middle + 1
    found[0] = low
    return found.view(np.float64)[0]


@jit
def count_up_to(values: NDArray[np.int64], most: int) -> int:
    """How many are at most that."""
    count = 0
    for i in range(values.shape[0]):
        count += values[i] <= most
    return count


@jit
def radius_of(leads: Floats, fraction: float) -> float:
    """How far prices move where an expert gains or loses a fraction of its rows.

    As far as these rows' best offers are ahead of their second ones, so that it is right for scores of any scale. Of
    larger fractions it is estimated from the eighth that is nearest to a tie, and never so far that more than half of
    the rows are concerned.
    """
    near = min(NEAR, fraction)
    radius = quantile(leads, near) * (fraction / near)
    concerned = 0
    for i in range(leads.shape[0]):
        concerned += leads[i] < radius
    return radius if 2 * concerned <= leads.shape[0] else quantile(leads, 0.5)


@jit
def leads_stride(n: int, fraction: float, sample: int) -> int:
    """How many rows apart those are that tell a radius, to about one part in six; if possible, some of a sample's."""
    stride = max(1, n // min(1024, int(32 / min(NEAR, fraction))))
    return stride - stride % sample if stride > sample else stride


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
def forget_near(scores: Scores, mask: Flags, target: Floats, slack: bool, prices: Floats) -> float:
    """Makes an earlier draw's prices equal again if a cold start will find this draw's as quickly.

    It will if they are no further apart than lists of candidates reach, or not much further and experts seem equally
    popular: a start from the earlier prices, which hold noise of another draw, would now and then lose by it. The rows
    that tell the radius are asked in the first case, and if they see a difference, as in the second, the sample that a
    cold start asks last. So what is forgotten becomes a cold start, with the same lists and no more questions.

    Returns:
        The radius for candidates of all rows at equal prices; or -1 if it was better to keep the prices.
    """
    n, k = scores.shape
    equal, counts = prices.copy(), np.zeros(k)
    equal_prices(equal)
    last = last_stride(n, k)
    fraction = radius_fraction(n, k, error_variance(last, False))
    stride = leads_stride(n, fraction, last)
    start = min(last, stride) // 2
    leads = leads_of(scores, mask, start, stride, equal, counts)
    radius, highest = radius_of(leads, fraction), highest_price(prices)
    if highest > FAR * radius:
        return -1.0
    if highest > CLOSE * radius or missed(counts, stride, target, slack, equal) > chance(counts.sum(), target, SURE):
        if stride % last == 0:  # some of the sample, if not all of it, is counted
            count_others(scores, mask, start, last, stride // last, equal, counts)
        else:
            counts[:] = 0.0
            count_best(scores, mask, last // 2, last, equal, counts)
        if missed(counts, last, target, slack, equal) > chance(counts.sum(), target, SURE):
            return -1.0
    prices[:] = equal
    if not slack:
        return radius
    # No price will be below 0, and none much higher than the highest was, where by chance each varies as far as prices
    # move for sqrt(k/n) of an expert's rows.
    return min(radius, highest + HIGHER * radius / fraction * np.sqrt(k / n))


@jit
def equal_prices(prices: Floats) -> None:
    """Makes them 0, but for experts that are closed."""
    for j in range(prices.shape[0]):
        if prices[j] < np.inf:
            prices[j] = 0.0


@jit
def highest_price(prices: Floats) -> float:
    """The highest of those that are finite, which are at least 0."""
    highest = 0.0
    for j in range(prices.shape[0]):
        if prices[j] < np.inf:
            highest = max(highest, prices[j])
    return highest
