# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Prices: Newton steps on the smoothed dual.

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
from equipoise.assignment._kernels._contested import Counts, Flags, Floats, Ints, Scores, best_offer

# A share is 0 where an offer trails by more than this many mu.
REACH = 15.0
# In units of mu: how far a step may move two experts apart that share rows; and a step that is so long that the next
# one has to be at the same mu.
STEP, LONG = 4.0, 2.0
# What ties every price to where it is, as a part of the expert's rows: it decides only where rows are few.
ANCHOR = 1e-3
ALONE = 1.5
# Newton steps in all, and at one mu.
# How a descent ends: counts are within the goal; rows are tied, so that less smoothing changes nothing; or neither.
REACHED, TIED, FAILED = 0, 1, 2
# So many times in a row less smoothing changes nothing.
MOST_TIED = 3
# Pairs of candidates that are looked at for the curvature of long lists.
MOST_PAIRS = 1 << 20
MOST_STEPS, MOST_STAYS = 100, 24


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
def shares(offers: Floats, width: int, need: int, mu: float, x: Floats, weight: Floats) -> float:
    """Shares that sum to `need`, and weights so that the Hessian of pair (j, t) is -weight_j weight_t / total / mu.

    Returns:
        The total: of the weights, or 1 for a softmax.
    """
    best, inverse = -np.inf, 1 / mu
    for t in range(width):
        best = larger(best, offers[t])
    if need == 1:
        total = 0.0
        for t in range(width):
            x[t] = soft_exp((offers[t] - best) * inverse)
            total += x[t]
        for t in range(width):
            x[t] /= total
            weight[t] = x[t]
        return 1.0
    if need >= width:
        for t in range(width):
            x[t], weight[t] = 1.0, 0.0
        return 1.0
    worst = best
    for t in range(width):
        worst = min(worst, offers[t])
    # The threshold lies where shares cross one half; safeguarded Newton, to a hundredth of a row.
    low, high = worst - REACH * mu, best + REACH * mu
    for t in range(width):  # x serves to sort
        u = t
        while u > 0 and x[u - 1] < offers[t]:
            x[u] = x[u - 1]
            u -= 1
        x[u] = offers[t]
    threshold, total = 0.5 * (x[need - 1] + x[need]), 0.0
    for _ in range(20):
        taken, total = 0.0, 0.0
        for t in range(width):
            u = (offers[t] - threshold) * inverse
            e = soft_exp(-abs(u))
            near = 1.0 / (1.0 + e)
            x[t] = near if u > 0 else 1.0 - near
            weight[t] = near * (1.0 - near)
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
def demand_of_lists(
    need: Ints, first: Counts, cols: Ints, vals: Scores, prices: Floats, mu: float, demand: Floats, pairs: Floats
) -> None:
    """Adds the shares of contested rows to the demand, and their weights to the pairs of experts, on either side."""
    k, inverse = prices.shape[0], 1 / mu
    offers, x, weight = np.empty(k), np.empty(k), np.empty(k)
    mean = first[need.shape[0]] / max(1, need.shape[0])
    every = 1 + int(first[need.shape[0]] * mean / MOST_PAIRS)  # long lists: every so many rows tell the curvature
    for a in range(need.shape[0]):
        begin = first[a]
        width = first[a + 1] - begin
        if width == 2:  # most rows; either of the two shares tells the other
            j, t = np.uint32(cols[begin]), np.uint32(cols[begin + 1])
            lead = (vals[begin] - prices[j]) - (vals[begin + 1] - prices[t])
            e = soft_exp(-abs(lead) * inverse)
            more = 1.0 / (1.0 + e)
            half = np.copysign(more - 0.5, lead)  # which of the two is ahead nobody can foresee: no branch
            demand[j] += 0.5 + half
            demand[t] += 0.5 - half
            pairs[j, t] += more * (1.0 - more)
            continue
        best, worst = -np.inf, np.inf
        for t in range(width):
            offers[t] = vals[begin + t] - prices[np.uint32(cols[begin + t])]
            best, worst = larger(best, offers[t]), smaller(worst, offers[t])
        # One of its candidates, or all but one: a softmax, of the offers or of their negatives.
        leaves_one = need[a] == width - 1
        if need[a] == 1 or leaves_one:
            total = 0.0
            for t in range(width):
                behind = offers[t] - best if need[a] == 1 else worst - offers[t]
                offers[t] = soft_exp(behind * inverse)
                total += offers[t]
            scale = 1.0 / total
            for t in range(width):
                j, share = np.uint32(cols[begin + t]), offers[t] * scale
                offers[t] = share
                demand[j] += share if need[a] == 1 else 1.0 - share
                if a % every == 0:
                    share *= every
                    for v in range(t):
                        pairs[j, np.uint32(cols[begin + v])] += share * offers[v]
        else:
            scale = 1.0 / shares(offers, width, need[a], mu, x, weight)
            for t in range(width):
                j = np.uint32(cols[begin + t])
                demand[j] += x[t]
                if a % every == 0:
                    for v in range(t):
                        pairs[j, np.uint32(cols[begin + v])] += every * weight[t] * scale * weight[v]


