# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Groups of experts that share no rows: how far one must move against the others, which Newton's method cannot tell.

Where rows come in clusters, a cluster fills experts of its own, and at a small mu no row is tied between those and
others. Demand then says which group is overfull, but its slope is zero: the few rows that will have to leave are far
from indifferent. How far is no secret, though. Row i's best offers within each group, `best[i, g]`, are an assignment
problem with a few groups in place of many experts, and raising the price of a group until just its excess wants to
leave is a selection among the differences between a row's best offer within and the best one outside.

Legend: m rows, k experts, g groups. An expert whose price is +inf is closed and in no group (-1).
"""

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit
from equipoise.assignment._kernels._choices import Scores

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Experts are together in a group if the rows that they share weigh more than this: Newton's method can work with that.
SHARED = 0.5
# With more groups than this, moving one at a time would take too long, and a group is next to nothing.
MOST_GROUPS = 16


@jit
def group_experts(hessian: Floats, prices: Floats, resting: Flags) -> tuple[Ints, int]:
    """Numbers the groups; experts at rest (at price 0, with room) are all in group 0, if there are any."""
    k = prices.shape[0]
    labels, members = np.full(k, -1, np.int32), np.empty(k, np.int32)
    groups = 0
    for first in range(-1, k):
        count = 0
        for j in range(k):
            starts = resting[j] if first < 0 else j == first
            if starts and labels[j] < 0 and prices[j] < np.inf:
                labels[j] = groups
                members[count] = j
                count += 1
        seen = 0
        while seen < count:
            j = members[seen]
            seen += 1
            for t in range(k):
                if labels[t] < 0 and -hessian[j, t] > SHARED:
                    labels[t] = groups
                    members[count] = t
                    count += 1
        groups += count > 0
    return labels, groups


@jit
def best_of_groups(scores: Scores, mask: Flags, stride: int, prices: Floats, labels: Ints, groups: int) -> Scores:
    """Each sampled row's best offer within each group."""
    near_prices = prices.astype(scores.dtype)
    best = np.full(((scores.shape[0] + stride - 1) // stride, groups), -np.inf, scores.dtype)
    m = 0
    for i in range(0, scores.shape[0], stride):
        if mask[i]:
            for j in range(labels.shape[0]):
                if labels[j] >= 0:
                    best[m, labels[j]] = max(best[m, labels[j]], scores[i, j] - near_prices[j])
            m += 1
    return best[:m]


@jit
def leads(best: Scores, shift: Floats, group: int, gaps: Floats, load: Floats) -> int:
    """Counts each group's rows, and writes by how much a group leads the others in its rows, or lags in theirs.

    Returns:
        How many of the gaps are those of the group's own rows, which come first; the others' fill the array from its
        end.
    """
    rows, groups = best.shape
    load[:] = 0.0
    own = others = 0
    for i in range(rows):
        most, other, winner = -np.inf, -np.inf, -1
        for g in range(groups):
            offer = best[i, g] - shift[g]
            if offer > most:
                most, winner = offer, g
            if g != group:
                other = max(other, offer)
        if winner < 0:
            continue
        load[winner] += 1
        if group < 0:
            continue
        if winner == group:
            gaps[own] = most - other
            own += 1
        else:
            others += 1
            gaps[rows - others] = most - (best[i, group] - shift[group])
    return own


@jit
def shift_groups_apart(
    scores: Scores,
    mask: Flags,
    stride: int,
    target: Floats,
    slack: bool,
    prices: Floats,
    demand: Floats,
    hessian: Floats,
) -> bool:
    """Moves groups of experts that share no rows, one after the other, until each has about the rows that it can take.

    Returns:
        Whether there were any to move.
    """
    k = prices.shape[0]
    resting = np.empty(k, np.bool_)
    for j in range(k):
        resting[j] = slack and prices[j] == 0 and demand[j] < target[j]
    labels, groups = group_experts(hessian, prices, resting)
    if groups < 2 or groups > MOST_GROUPS:
        return False
    room, lowest = np.zeros(groups), np.full(groups, np.inf)
    for j in range(k):
        if labels[j] >= 0:
            room[labels[j]] += target[j]
            lowest[labels[j]] = min(lowest[labels[j]], prices[j])
    best = best_of_groups(scores, mask, stride, prices, labels, groups)
    rows = best.shape[0]
    shift, load, gaps = np.zeros(groups), np.zeros(groups), np.empty(rows)
    moved = False
    for _ in range(2 * groups):
        leads(best, shift, -1, gaps, load)
        group, most = -1, max(1.0, rows / 512)
        for g in range(groups):
            excess = load[g] - room[g]
            # Without slack, a group that lacks rows gets them as others are raised; with it, one may be too dear.
            misfit = excess if excess > 0 else (-excess if slack and lowest[g] + shift[g] > 0 else 0.0)
            if misfit > most:
                group, most = g, misfit
        if group < 0:
            break
        units = int(most)
        own = leads(best, shift, group, gaps, load)
        if load[group] > room[group]:
            distance = between(gaps[:own], units)
            change = distance
        else:
            distance = between(gaps[own:], units)
            change = -min(distance, lowest[group] + shift[group])
        if not distance < np.inf:
            break
        shift[group] += change
        moved = True
    for j in range(k):
        if labels[j] >= 0:
            prices[j] += shift[labels[j]]
    return moved


@jit
def between(gaps: Floats, units: int) -> float:
    """A distance at which as many of the gaps as asked for are closed, and no more."""
    if units >= gaps.shape[0]:
        return np.inf
    ordered = np.partition(gaps, units)
    last = -np.inf
    for a in range(units):
        last = max(last, ordered[a])
    return 0.5 * (last + ordered[units])
