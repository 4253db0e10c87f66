# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Prices: the smoothed dual, and Sinkhorn's steps on it. `_newton.py` has Newton's.

The dual of the assignment problem has one variable for each expert,

    D(price) = sum_i (sum of the K largest s_ij - price_j) + sum_j capacity_j price_j.

It is convex and has kinks. Smoothed over a width mu, a row takes shares x_ij of the experts that sum to K, and the
gradient of D is capacity - demand with demand_j = sum_i x_ij. For K = 1 the shares are a softmax of the offers; for
K > 1 they are sigmoids of the offers above a threshold that makes them sum to K. In both cases the Hessian is a
Laplacian over mu: rows that are nearly tied between j and j' weigh in the pair (j, j').

Prices found here are a start. They decide how long the exact part takes, never what it finds. So the exponential may be
replaced by (1 + x/16)^16, which is a few multiplications.

Free slots are one row of weight `free` that scores 0 for every expert. It makes every problem tight.

Legend: n rows, k experts, m contested rows, w candidates of a row. An expert whose price is +inf is closed.
"""

import numpy as np

from equipoise._core._jit import jit, jit_vector
from equipoise._core._vector import larger, smaller
from equipoise.assignment._kernels._contested import best_offer, insert
from equipoise.assignment._kernels._records import Floats, Lists, Problem, Scores

# A share is 0 where an offer trails by more than this many mu.
REACH = 15.0


@jit_vector
def soft_exp(x: float) -> float:
    """(1 + x/16)^16, the exponential of x <= 0 to the accuracy that a start needs; 0 below -15."""
    t = 1 + x * np.float32(0.0625)
    t = t if t > np.float32(0.0625) else x * 0  # not closer to 0: the power would be denormal, and slow
    t *= t
    t *= t
    t *= t
    return t * t


@jit_vector
def shares(offers: Floats, width: int, need: int, mu: float, x: Floats, weight: Floats) -> float:
    """Shares that sum to `need`, and weights so that the Hessian of pair (j, t) is -weight_j weight_t / total / mu.

    Returns:
        The total of the weights.
    """
    best, worst, inverse, total = -np.inf, np.inf, 1 / mu, 0.0
    for t in range(width):
        best, worst = larger(best, offers[t]), smaller(worst, offers[t])
    if need >= width:
        for t in range(width):
            x[t], weight[t] = 1.0, 0.0
        return 1.0
    # The threshold lies where shares cross one half; safeguarded Newton, to a hundredth of a row.
    low, high = worst - REACH * mu, best + REACH * mu
    x[: need + 1] = -np.inf
    for t in range(width):  # x serves to find the largest
        insert(x[: need + 1], offers[t])
    threshold = 0.5 * (x[need - 1] + x[need])
    for _ in range(20):
        taken, total = 0.0, 0.0
        for t in range(width):
            u = (offers[t] - threshold) * inverse
            half = 1.0 / (1.0 + soft_exp(-abs(u))) - 0.5
            x[t] = 0.5 + np.copysign(half, u)
            weight[t] = 0.25 - half * half
        for t in range(width):  # in a loop of its own: see `jit_vector`
            taken += x[t]
            total += weight[t]
        if abs(taken - need) < 0.01:
            break
        if taken > need:
            low = threshold
        else:
            high = threshold
        guess = threshold + mu * (taken - need) / max(total, 1e-3)
        threshold = guess if low < guess < high else 0.5 * (low + high)
    return max(total, 1e-9)


@jit
def demand_of_lists(lists: Lists, prices: Floats, mu: float, demand: Floats, pairs: Floats) -> None:
    """Adds the shares of contested rows to the demand, and their weights to the pairs of experts, on either side."""
    _, need, first, cols, vals = lists
    k, inverse = prices.shape[0], 1 / mu
    offers, x, weight = np.empty(k), np.empty(k), np.empty(k)
    for a in range(need.shape[0]):
        begin = first[a]
        width, best, worst = first[a + 1] - begin, -np.inf, np.inf
        for t in range(width):
            offers[t] = vals[begin + t] - prices[np.uint32(cols[begin + t])]
            best, worst = larger(best, offers[t]), smaller(worst, offers[t])
        # One of its candidates, or all but one: a softmax, of the offers or of their negatives.
        takes_one = need[a] == 1
        if takes_one or need[a] == width - 1:
            total = 0.0
            for t in range(width):
                x[t] = soft_exp((offers[t] - best if takes_one else worst - offers[t]) * inverse)
                total += x[t]
            scale = 1.0 / total
            for t in range(width):
                j, share = np.uint32(cols[begin + t]), x[t] * scale
                x[t] = share
                demand[j] += share if takes_one else 1.0 - share
                for v in range(t):
                    pairs[j, np.uint32(cols[begin + v])] += share * x[v]
        else:
            scale = 1.0 / shares(offers, width, np.int64(need[a]), mu, x, weight)
            for t in range(width):
                j = np.uint32(cols[begin + t])
                demand[j] += x[t]
                for v in range(t):
                    pairs[j, np.uint32(cols[begin + v])] += weight[t] * scale * weight[v]


@jit
def demand_of_slots(free: float, prices: Floats, mu: float, demand: Floats, pairs: Floats) -> None:
    """The same for free slots, which score 0 for every expert."""
    k = prices.shape[0]
    x, total = np.empty(k), 0.0
    for j in range(k):
        x[j] = soft_exp((prices.min() - prices[j]) / mu)
        total += x[j]
    for j in range(k):
        x[j] /= total
        demand[j] += free * x[j]
        for t in range(j):
            pairs[j, t] += free * x[j] * x[t]


@jit_vector
def _soft_row(row: Scores, prices: Scores, best: float, inverse: float, out: Scores) -> float:
    total = row[0] * 0
    for j in range(row.shape[0]):
        out[j] = soft_exp((row[j] - prices[j] - best) * inverse)
    for j in range(row.shape[0]):
        total += out[j]
    return total


@jit
def open_with_sinkhorn(problem: Problem, stride: int, top_k: int, prices: Floats, mu: float) -> None:
    """Three of Sinkhorn's steps on every `stride`-th row at a large mu: price_j grows by mu log(demand_j / target_j).

    Brings experts near that start with hardly a row, or with nearly all of them, where Newton's model does not hold.
    """
    scores, mask, _, target, free = problem
    k = prices.shape[0]
    demand, pairs, own = np.empty(k), np.empty((k, k)), np.empty(k, scores.dtype)
    offers, x, weight, out = np.empty(k), np.empty(k), np.empty(k), np.empty(k, scores.dtype)
    kind = scores.dtype.type
    for _ in range(3):
        demand[:] = 0.0
        for j in range(k):
            own[j] = prices[j]
        for i in range(0, scores.shape[0], stride):
            if mask[i] and top_k == 1:
                best = best_offer(scores[i], own)
                scale = 1.0 / np.float64(_soft_row(scores[i], own, best, kind(1 / mu), out))
                for j in range(k):
                    demand[j] += scale * out[j]
            elif mask[i]:
                for j in range(k):
                    offers[j] = scores[i, j] - prices[j]
                shares(offers, k, top_k, mu, x, weight)
                for j in range(k):
                    demand[j] += x[j]
        if free > 0:
            demand_of_slots(free / stride, prices, mu, demand, pairs)
        least = np.inf
        for j in range(k):
            if prices[j] < np.inf:
                prices[j] += mu * np.log(max(demand[j] * stride / target[j], 1e-3))
                least = min(least, prices[j])
        for j in range(k):
            prices[j] -= least
