# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Prices by smoothing: Newton steps on the dual, with the maximum replaced by a soft one.

The dual of the assignment problem has one variable for each expert,

    D(price) = sum_i max_j (s_ij - price_j) + sum_j capacity_j price_j,     price >= 0 if there is slack.

It is convex but has kinks. With `mu logsumexp(. / mu)` for the maximum it is smooth: its gradient is capacity - demand,
where demand_j = sum_i P_ij and P_i = softmax((s_i - price) / mu), and its Hessian is (1/mu) sum_i diag(P_i) - P_i P_i'.
As mu falls, the minimiser tends to optimal prices. Where mu is too large for two experts that few rows tell apart, the
soft maximum shares those rows between them, which is harmless; a step from hard counts would throw them to and fro.

Prices found here are only a start: they decide how long the exact part takes, never what it finds. So the exponential
may be replaced by (1 + x/16)^16, which is a few multiplications, and sums may be rounded.

Legend: n rows, k experts, w candidates of a row. An expert whose price is +inf is closed.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit, jit_vector
from equipoise.assignment._kernels._choices import Choices, Scores, offers_and_best

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


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
def _soft_weights(offers: Scores, best: float, inverse_mu: float, weights: Scores) -> float:
    total = offers[0] * 0
    for j in range(offers.shape[0]):
        weights[j] = soft_exp((offers[j] - best) * inverse_mu)
        total += weights[j]
    return total


@jit
def dense_demand(
    scores: Scores, mask: NDArray[np.bool_], stride: int, prices: Floats, mu: float, demand: Floats, curvature: Floats
) -> float:
    """What `soft_demand` does, from every `stride`-th row with all its experts."""
    k = prices.shape[0]
    near_prices = prices.astype(scores.dtype)
    near_inverse = (np.ones(1) / mu).astype(scores.dtype)
    offers, weights = np.empty(k, scores.dtype), np.empty(k, scores.dtype)
    sharing, shares = np.empty(k, np.int32), np.empty(k)
    dual = 0.0
    for i in range(0, scores.shape[0], stride):
        if not mask[i]:
            continue
        best = offers_and_best(scores[i], near_prices, offers)
        if not best > -np.inf:
            continue
        total = _soft_weights(offers, best, near_inverse[0], weights)
        dual += best + mu * np.log(total)
        scale = 1 / total
        count = 0
        for j in range(k):
            sharing[count] = j
            count += weights[j] * scale > 1e-3
        # Of a row that many share only the diagonal is kept, which overstates the curvature: a shorter step, but k^2
        # fewer operations.
        few = count <= 16
        for w in range(count):
            j = sharing[w]
            shares[w] = weights[j] * scale
            demand[j] += shares[w]
            if few:
                for v in range(w):
                    curvature[j, sharing[v]] += shares[w] * shares[v]
            else:
                curvature[j, j] += shares[w]
    return dual


@jit
def mean_spread(scores: Scores, mask: NDArray[np.bool_], stride: int, prices: Floats) -> float:
    """Mean difference between a row's best offer and its average one."""
    total, count = 0.0, 0
    for i in range(0, scores.shape[0], stride):
        best, mean, finite = -np.inf, 0.0, 0
        if mask[i]:
            for j in range(prices.shape[0]):
                offer = scores[i, j] - prices[j]
                if offer > -np.inf:
                    best = max(best, offer)
                    mean += (offer - mean) / (finite + 1)
                    finite += 1
        if finite > 1:
            total += (best - mean - total) / (count + 1)
            count += 1
    return total


