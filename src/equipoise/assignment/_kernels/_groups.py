# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Groups of experts that share no rows: how far one must move against the others, which Newton's method cannot tell.

Where rows come in clusters, a cluster fills experts of its own, and at a small mu no row is tied between those and
others. Demand then says which group is overfull, but its slope is zero: the few rows that will have to leave are far
from indifferent. How far is no secret, though. Row i's best offers within each group are an assignment problem of their
own, with a few groups in place of many experts. It is solved exactly: from a sample of the rows while mu is large, and
from all of them where nothing but the groups keeps counts from balance.

Legend: m rows, k experts, g groups. An expert whose price is +inf is closed and in no group (-1).
"""

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit
from equipoise.assignment._kernels._choices import Scores, all_choices
from equipoise.assignment._kernels._collect import best_offer
from equipoise.assignment._kernels._flow import exact_flow
from equipoise.assignment._kernels._smoothing import rest_prices

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Experts are together in a group if the rows that they share weigh more than this: Newton's method can work with that.
SHARED = 0.5
# With more groups than this, a group is next to nothing.
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
def best_of_groups(
    scores: Scores, mask: Flags, stride: int, prices: Floats, labels: Ints, group_prices: Floats
) -> Scores:
    """What each group is worth to each sampled row, so that it offers as much at its price as its best expert does."""
    groups, kind = group_prices.shape[0], scores.dtype
    # One line of prices for each group, in which all others are closed: reading a row as often is quicker than sorting
    # its entries.
    lines = np.full((groups, prices.shape[0]), np.inf, kind)
    for j in range(prices.shape[0]):
        if labels[j] >= 0:
            lines[labels[j], j] = prices[j] - group_prices[labels[j]]
    best = np.empty(((scores.shape[0] + stride - 1) // stride, groups), kind)
    m = 0
    for i in range(0, scores.shape[0], stride):
        if mask[i]:
            for g in range(groups):
                best[m, g] = best_offer(scores[i], lines[g])
            m += 1
    return best[:m]


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
    """Moves groups of experts that share no rows, each as a whole, so that each has about the rows that it can take.

    How far, every `stride`-th row says.

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
            room[labels[j]] += target[j] / stride
            lowest[labels[j]] = min(lowest[labels[j]], prices[j])
    best = best_of_groups(scores, mask, stride, prices, labels, lowest)
    capacity, group_prices = np.ceil(room).astype(np.int64), lowest.copy()
    if capacity.sum() < best.shape[0]:
        return False
    choices, z = all_choices(best, np.ones(best.shape[0], np.bool_)), np.empty(best.shape[0], np.int32)
    if exact_flow(choices, np.zeros(groups), capacity, group_prices, z, 0.0, 0, np.empty(groups)) >= 0:
        return False
    group_prices -= group_prices.min()
    moved = False
    for j in range(k):
        if labels[j] >= 0:
            change = group_prices[labels[j]] - lowest[labels[j]]
            moved = moved or change != 0
            prices[j] += change
    rest_prices(prices, slack)
    return moved
