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
from equipoise._core._vector import larger
from equipoise.assignment._kernels._choices import Choices, Scores
from equipoise.assignment._kernels._pricing import exact_best_offer

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

# In one step an expert that shares no rows with others moves by at most this many mu, and any at most by that many.
ALONE, FURTHEST = 1.5, 64.0
# How often experts that stop at a price of 0 are told from others; about three times are enough.
MOST_TURNS = 16


@jit_vector
def soft_exp(x: float) -> float:
    """(1 + x/16)^16, the exponential of x <= 0 to the accuracy that a start needs; 0 below -15."""
    t = 1 + x * np.float32(0.0625)
    t = t if t > np.float32(0.0625) else x * 0  # not closer to 0: the power would be denormal, and slow
    t *= t
    t *= t
    t *= t
    return t * t


@jit
def mean_spread(scores: Scores, mask: NDArray[np.bool_], stride: int, prices: Floats) -> float:
    """Mean difference between a row's best offer and its average one."""
    k = prices.shape[0]
    total, count = 0.0, 0
    for i in range(0, scores.shape[0], stride):
        best = exact_best_offer(scores[i], prices) if mask[i] else -np.inf
        if best > -np.inf:
            behind, finite = 0.0, 0
            for j in range(k):
                offer = scores[i, j] - prices[j]
                if offer > -np.inf:
                    behind += (best - offer) / k  # divided at once: the sum might exceed the largest number
                    finite += 1
            if finite > 1:
                total += (behind * (k / finite) - total) / (count + 1)
                count += 1
    return total


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
    m, dual, start = widths.shape[0], 0.0, 0
    while start < m:
        width, stop = widths[start], start + 1
        while stop < m and widths[stop] == width:
            stop += 1
        if width == 2:  # most rows, where lists are short
            dual += _demand_of_pairs(cols[start:stop], vals[start:stop], prices, mu, demand, curvature)
        else:
            dual += _demand_of_lists(cols[start:stop], vals[start:stop], width, prices, mu, demand, curvature)
        start = stop
    return dual


@jit
def _demand_of_pairs(cols: Ints, vals: Scores, prices: Floats, mu: float, demand: Floats, curvature: Floats) -> float:
    dual, inverse = 0.0, 1 / mu
    product = 1.0  # of sums between 1 and 2: one logarithm for many rows
    for a in range(cols.shape[0]):
        j, t = np.uint32(cols[a, 0]), np.uint32(cols[a, 1])
        first, second = vals[a, 0] - prices[j], vals[a, 1] - prices[t]
        lead = first - second
        e = soft_exp(-abs(lead) * inverse)
        total = 1.0 + e
        more = 1.0 / total
        less = e * more
        # Which of the two is ahead nobody can foresee: a sign in place of a branch.
        half = np.copysign(0.5 * (more - less), lead)
        demand[j] += 0.5 + half
        demand[t] += 0.5 - half
        curvature[j, t] += less * more
        dual += larger(first, second)
        product *= total
        if product > 1e200:
            dual += mu * np.log(product)
            product = 1.0
    return dual + mu * np.log(product)


