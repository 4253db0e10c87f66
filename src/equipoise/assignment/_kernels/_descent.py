# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Prices from rows with all their experts: the smoothed dual (`_smoothing.py`), followed as mu falls.

At large mu every expert sees every row, and Newton's method converges from anywhere. The solution at one mu is a good
start for a quarter of it. Few rows serve as well as many as long as mu is large, so the descent starts on a sample, and
takes four times as many rows where another sample would move the prices by more than a few mu: from there on it would
learn the sample's accidents.

Most matrices need no more than the first sample. The descent goes on over all rows where few say too little: where many
rows are tied between the same experts, or where differences count that are small beside others.

Legend: n rows, k experts. An expert whose price is +inf is closed.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit, jit_vector
from equipoise._core._vector import larger
from equipoise.assignment._kernels._choices import Scores
from equipoise.assignment._kernels._collect import offers_and_best
from equipoise.assignment._kernels._groups import shift_groups_apart
from equipoise.assignment._kernels._smoothing import (
    furthest_apart,
    imbalance,
    laplacian,
    linear_part,
    newton_step,
    rest_prices,
    step_back,
)

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Newton steps at one mu, at most; experts that share rows move apart by at most this many mu in one.
MOST_STEPS = 12
STEP = 4.0
# A step of at most so many mu need not be looked at. One that had to be limited must: where one expert is ahead for all
# rows, it can lead as far to the other side.
TRUSTED = 2.0
# Steps in a row that bring demand no nearer to the target, after which more of them would not either.
MOST_STALLS = 4
# Demand meets the target when it misses at most one row in so many.
MET = 128
# Each sample has so many times the rows of the one before, and is used until another would move prices by so many mu.
ROWS_RATIO = 4
DISAGREEMENT = 4.0
# An offer further behind the best than so many mu has no weight; candidates for a list are within so many.
REACH = 16.0
LIST_REACH = 4.0
# Candidates of a row, on average, that make a list of them (`_choices.py`) cheaper than the whole row.
FEW_CANDIDATES = 4.0
# A list has no room for so many: most rows are tied between more experts, however small mu is.
MANY_CANDIDATES = 8.0
# So many rows tell how far groups of experts that share no rows are apart, as long as mu is on its way.
ROWS_FOR_GROUPS = 4096
# Pairs of tied experts that the curvature is estimated from, for each expert.
PAIRS_PER_EXPERT = 96


@jit_vector
def _soft_weights(row: Scores, prices: Scores, inverse: float, weights: Scores) -> tuple[float, float]:
    """Writes exp((offer - best) / mu) as (1 + y + y^2/2)^64, y = x / 64; returns the best offer and the sum.

    To 2% where it is above 1e-3, which `soft_exp` is not: whether a step was good is asked of the dual, which must know
    what demand does.
    """
    kind = row.dtype.type  # a plain 1 or 0 would turn all of it to float64, half as many to a vector
    one, half, least, zero = kind(1), kind(0.5), kind(-0.25), kind(0)
    best = row[0] - prices[0]
    for j in range(row.shape[0]):
        offer = row[j] - prices[j]
        weights[j] = offer
        best = larger(best, offer)
    total = zero
    for j in range(row.shape[0]):
        y = (weights[j] - best) * inverse
        t = one + y * (one + half * y)
        t = t if y > least else zero
        t *= t
        t *= t
        t *= t
        t *= t
        t *= t
        t *= t
        weights[j] = t
        total += t
    return best, total


@jit_vector
def _add_demand(weights: Scores, scale: float, demand: Scores) -> None:
    for j in range(weights.shape[0]):
        demand[j] += scale * weights[j]


@jit_vector
def _add_pairs(weights: Scores, scale: float, pairs: Scores) -> None:
    """Adds P_j P_j' for every expert j whose share P_j is worth it and all j'."""
    kind = weights.dtype.type
    least = kind(1e-3) / scale
    for j in range(weights.shape[0]):
        if weights[j] > least:
            share = weights[j] * scale * scale
            for t in range(weights.shape[0]):
                pairs[j, t] += share * weights[t]


