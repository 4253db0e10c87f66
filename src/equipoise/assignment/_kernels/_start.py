# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Prices from samples: equal ones, given ones, or Newton steps on more and more rows.

Legend: n rows, k experts, K experts a row. A sample is every `stride`-th row. An expert whose price is +inf is closed.
"""

import numpy as np

from equipoise._core._jit import jit
from equipoise.assignment._kernels._contested import collect, copy_to, less_least, spreads, survey
from equipoise.assignment._kernels._newton import LOST, REACHED, TIED, descend, misplaced
from equipoise.assignment._kernels._records import Floats, Ints, Problem
from equipoise.assignment._kernels._smoothing import REACH, open_with_sinkhorn

# Rows of the first sample, for each expert and at least; each next sample has four times as many. With 256 at least,
# 4,096 x 16 is 10% faster, but one of 30 matrices of 8,192 x 16 needed Newton's method over all rows: 25 times as long.
SAMPLE_ROWS, LEAST_SAMPLE, FINER = 16, 1024, 4
# How far a price may still move: this part of the largest of k normal errors, sqrt(2 log k) standard deviations of what
# the rows that were asked leave unknown of a price.
RADIUS = 0.7
# Rows that tell how far offers differ.
SPREAD_ROWS = 64
# Smoothing, as a part of the radius of the candidates: what is further away has next to no share.
FIRST_MU = 1 / 3
# Besides how a descent ends: scores less prices are not finite.
OVERFLOWED = LOST + 1
# So many times a sample is listed again, four times as wide, where prices are lost.
MOST_AGAIN = 8
# Where the prices come from.
EQUAL, GIVEN, FOUND = 0, 1, 2


@jit
def first_stride(n: int, k: int) -> int:
    """The stride of the first sample. Strides are odd: of rows that alternate, every second one tells half."""
    return odd(n // max(SAMPLE_ROWS * k, LEAST_SAMPLE))


@jit
def odd(x: int) -> int:
    """The largest odd number up to x, or 1."""
    return max(1, x - 1 + x % 2)


@jit
def median(x: Floats) -> float:
    """The median of a few numbers, which are sorted. NumPy's takes more than a second to compile."""
    for i in range(1, x.shape[0]):
        number, place = x[i], i
        while place > 0 and x[place - 1] > number:
            x[place] = x[place - 1]
            place -= 1
        x[place] = number
    middle = x.shape[0] // 2
    return x[middle] if x.shape[0] % 2 else 0.5 * (x[middle - 1] + x[middle])