@jit
def _demand_of_lists(
    cols: Ints, vals: Scores, width: int, prices: Floats, mu: float, demand: Floats, curvature: Floats
) -> float:
    dual, inverse = 0.0, 1 / mu
    product, p = 1.0, np.empty(width)  # product of sums between 1 and `width`
    for a in range(cols.shape[0]):
        best, total = -np.inf, 0.0
        for w in range(width):
            p[w] = vals[a, w] - prices[np.uint32(cols[a, w])]
            best = larger(best, p[w])
        for w in range(width):
            p[w] = soft_exp((p[w] - best) * inverse)
            total += p[w]
        scale = 1.0 / total
        for w in range(width):
            j, share = np.uint32(cols[a, w]), p[w] * scale
            p[w] = share
            demand[j] += share
            for v in range(w):
                curvature[j, np.uint32(cols[a, v])] += share * p[v]
        dual += best
        product *= total
        if product > 1e200:
            dual += mu * np.log(product)
            product = 1.0
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
    """One projected Newton step on the prices, with limited changes between experts that share rows.

    A row's softmax sees differences between prices, and the quadratic model holds for differences of a few mu. So these
    are limited, not the prices: where experts compete in a chain, changes add up along it, and its ends must move far.
    A step that exceeds the limit is replaced by the one whose differences come nearest to the limited ones, weighted
    like the Hessian: the same system of equations with another right side.

    Returns:
        The largest change of a difference between experts that share enough rows, before limiting.
    """
    k = prices.shape[0]
    right, free = np.zeros(k), np.zeros(k, np.bool_)
    # Ties every price to where it is, which decides only for experts that share no rows with others.
    anchor = 1e-6 * target + 1e-12
    matrix = hessian.copy()
    for j in range(k):
        if prices[j] < np.inf:
            right[j] = mu * (demand[j] - target[j])
            matrix[j, j] += anchor[j]
            free[j] = not slack or prices[j] > 0 or right[j] > 0
        else:
            fix(matrix, j)
    system = system_of_free(matrix, free)
    wanted = conjugate_gradients(system, right * free)
    step = bounded_step(matrix, right, prices, free, wanted) if slack else wanted
    longest = step.max() - step.min()
    if longest > limit:
        step, longest = limited(wanted, system, hessian, free, target, anchor, limit, ALONE * mu)
        if slack:
            _times(matrix, step, right)
            for j in range(k):
                right[j] = right[j] if free[j] else -np.inf
            step = bounded_step(matrix, right, prices, free, step)
    for j in range(k):
        if prices[j] < np.inf:
            prices[j] += max(-FURTHEST * mu, min(FURTHEST * mu, step[j]))
    rest_prices(prices, slack)
    return longest


@jit
def bounded_step(matrix: Floats, right: Floats, prices: Floats, free: NDArray[np.bool_], step: Floats) -> Floats:
    """The step d with the least d'Md / 2 - right'd that takes no price below 0 (Hintermueller, Ito, Kunisch, 2002).

    An expert is free to move, or it stops at 0. Of those that are free, the ones that would fall below 0 stop there the
    next time; of those that stop, the ones that would rather rise become free. M has no positive entry beside its
    diagonal, so that one expert's rise makes others only rise: from the second time on fewer and fewer stop, and it
    ends.

    Args:
        matrix: [k, k], M.
        right: [k]; -inf for an expert that is to stay at 0.
        prices: [k], +inf for a closed expert.
        free: [k], a first guess.
        step: [k], the solution for that guess.
    """
    k = right.shape[0]
    free, wanted = free.copy(), np.empty(k)
    for _ in range(MOST_TURNS):
        _times(matrix, step, wanted)
        changed = False
        for j in range(k):
            if prices[j] < np.inf:
                rises = prices[j] + step[j] > 0 if free[j] else right[j] > wanted[j]
                changed = changed or rises != free[j]
                free[j] = rises
        if not changed:
            break
        rest = right.copy()
        for j in range(k):
            if not free[j] and 0 < prices[j] < np.inf:
                rest += matrix[:, j] * prices[j]
        for j in range(k):
            if not free[j]:
                rest[j] = -prices[j] if prices[j] < np.inf else 0.0
        step = conjugate_gradients(system_of_free(matrix, free), rest)
        for j in range(k):
            step[j] = step[j] if free[j] else rest[j]  # exactly, where the solution is known
    return step


@jit
def system_of_free(matrix: Floats, free: NDArray[np.bool_]) -> Floats:
    """The same equations for those that are free; for the others, that they are what the right side says."""
    system = matrix.copy()
    for j in range(free.shape[0]):
        if not free[j]:
            fix(system, j)
    return system


@jit
def fix(matrix: Floats, j: int) -> None:
    """Takes an unknown out of a system: its value is what the right side says."""
    matrix[j, :] = 0.0
    matrix[:, j] = 0.0
    matrix[j, j] = 1.0


@jit
def limited(
    step: Floats,
    matrix: Floats,
    hessian: Floats,
    free: NDArray[np.bool_],
    target: Floats,
    anchor: Floats,
    limit: float,
    alone: float,
) -> tuple[Floats, float]:
    """A step with limited differences in place of the one given, and the largest of that one that is known."""
    right = np.zeros(step.shape[0])
    longest = over = 0.0
    for attempt in range(4):
        over, noted = limit_differences(hessian, free, target, anchor, step, limit, alone, right)
        longest = noted if attempt == 0 else longest
        if over <= 1.0 + attempt:
            break
        step = conjugate_gradients(matrix, right)
    step *= min(1.0, 2.0 / max(over, 1.0))
    shift_groups(hessian, free, step, alone)
    return step, longest