@jit
def demand_of_slots(free: float, prices: Floats, mu: float, demand: Floats, pairs: Floats) -> None:
    """The same for free slots."""
    k = prices.shape[0]
    offers, x, weight = -prices, np.empty(k), np.empty(k)
    shares(offers, k, 1, mu, x, weight)
    for j in range(k):
        demand[j] += free * x[j]
        for t in range(j):
            pairs[j, t] += free * x[j] * x[t]


@jit
def laplacian(pairs: Floats) -> None:
    """Turns the pair weights into mu times the Hessian: -(w + w') beside the diagonal, and their sum on it."""
    k = pairs.shape[0]
    for j in range(k):
        for t in range(j):
            weight = pairs[j, t] + pairs[t, j]
            pairs[j, t] = pairs[t, j] = -weight
    for j in range(k):
        total = 0.0
        for t in range(k):
            if t != j:
                total -= pairs[j, t]
        pairs[j, j] = total


@jit
def newton_step(prices: Floats, demand: Floats, target: Floats, hessian: Floats, mu: float, step: Floats) -> float:
    """Writes a Newton step for the prices, limited between experts that share rows, and in all.

    Returns:
        How far the step would have moved two such experts apart, in units of mu.
    """
    k = prices.shape[0]
    right, held_back = np.zeros(k), False
    for j in range(k):
        if prices[j] < np.inf:
            right[j] = demand[j] - target[j]
            # An expert that shares too few rows to mend this by a step of a few mu is held back.
            lacking = abs(right[j]) / ALONE - hessian[j, j]
            held_back = held_back or lacking > 0.05 * target[j] + 1.0
            hessian[j, j] += max(ANCHOR * target[j] + 1e-9, lacking)
        else:
            hessian[j, j] = 1.0
    step[:] = conjugate_gradients(hessian, right)
    longest = 0.0
    for j in range(k):
        if prices[j] < np.inf:
            for t in range(k):
                apart = step[t] - step[j] if prices[t] < np.inf else 0.0
                if apart > longest:
                    # Rows that hardly weigh in this pair weigh e times as much for every mu that the two come closer.
                    weak = max(-hessian[j, t], 1e-7 * hessian[j, j] + 1e-300)
                    apart *= STEP / (STEP + max(0.0, np.log(0.01 * hessian[j, j] / weak)))
                    longest = max(longest, apart)
    scale = mu * min(1.0, STEP / max(longest, 1e-300))
    for j in range(k):
        step[j] = scale * step[j] if prices[j] < np.inf else 0.0
    return max(longest, 2 * LONG) if held_back else longest


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
    """Solves a symmetric positive definite system, preconditioned by its diagonal, to 1e-4.

    Not coarser: where experts compete in a chain, what is left of a coarse solution is the part that moves its ends.
    """
    k = right.shape[0]
    x, residual, direction = np.zeros(k), right.copy(), np.empty(k)
    inverse, z, image = np.empty(k), np.empty(k), np.empty(k)
    for j in range(k):
        inverse[j] = 1.0 / matrix[j, j]
        z[j] = direction[j] = inverse[j] * residual[j]
    rho = _dot(residual, z)
    enough = 1e-8 * rho
    for _ in range(2 * k):
        if rho <= enough:
            break
        _times(matrix, direction, image)
        alpha = rho / _dot(direction, image)
        for j in range(k):
            x[j] += alpha * direction[j]
            residual[j] -= alpha * image[j]
            z[j] = inverse[j] * residual[j]
        rho, previous = _dot(residual, z), rho
        for j in range(k):
            direction[j] = z[j] + (rho / previous) * direction[j]
    return x