@jit
def spread(problem: Problem, prices: Floats, top_k: int) -> float:
    """How far offers differ that a row might take: the best and the one of the upper quartile, in the median row.

    Not the mean: many routers bar an expert with a huge negative score.
    """
    scores = problem[0]
    n, k = scores.shape
    stride, rank = max(1, n // SPREAD_ROWS), min(k, top_k + 1 + (k - top_k) // 4)
    out = np.empty(-(-n // stride))
    count = spreads(problem, prices.astype(scores.dtype), stride, top_k, rank, out)
    return median(out[:count]) if count > 0 else 0.0


@jit
def accepts(problem: Problem, stride: int, top_k: int, rows: int, prices: Floats) -> bool:
    """Whether the rows of a sample would choose experts as often as they have room, but for chance."""
    scores, _, _, target, _ = problem
    k = prices.shape[0]
    counts = np.empty(k)
    asked = survey(problem, prices.astype(scores.dtype), stride, top_k, counts)
    taken = asked * top_k
    wrong = misplaced(counts, target * (asked / max(rows, 1)), prices, counts, 0.0)
    # By chance alone 0.4 sqrt(taken k) are, with a standard deviation of 0.3 sqrt(taken).
    return wrong <= 0.4 * np.sqrt(taken * k) + 0.9 * np.sqrt(taken)


@jit
def radius_of(deviation: Floats, factor: float, status: int, mu: float, radius: Floats) -> None:
    """Writes how far prices may still move that are uncertain by so much: at least as far as mu reaches, if it does."""
    k = deviation.shape[0]
    least = REACH * mu if status != REACHED else 0.0
    for j in range(k):
        radius[j] = max(least, factor * RADIUS * np.sqrt(2 * np.log(k)) * deviation[j])


@jit
def descend_on_sample(
    problem: Problem, stride: int, goal: float, prices: Floats, mu: float, radius: Floats, deviation: Floats, z: Ints
) -> tuple[int, float]:
    """Newton steps on the contested rows of a sample; the least price becomes 0.

    Returns:
        How it ended, and the last mu.
    """
    target, free = problem[3:]
    begin = np.int64(0)  # a variable, since the literal 0 has a type of its own, and would be compiled for on its own
    lists, settled, illegal = collect(problem, prices, radius, begin, problem[0].shape[0], stride, z)
    if illegal >= 0:
        return OVERFLOWED, mu
    fixed = settled[0].astype(np.float64)
    status, mu, _ = descend(lists, fixed, target / stride, free / stride, prices, mu, goal, radius, deviation, z)
    less_least(prices)
    return status, mu


@jit
def start_prices(problem: Problem, warm: bool, prices: Floats, radius: Floats, z: Ints) -> tuple[int, int]:
    """Finds prices to start from.

    Equal ones if a sample of the rows accepts them, else those given if it accepts those, else Newton steps on the
    sample; then on four times as many rows, and so on.

    Args:
        problem: all rows.
        warm: whether prices are given.
        prices: [k], changed in place.
        radius: [k], how far each price may still move: written here.
        z: [n, K], overwritten.

    Returns:
        How the last descent ended, and where the prices come from.
    """
    scores, mask, capacity = problem[:3]
    n, k = scores.shape
    top_k, rows, stride = z.shape[1], mask.sum(), first_stride(n, k)
    given, deviation = prices.copy(), np.empty(k)
    for j in range(k):
        prices[j] = np.inf if capacity[j] == 0 else 0.0
        given[j] += prices[j]
    origin = EQUAL
    if not accepts(problem, stride, top_k, rows, prices):
        origin = FOUND
        less_least(given)
        if warm and accepts(problem, stride, top_k, rows, given):
            copy_to(given, prices)
            origin = GIVEN
    mu = spread(problem, prices, top_k) / 2
    if not mu < np.inf:
        return OVERFLOWED, origin
    if mu == 0:
        radius[:] = 0.0
        return TIED, origin
    if origin == FOUND:
        open_with_sinkhorn(problem, FINER * stride - 1, top_k, prices, mu)  # at this mu few rows tell enough
    mu /= 4
    radius[:] = 3 * mu
    again, first, first_mu = 0, prices.copy(), mu
    while True:
        goal = 0.25 * np.sqrt(k * top_k * rows / stride)  # what a count of so many rows cannot tell
        before = prices.copy()
        status, last_mu = descend_on_sample(problem, stride, goal, prices, mu, radius, deviation, z)
        if status == OVERFLOWED:
            return OVERFLOWED, origin
        if status == LOST and origin == FOUND:
            if again < MOST_AGAIN:
                again += 1
                mu = 4 * last_mu
                radius[:] = 3 * mu
                continue
            copy_to(first, prices)
            radius[:] = REACH * first_mu
            return LOST, origin
        # The sample would only add its own noise to accepted prices. Equal ones may be off by the noise of all rows,
        # given ones by that of the rows that they come from as well. Another pass would cost more than a wider radius.
        if origin != FOUND:
            copy_to(before, prices)
            noises = 2 if origin == GIVEN else 1
            radius_of(deviation, np.sqrt(2 * noises / stride), REACHED, last_mu, radius)
            return REACHED, origin
        radius_of(deviation, 1.0, status, last_mu, radius)
        if stride < 3 * FINER or status != REACHED:
            return status, origin
        stride = odd(stride // FINER)
        mu = FIRST_MU * radius.mean()
