# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Prices: Newton steps on the smoothed dual of contested rows, with less and less smoothing.

Legend: k experts, m contested rows. An expert whose price is +inf is closed. `_records.py` has the types.
"""

import numpy as np

from equipoise._core._jit import jit, jit_vector
from equipoise.assignment._kernels._contested import copy_to, insert
from equipoise.assignment._kernels._records import Floats, Ints, Lists
from equipoise.assignment._kernels._smoothing import REACH, demand_of_lists, demand_of_slots

# How far a step may move two experts apart, in units of mu. After more than half of that, the next step is at the same
# mu. Half as far after every step that brought balance no nearer, down to what is not worth a step.
STEP, LEAST_STEP = 4.0, 1 / 16
# What ties every price to where it is, as a part of the expert's rows: it decides only where rows are few. And how far
# an expert that shares too few rows moves, in units of mu.
ANCHOR, ALONE = 1e-3, 1.5
# Prices that have moved this many times as far as candidates were listed for are lost: what they are to balance is not
# in the lists. Where lists suffice it is 0.9 times at most, else 10 times and more.
STRAY = 1.5
# How a descent ends: counts are within the goal, or no row has a choice left; rows are tied, so that less smoothing
# changes nothing; or prices are lost, because too few candidates are listed.
REACHED, TIED, LOST = 0, 1, 2
# So many times in a row less smoothing changes nothing.
MOST_TIED = 5
# Newton steps in all.
MOST_STEPS = 200


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
def newton_step(
    prices: Floats, demand: Floats, target: Floats, hessian: Floats, mu: float, wrong: float, limit: float, step: Floats
) -> float:
    """Writes a Newton step for the prices, limited in length; 0 for closed experts.

    `wrong`: how many rows of an expert may be misplaced in the end.

    Returns:
        How far the step would have moved two experts apart, in units of mu.
    """
    k = prices.shape[0]
    right, held_back = np.zeros(k), False
    for j in range(k):
        if prices[j] < np.inf:
            right[j] = demand[j] - target[j]
            # An expert that shares too few rows to mend this by a step of a few mu is held back.
            lacking = abs(right[j]) / ALONE - hessian[j, j]
            held_back = held_back or lacking > wrong
            hessian[j, j] += max(ANCHOR * target[j] + 1e-9, lacking)
        else:
            hessian[j, j] = 1.0
    copy_to(conjugate_gradients(hessian, right), step)
    least, most = np.inf, -np.inf
    for j in range(k):
        if prices[j] < np.inf:
            least, most = min(least, step[j]), max(most, step[j])
    longest = most - least
    for j in range(k):
        step[j] *= mu * min(1.0, limit / max(longest, 1e-300))
    return max(longest, STEP) if held_back else longest


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
def narrow(lists: Lists, prices: Floats, reach: float, fixed: Floats, counts: Floats, z: Ints) -> Lists:
    """Drops candidates that are out of reach, in place, and rows that are left without a choice; counts demand.

    Args:
        lists: the contested rows, overwritten.
        prices: [k].
        reach: how far an offer may be from the one that decides.
        fixed: [k] what rows without a choice take; those that are dropped are added.
        counts: [k] what all rows take at these prices, written here.
        z: [n, K] what rows take for certain, completed here.

    Returns:
        The rows and candidates that are left.
    """
    rows, need, first, cols, vals = lists
    m, entry, begin = 0, 0, first[0]
    top = np.empty(prices.shape[0] + 1)
    copy_to(fixed, counts)
    for a in range(need.shape[0]):
        end, wanted = first[a + 1], need[a]
        best = top[: wanted + 1]
        best[:] = -np.inf
        for e in range(begin, end):
            insert(best, vals[e] - prices[cols[e]])
        worst, contested = best[wanted - 1], best[wanted - 1] - best[wanted] <= reach
        low, high, room = worst - reach, best[wanted] + reach, wanted
        for e in range(begin, end):
            j, offer = cols[e], vals[e] - prices[cols[e]]
            takes = offer >= worst and room > 0
            room -= takes
            counts[j] += takes
            if (not contested and takes) or offer > high:
                fixed[j] += 1.0
                z[rows[a], z.shape[1] - wanted] = j
                wanted -= 1
            elif contested and offer >= low:
                cols[entry], vals[entry] = j, vals[e]
                entry += 1
        begin = end
        if entry > first[m]:
            rows[m], need[m] = rows[a], wanted
            m += 1
            first[m] = entry
    return rows[:m], need[:m], first[: m + 1], cols[:entry], vals[:entry]


@jit
def weigh_experts(pairs: Floats, mu: float, rate: Floats) -> None:
    """Writes how many rows each expert loses or gains when its price moves by 1, before free slots are counted."""
    for j in range(pairs.shape[0]):
        rate[j] = 0.0
        for t in range(pairs.shape[0]):
            rate[j] += (pairs[j, t] + pairs[t, j]) / mu


@jit
def misplaced(counts: Floats, target: Floats, prices: Floats, rate: Floats, near: float) -> float:
    """Rows by which demand misses the target.

    Where the price is least, slots may stay free. At prices near that as many rows are missing as would come for less.
    """
    over, under, least = 0.0, 0.0, np.inf
    for j in range(prices.shape[0]):
        least = min(least, prices[j])
    for j in range(prices.shape[0]):
        over += max(0.0, counts[j] - target[j])
        if least < prices[j] < np.inf:
            lacking, above = max(0.0, target[j] - counts[j]), prices[j] - least
            under += min(lacking, rate[j] * above) if above <= near else lacking
    return max(over, under)


@jit
def extrapolate(prices: Floats, earlier: Floats, factor: float) -> None:
    """Moves prices on by a multiple of their last change, and remembers where they were."""
    for j in range(prices.shape[0]):
        if prices[j] < np.inf:
            change = prices[j] - earlier[j]
            earlier[j] = prices[j]
            prices[j] += factor * change


@jit
def strayed(prices: Floats, begin: Floats, radius: Floats) -> bool:
    """Whether prices have moved too far for the lists, whatever is added to all of them."""
    least, most = np.inf, -np.inf
    for j in range(prices.shape[0]):
        if prices[j] < np.inf:
            moved = prices[j] - begin[j]
            least = min(least, moved + STRAY * radius[j])
            most = max(most, moved - STRAY * radius[j])
    return most > least


@jit
def descend(
    lists: Lists,
    fixed: Floats,
    target: Floats,
    free: float,
    prices: Floats,
    mu: float,
    goal: float,
    radius: Floats,
    deviation: Floats,
    z: Ints,
) -> tuple[int, float, Lists]:
    """Newton steps on contested rows with less and less smoothing, until counts are within `goal` rows of balance.

    Changes the prices, and the lists: rows that the smoothing no longer reaches take their best offers for certain.

    Args:
        lists: the contested rows, overwritten.
        fixed: [k] what settled rows and certain offers take; what is certain now is added.
        target: [k] what all rows and free slots are to take.
        free: the number of free slots.
        prices: [k].
        mu: the first width.
        goal: how many rows may be misplaced in the end.
        radius: [k], how far each price may move with the candidates that are listed.
        deviation: [k], by how much a price is uncertain because counts are: written here.
        z: [n, K] what rows take for certain, completed here.

    Returns:
        How it ended, the last mu, and what is left of the lists.
    """
    k = prices.shape[0]
    demand, pairs, counts, step = np.empty(k), np.empty((k, k)), np.empty(k), np.zeros(k)
    begin, path, last_mu, rate = prices.copy(), prices.copy(), np.inf, np.empty(k)
    wanted, status, tied, last = target.sum() - free, TIED, 0, np.inf
    limit, was_wrong = STEP, np.inf
    for _ in range(MOST_STEPS):
        copy_to(fixed, demand)
        pairs[:] = 0.0
        demand_of_lists(lists, prices, mu, demand, pairs)
        weigh_experts(pairs, mu, rate)
        if free > 0:
            demand_of_slots(free, prices, mu, demand, pairs)
        laplacian(pairs)
        wrong = 0.0
        for j in range(k):
            deviation[j] = np.sqrt(target[j]) / max(rate[j], (0.05 * np.sqrt(target[j]) + 1e-9) / mu)
            wrong += max(0.0, demand[j] - target[j])
        at_once = was_wrong == np.inf
        limit = limit / 2 if wrong >= was_wrong else limit
        was_wrong = wrong
        length = newton_step(prices, demand, target, pairs, mu, 2 * goal / k, limit, step)
        for j in range(k):
            prices[j] += step[j]
        if strayed(prices, begin, radius):
            status = LOST
            break
        unsettled = (length > STEP / 2 and wrong > 0.25 * goal) or wrong > 0.1 * wanted
        if unsettled and limit > LEAST_STEP:
            continue
        following = mu / 4 if at_once else mu / 2
        # Prices follow a smooth path as mu falls; at first there is one point of it, and the factor is 0.
        extrapolate(prices, path, (following - mu) / (mu - last_mu))
        last_mu = mu
        before = lists[3].shape[0]
        lists = narrow(lists, prices, REACH * following, fixed, counts, z)
        entries = lists[3].shape[0]
        excess = misplaced(counts, target, prices, rate, STEP * mu)
        tied = tied + 1 if excess > 0.9 * last and entries > 0.9 * before else 0
        last = excess
        if excess <= goal or entries == 0:
            status = REACHED
            break
        if tied == MOST_TIED:
            break
        mu, limit, was_wrong = following, STEP, np.inf
    return status, mu, lists