@jit
def narrow(
    need: Ints, first: Counts, cols: Ints, vals: Scores, prices: Floats, reach: float, fixed: Floats, counts: Floats
) -> int:
    """Drops candidates that are out of reach, in place, and rows that are left without a choice; counts demand.

    Args:
        need: [m], see above.
        first: [m + 1].
        cols: [entries].
        vals: [entries].
        prices: [k].
        reach: how far an offer may be from the one that decides.
        fixed: [k] what rows without a choice take; those that are dropped are added.
        counts: [k] what all rows take at these prices, written here.

    Returns:
        How many rows are left.
    """
    k, m, entry = prices.shape[0], 0, 0
    top, open_demand = np.empty(k + 1), np.zeros(k)
    begin = first[0]
    for a in range(need.shape[0]):
        end, wanted = first[a + 1], need[a]
        best = top[: wanted + 1]
        best[:] = -np.inf
        for e in range(begin, end):
            offer = vals[e] - prices[cols[e]]
            if offer > best[wanted]:
                t = wanted
                while t > 0 and best[t - 1] < offer:
                    best[t] = best[t - 1]
                    t -= 1
                best[t] = offer
        low, high = best[wanted - 1] - reach, best[wanted] + reach
        start, left = entry, wanted
        contested = best[wanted - 1] - best[wanted] <= reach
        room = wanted
        for e in range(begin, end):
            j, offer = cols[e], vals[e] - prices[cols[e]]
            takes = offer >= best[wanted - 1] and room > 0
            room -= takes
            if (not contested and takes) or offer > high:
                fixed[j] += 1.0
                left -= 1
            elif contested and offer >= low:
                open_demand[j] += takes
                cols[entry], vals[entry] = j, vals[e]
                entry += 1
        begin = end
        if entry > start:
            need[m] = left
            m += 1
            first[m] = entry
    for j in range(k):
        counts[j] = fixed[j] + open_demand[j]
    return m


@jit
def misplaced(counts: Floats, target: Floats, prices: Floats, near: float) -> float:
    """Rows by which demand misses the target. Experts within `near` of the least price may have free slots."""
    over, under, least = 0.0, 0.0, np.inf
    for j in range(prices.shape[0]):
        least = min(least, prices[j])
    for j in range(prices.shape[0]):
        over += max(0.0, counts[j] - target[j])
        if least + near < prices[j] < np.inf:
            under += max(0.0, target[j] - counts[j])
    return max(over, under)