@jit
def shift_groups(hessian: Floats, free: NDArray[np.bool_], step: Floats, alone: float) -> None:
    """Limits how far experts that share no rows with the rest move as a group; nothing else would."""
    k = step.shape[0]
    pending, members = free.copy(), np.empty(k, np.int32)
    for first in range(k):
        if not pending[first]:
            continue
        pending[first], members[0], count, held = False, first, 1, False
        seen = 0
        while seen < count < k:  # all of them, in most cases after the first one's line
            j = members[seen]
            seen += 1
            for t in range(k):
                if hessian[j, t] < 0.0 and t != j:
                    held = held or not free[t]  # shares rows with an expert whose price stays
                    if pending[t]:
                        pending[t] = False
                        members[count] = t
                        count += 1
        if not held:
            mean = 0.0
            for a in range(count):
                mean += step[members[a]] / count
            for a in range(count):
                step[members[a]] += max(-alone, min(alone, mean)) - mean


@jit
def limit_differences(
    hessian: Floats,
    free: NDArray[np.bool_],
    target: Floats,
    anchor: Floats,
    step: Floats,
    limit: float,
    alone: float,
    right: Floats,
) -> tuple[float, float]:
    """Writes the right side whose solution has the differences of a step, each limited.

    Returns:
        The largest difference in units of the limit; and the largest one between experts that share enough rows for it
        to be known, as it is.
    """
    over = noted = 0.0
    for j in range(step.shape[0]):
        if not free[j]:
            continue
        known = hessian[j, j] > 0.25 * np.sqrt(target[j])
        least = 1e-2 * hessian[j, j] if known else np.inf
        total, furthest, known_furthest = _limited_differences(hessian[j], step, step[j], limit, least)
        right[j] = anchor[j] * max(-alone, min(alone, step[j])) + total
        over, noted = max(over, furthest / limit), max(noted, known_furthest)
    return over, noted


@jit_vector
def _limited_differences(
    line: Floats, step: Floats, own: float, limit: float, least: float
) -> tuple[float, float, float]:
    """The weighted sum of one expert's limited differences to others, the largest, the largest of weight > least."""
    total = over = noted = 0.0
    for t in range(step.shape[0]):  # the expert itself is among them, with a difference of 0
        weight, difference = -line[t], own - step[t]
        total += weight * larger(-limit, -larger(-limit, -difference))
        over = larger(over, abs(difference) if weight > 0.0 else 0.0)
        noted = larger(noted, abs(difference) if weight > least else 0.0)
    return total, over, noted


@jit
def furthest_apart(hessian: Floats, change: Floats) -> float:
    """The largest difference between the changes of two experts that share rows."""
    furthest = 0.0
    for j in range(change.shape[0]):
        if abs(change[j]) < np.inf:  # not for a closed expert, whose price is inf and change NaN
            furthest = max(furthest, _limited_differences(hessian[j], change, change[j], np.inf, 0.0)[1])
    return furthest


@jit
def imbalance(demand: Floats, target: Floats, prices: Floats, slack: bool) -> float:
    """Rows by which demand misses what the prices call for: the target, or at most that where the price is 0."""
    over = under = 0.0
    for j in range(prices.shape[0]):
        over += max(0.0, demand[j] - target[j])
        if prices[j] > 0 and prices[j] < np.inf:
            under += max(0.0, target[j] - demand[j])
    return max(over, under) if slack else over


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
    """Solves a symmetric positive definite system, preconditioned by its diagonal.

    To 1e-4: where experts compete in a chain, what is left of a coarser solution is the part that moves its ends.
    """
    k = right.shape[0]
    x = np.zeros(k)
    residual = right.copy()
    inverse = np.empty(k)
    for j in range(k):
        inverse[j] = 1.0 / matrix[j, j]
    z = inverse * residual
    direction = z.copy()
    image = np.empty(k)
    rho = _dot(residual, z)
    enough = 1e-8 * rho
    for _ in range(2 * k):
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
