# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Conditionally optimal values, App. D.3, one problem at a time: what `_conditional` computes with torch elsewhere."""

import numpy as np

from equipoise._core._jit import jit, jit_vector
from equipoise.assignment._kernels._contested import copy_to
from equipoise.assignment._kernels._records import Counts, Flags, Floats, Scores


@jit
def conditional_batch(
    scores: Scores, z: Counts, mask: Flags, value: Floats, detour: Floats, start: int, stop: int, out: Floats
) -> None:
    """Writes the best value given z_i = j for problems `start` to `stop`, from the detours of each."""
    for b in range(start, stop):
        _gather(scores[b], z[b], mask[b], value[b], detour[b].T.copy(), out[b])


@jit_vector
def _gather(scores: Scores, z: Counts, mask: Flags, value: float, mend: Floats, out: Floats) -> None:
    """v* + min(0, s_ij - s_iz - d*_jz): what is above 0 is rounding error."""
    n, k = scores.shape
    for i in range(n):
        if not mask[i]:
            out[i] = 0.0
            continue
        j = z[i]
        own = np.float64(scores[i, j])
        for to in range(k):
            out[i, to] = value + min(0.0, np.float64(scores[i, to]) - own - mend[j, to])


@jit
def detour_batch(scores: Scores, z: Counts, free: Counts, prices: Floats, start: int, stop: int, out: Floats) -> None:
    """Writes the cost of taking a slot at j and giving one back at j' for problems `start` to `stop`.

    `free` counts each expert's free slots. The shortest paths are searched over costs that prices reduce.
    """
    k = scores.shape[2]
    p = np.empty(k)
    for b in range(start, stop):
        cost = out[b]
        _move_cost(scores[b], z[b], free[b], cost)
        _relax(cost, prices[b], p)
        _reduce(cost, p)
        _shortest_paths(cost)
        for j in range(k):
            for to in range(k):
                cost[j, to] += p[j] - p[to]


@jit_vector
def _move_cost(scores: Scores, z: Counts, free: Counts, cost: Floats) -> None:
    """The least loss at which expert j can hand a row, or a free slot, to expert j': App. D.2, step 2."""
    n, k = scores.shape
    cost[:] = np.inf
    for i in range(n):
        j = z[i]
        if j < k:
            own = np.float64(scores[i, j])
            for to in range(k):
                cost[j, to] = min(cost[j, to], own - np.float64(scores[i, to]))
    for j in range(k):
        if free[j] > 0:
            for to in range(k):
                cost[j, to] = min(cost[j, to], 0.0)
        cost[j, j] = 0.0


@jit
def _relax(cost: Floats, start: Floats, p: Floats) -> None:
    """Lowers prices until no row prefers another expert, p_j <= d_jj' + p_j', by at most k relaxations."""
    k = cost.shape[0]
    copy_to(start, p)
    before = np.empty(k)
    for _ in range(k):
        copy_to(p, before)
        changed = False
        for j in range(k):
            least = np.inf
            for to in range(k):
                least = min(least, cost[j, to] + before[to])
            changed = changed or least != before[j]
            p[j] = least
        if not changed:
            break


@jit
def _reduce(cost: Floats, p: Floats) -> None:
    """Subtracts the prices, which leaves costs >= 0 but for rounding; what is below 0 is set to 0."""
    for j in range(cost.shape[0]):
        for to in range(cost.shape[0]):
            cost[j, to] = max(0.0, cost[j, to] - p[j] + p[to])


@jit
def _shortest_paths(cost: Floats) -> None:
    """Floyd-Warshall in place."""
    k = cost.shape[0]
    for via in range(k):
        for j in range(k):
            if cost[j, via] < np.inf:
                _shorten(cost[j], cost[via], cost[j, via])


@jit_vector
def _shorten(row: Floats, onward: Floats, reach: float) -> None:
    for j in range(row.shape[0]):
        row[j] = min(row[j], reach + onward[j])