@jit
def descend(
    need: Ints,
    first: Counts,
    cols: Ints,
    vals: Scores,
    fixed: Floats,
    target: Floats,
    free: float,
    prices: Floats,
    mu: float,
    least: float,
    goal: float,
    reach: float,
    deviation: Floats,
) -> tuple[int, float]:
    """Newton steps on contested rows with less and less smoothing, until counts are within `goal` rows of balance.

    Changes the prices, and the lists, from which rows that the smoothing no longer reaches are dropped.

    Args:
        need: [m], see above.
        first: [m + 1].
        cols: [entries].
        vals: [entries].
        fixed: [k] what settled rows and certain offers take.
        target: [k] what all rows and free slots are to take.
        free: the number of free slots.
        prices: [k].
        mu: the first width.
        least: below this width the rows say nothing.
        goal: how many rows may be misplaced in the end.
        reach: candidates that trail by more than so many mu are dropped when mu falls.
        deviation: [k], by how much a price is uncertain because counts are: written here.

    Returns:
        How it ended, and the last mu.
    """
    k = prices.shape[0]
    demand, pairs, counts, step = np.empty(k), np.empty((k, k)), np.empty(k), np.zeros(k)
    stays, tied, excess, steps, slope = 0, 0, np.inf, 0, 0.0
    rows, last, status = target.sum() - free, np.inf, FAILED
    while True:
        demand[:] = fixed
        pairs[:] = 0.0
        demand_of_lists(need, first, cols, vals, prices, mu, demand, pairs)
        if free > 0:
            demand_of_slots(free, prices, mu, demand, pairs)
        if stays > 0 and steps < MOST_STEPS:
            # The dual is convex: if its slope along the last step has turned, the step went too far.
            turned = 0.0
            for j in range(k):
                turned += (demand[j] - target[j]) * step[j]
            if turned < -0.3 * slope:
                steps += 1
                back = 1.0 - slope / (slope - turned)
                for j in range(k):
                    prices[j] -= back * step[j]
                    step[j] *= 1.0 - back
                slope *= 1.0 - back
                continue
        laplacian(pairs)
        wrong = 0.0
        for j in range(k):
            deviation[j] = mu * np.sqrt(target[j]) / max(pairs[j, j], 0.05 * np.sqrt(target[j]) + 1e-9)
            wrong += max(0.0, demand[j] - target[j])
        if steps >= MOST_STEPS:
            break
        steps += 1
        stays += 1
        length = newton_step(prices, demand, target, pairs, mu, step)
        slope = 0.0
        for j in range(k):
            prices[j] += step[j]
            slope += (demand[j] - target[j]) * step[j]
        if length > LONG or wrong > 0.1 * rows:
            if stays < MOST_STAYS:
                continue
            break
        before = first[need.shape[0]]
        m = narrow(need, first, cols, vals, prices, reach * mu / 4, fixed, counts)
        need, first = need[:m], first[: m + 1]
        excess = misplaced(counts, target, prices, STEP * mu if free > 0 else -1.0)
        tied = tied + 1 if excess > 0.9 * last and first[m] > 0.9 * before else 0
        last = excess
        if excess <= goal or m == 0 or tied == MOST_TIED or mu / 4 < least:
            status = TIED if excess > max(goal, rows / 8) else REACHED
            break
        mu /= 4 if stays == 1 else 2
        stays = 0
    return status, mu


@jit_vector
def _soft_row(row: Scores, prices: Scores, best: float, inverse: float, out: Scores) -> float:
    total = row[0] * 0
    for j in range(row.shape[0]):
        e = soft_exp((row[j] - prices[j] - best) * inverse)
        out[j] = e
        total += e
    return total


@jit
def open_with_sinkhorn(
    scores: Scores,
    mask: Flags,
    stride: int,
    top_k: int,
    target: Floats,
    free: float,
    prices: Floats,
    mu: float,
    passes: int,
) -> None:
    """Sinkhorn's steps at a large mu: price_j grows by mu log(demand_j / target_j).

    Brings experts near that start with hardly a row, or with nearly all of them, where Newton's model does not hold.
    """
    k = prices.shape[0]
    demand, pairs, own = np.empty(k), np.empty((k, k)), np.empty(k, scores.dtype)
    offers, x, weight, out = np.empty(k), np.empty(k), np.empty(k), np.empty(k, scores.dtype)
    kind = scores.dtype.type
    for _ in range(passes):
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
            demand_of_slots(free, prices, mu, demand, pairs)
        least = np.inf
        for j in range(k):
            if prices[j] < np.inf:
                prices[j] += mu * np.log(max(demand[j], 1e-3 * target[j]) / target[j])
                least = min(least, prices[j])
        for j in range(k):
            prices[j] -= least