@jit
def dense_demand(
    scores: Scores, mask: Flags, every: int, prices: Floats, mu: float, demand: Floats, curvature: Floats
) -> float:
    """What `soft_demand` does, from rows with all their experts; pairs from one in `every` of them.

    Returns:
        The rows' part of the smoothed dual.
    """
    k = prices.shape[0]
    kind = scores.dtype.type
    near_prices, inverse = prices.astype(scores.dtype), kind(1 / (64 * mu))
    weights, part, pairs = np.empty(k, scores.dtype), np.zeros(k, scores.dtype), np.zeros((k, k), scores.dtype)
    dual, product, count = 0.0, 1.0, 0  # product of sums between 1 and k: one logarithm for many rows
    for i in range(scores.shape[0]):
        if not mask[i]:
            continue
        best, total = _soft_weights(scores[i], near_prices, inverse, weights)
        if not best > -np.inf:
            continue
        dual += best
        product *= total
        scale = kind(1) / total
        _add_demand(weights, scale, part)
        if count % every == 0:
            _add_pairs(weights, scale, pairs)
        count += 1
        if count % 64 == 0 or product > 1e200:  # before the sum is so large that float32 rounds the next share away
            dual += mu * np.log(product)
            product = 1.0
            _flush(part, demand)
    _flush(part, demand)
    for j in range(k):
        for t in range(k):
            if t != j:
                curvature[j, t] += 0.5 * every * pairs[j, t]
    return dual + mu * np.log(product)


@jit
def _flush(part: Scores, demand: Floats) -> None:
    for j in range(demand.shape[0]):
        demand[j] += part[j]
        part[j] = 0