@jit
def gap_quantile(
    scores: Scores, mask: NDArray[np.bool_], stride: int, prices: Floats, rank: int, fraction: float
) -> float:
    """The given quantile, over every `stride`-th row, of how far the best offer is ahead of the one `rank` behind."""
    gaps = np.empty((scores.shape[0] + stride - 1) // stride)
    offers = np.empty(prices.shape[0])
    count = 0
    for i in range(0, scores.shape[0], stride):
        if mask[i]:
            for j in range(prices.shape[0]):
                offers[j] = scores[i, j] - prices[j]
            best = offers.max()
            for _ in range(rank):
                offers[offers.argmax()] = -np.inf
            behind = offers.max()
            if behind > -np.inf:
                gaps[count] = best - behind
                count += 1
    if count == 0:
        return 0.0
    gaps = np.sort(gaps[:count])
    return gaps[min(count - 1, int(fraction * count))]


@jit
def rest_prices(prices: Floats, slack: bool) -> None:
    """Keeps prices >= 0: with slack by clipping, without by shifting the least to 0, which changes no row's choice."""
    least = 0.0 if slack else prices.min()
    for j in range(prices.shape[0]):
        prices[j] = max(0.0, prices[j] - least)


@jit
def soft_demand(choices: Choices, prices: Floats, mu: float, demand: Floats, curvature: Floats) -> float:
    """Adds the rows' demand, and for each pair of experts sum_i P_ij P_ij', above the diagonal or below it.

    Returns:
        The rows' part of the smoothed dual.
    """
    cols, vals, widths = choices.cols, choices.vals, choices.width
    dual, inverse = 0.0, 1 / mu
    product = 1.0  # of sums between 1 and w: one logarithm for many rows
    p = np.empty(cols.shape[1])
    for a in range(widths.shape[0]):
        width = widths[a]
        best = -np.inf
        for w in range(width):
            p[w] = vals[a, w] - prices[cols[a, w]]
            best = max(best, p[w])
        total = 0.0
        for w in range(width):
            p[w] = soft_exp((p[w] - best) * inverse)
            total += p[w]
        dual += best
        product *= total
        if product > 1e200:
            dual += mu * np.log(product)
            product = 1.0
        scale = 1 / total
        for w in range(width):
            p[w] *= scale
            j = cols[a, w]
            demand[j] += p[w]
            if p[w] > 1e-4:
                for v in range(w):
                    curvature[j, cols[a, v]] += p[w] * p[v]
    return dual + mu * np.log(product)


@jit
def laplacian(curvature: Floats) -> None:
    """Turns the pair weights into mu times the Hessian: -(w + w') beside the diagonal, and their sum on it."""
    k = curvature.shape[0]
    for j in range(k):
        for t in range(j):
            weight = curvature[j, t] + curvature[t, j]
            curvature[j, t] = curvature[t, j] = -weight
    for j in range(k):
        curvature[j, j] += curvature[j, j] - curvature[j].sum()


@jit
def newton_step(
    prices: Floats, demand: Floats, target: Floats, hessian: Floats, mu: float, limit: float, slack: bool
) -> float:
    """One projected Newton step on the prices, at most `limit` for each; returns the largest change."""
    k = prices.shape[0]
    free = np.empty(k, np.bool_)
    residual = np.zeros(k)
    for j in range(k):
        excess = demand[j] - target[j]
        free[j] = prices[j] < np.inf and (not slack or prices[j] > 0 or excess > 0)
        if free[j]:
            residual[j] = mu * excess
            # An expert without a near-tied row has no curvature; this keeps its step finite (`limit` cuts it).
            hessian[j, j] += 1e-3 * target[j]
        else:
            hessian[j, :] = 0.0
            hessian[:, j] = 0.0
            hessian[j, j] = 1.0
    step = conjugate_gradients(hessian, residual)
    largest = 0.0
    for j in range(k):
        if free[j]:
            before = prices[j]
            prices[j] += max(-limit, min(limit, step[j]))
            largest = max(largest, abs(prices[j] - before))
    rest_prices(prices, slack)
    return largest


@jit
def linear_part(prices: Floats, weight: Floats) -> float:
    """sum_j weight_j price_j over the experts that are open."""
    total = 0.0
    for j in range(prices.shape[0]):
        if prices[j] < np.inf:
            total += weight[j] * prices[j]
    return total


@jit
def step_back(prices: Floats, before: Floats) -> None:
    """Undoes three quarters of a step."""
    for j in range(prices.shape[0]):
        if prices[j] < np.inf:
            prices[j] = 0.75 * before[j] + 0.25 * prices[j]


@jit_vector
def _times(matrix: Floats, x: Floats, out: Floats) -> None:
    for j in range(x.shape[0]):
        total = 0.0
        for t in range(x.shape[0]):
            total += matrix[j, t] * x[t]
        out[j] = total


@jit_vector
def _dot(x: Floats, y: Floats) -> float:
    total = 0.0
    for j in range(x.shape[0]):
        total += x[j] * y[j]
    return total


@jit
def conjugate_gradients(matrix: Floats, right: Floats) -> Floats:
    """Solves a symmetric positive definite system to 1%, preconditioned by its diagonal."""
    k = right.shape[0]
    x = np.zeros(k)
    residual = right.copy()
    inverse = 1.0 / np.diag(matrix)
    z = inverse * residual
    direction = z.copy()
    image = np.empty(k)
    rho = _dot(residual, z)
    enough = 1e-4 * rho
    for _ in range(k):
        if rho <= enough:
            break
        _times(matrix, direction, image)
        alpha = rho / _dot(direction, image)
        x += alpha * direction
        residual -= alpha * image
        z = inverse * residual
        rho, previous = _dot(residual, z), rho
        direction = z + (rho / previous) * direction
    return x