@jit
def crowd(scores: Scores, mask: Flags, prices: Floats, radius: float) -> float:
    """How many offers are within a radius of the best, on average over 256 rows."""
    n, k = scores.shape
    offers, near_prices = np.empty(k, scores.dtype), prices.astype(scores.dtype)
    total, rows = 0, 0
    for i in range(0, n, max(1, n // 256)):
        if mask[i]:
            best = offers_and_best(scores[i], near_prices, offers)
            for j in range(k):
                total += offers[j] >= best - radius
            rows += 1
    return total / max(1, rows)


@jit
def curvature_stride(scores: Scores, mask: Flags, prices: Floats, mu: float) -> int:
    """One row in so many is enough for the curvature: it costs as much as a row has tied experts, and says as much."""
    n, k = scores.shape
    return max(1, int(n * crowd(scores, mask, prices, REACH / 2 * mu) / (PAIRS_PER_EXPERT * k)))


@jit
def descend(scores: Scores, mask: Flags, target: Floats, slack: bool, prices: Floats, mu: float) -> None:
    """Newton steps at one mu, until the rows' demand meets the target.

    Ends with a step so short that it need not be looked at, or with prices that were: a longer step on trust can lead
    astray where experts share few rows.
    """
    k = prices.shape[0]
    every, every_group_row = curvature_stride(scores, mask, prices, mu), max(1, scores.shape[0] // ROWS_FOR_GROUPS)
    least, missed, returns, stalls, last = np.inf, np.inf, 0, 0, prices.copy()
    for _ in range(MOST_STEPS):
        demand, hessian = np.zeros(k), np.zeros((k, k))
        dual = dense_demand(scores, mask, every, prices, mu, demand, hessian)
        rows = demand.sum()
        goals = target if slack else target * (rows / target.sum())
        dual += linear_part(prices, goals)
        if dual > least + 0.01 * mu * rows:  # by more than the rounding of float32 and of the exponential
            returns += 1
            if returns == 2:
                break
            step_back(prices, last)
            continue
        least, returns = dual, 0
        last[:] = prices
        before, missed = missed, imbalance(demand, goals, prices, slack)
        if missed <= rows / MET:
            break
        laplacian(hessian)
        stalls = stalls + 1 if missed > 0.8 * before else 0
        if stalls == MOST_STALLS or (stalls > 0 and missed <= rows / 64):
            break
        if stalls == 1 and shift_groups_apart(scores, mask, every_group_row, goals, slack, prices, demand, hessian):
            least = np.inf  # a step of another kind, which need not lower the dual
        else:
            newton_step(prices, demand, goals, hessian, mu, STEP * mu, slack)
            if furthest_apart(hessian, prices - last) <= TRUSTED * mu:
                return
    prices[:] = last


@jit
def approach(scores: Scores, mask: Flags, stride: int, target: Floats, prices: Floats, mu: float) -> None:
    """One of Sinkhorn's steps, on every `stride`-th row: each expert raises its price by mu log(demand / target).

    Where an expert starts with hardly a row, demand bends too much for Newton's method, which would go much too far.
    For problems without slack; with it, such an expert's price stays at 0.
    """
    rows, rows_mask = sample(scores, mask, 0, stride)
    demand, unused = np.zeros(prices.shape[0]), np.zeros((prices.shape[0], prices.shape[0]))
    dense_demand(rows, rows_mask, rows.shape[0], prices, mu, demand, unused)
    goals = target * (demand.sum() / target.sum())
    for j in range(prices.shape[0]):
        if prices[j] < np.inf and goals[j] > 0:
            prices[j] += mu * max(-STEP, np.log(demand[j] / goals[j]))
    rest_prices(prices, False)


@jit
def disagreement(scores: Scores, mask: Flags, target: Floats, slack: bool, prices: Floats, mu: float) -> float:
    """How far rows that had no part in finding the prices would move them, in units of mu."""
    k = prices.shape[0]
    demand, hessian = np.zeros(k), np.zeros((k, k))
    dense_demand(scores, mask, curvature_stride(scores, mask, prices, mu), prices, mu, demand, hessian)
    goals = target if slack else target * (demand.sum() / target.sum())
    laplacian(hessian)
    return newton_step(prices.copy(), demand, goals, hessian, mu, STEP * mu, slack) / mu


@jit
def sample(scores: Scores, mask: Flags, start: int, stride: int) -> tuple[Scores, Flags]:
    """Every `stride`-th row. A copy, because it is read many times, and rows that lie apart are slow to read."""
    if stride == 1:
        return scores, mask
    return scores[start::stride].copy(), mask[start::stride].copy()


@jit
def follow(
    scores: Scores, mask: Flags, stride: int, target: Floats, slack: bool, prices: Floats, mu: float, least: float
) -> float:
    """Descends on every `stride`-th row, as far as those say something about the others; returns the last mu.

    What they say is asked of the rows halfway between them. Ends, too, where rows have few candidates left, and at
    `least`, where differences are rounding.
    """
    rows, rows_mask = sample(scores, mask, 0, stride)
    others, others_mask = sample(scores, mask, stride // 2, stride)
    share = target / stride
    while True:
        descend(rows, rows_mask, share, slack, prices, mu)
        if crowd(rows, rows_mask, prices, LIST_REACH * mu) <= FEW_CANDIDATES or mu <= least:
            return mu
        if stride > 1 and disagreement(others, others_mask, share, slack, prices, mu) > DISAGREEMENT:
            return mu
        # Where as many offers are tied within much less, mu can go there at once.
        tied = crowd(rows, rows_mask, prices, REACH * mu)
        mu = max(least, mu / (64 if crowd(rows, rows_mask, prices, mu / 8) > 0.9 * tied else 4))


@jit
def all_prices(
    scores: Scores, mask: Flags, stride: int, target: Floats, slack: bool, prices: Floats, mu: float, least: float
) -> tuple[float, bool]:
    """Goes on from the prices of a sample with more and more rows, up to all of them.

    Returns:
        The radius within which a row's candidates are, and whether those are too many for a list.
    """
    while stride > 1:
        stride = stride // ROWS_RATIO if stride >= ROWS_RATIO**2 else 1
        mu = follow(scores, mask, stride, target, slack, prices, mu, least)
    return LIST_REACH * mu, crowd(scores, mask, prices, LIST_REACH * mu) > MANY_CANDIDATES
