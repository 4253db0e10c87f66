# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Small problems, many at a time: every expert is a candidate of every row, and chains do the rest."""

import numpy as np

from equipoise._core._jit import jit
from equipoise.assignment._kernels._books import prove, take_held
from equipoise.assignment._kernels._contested import all_candidates
from equipoise.assignment._kernels._flow import exact_flow
from equipoise.assignment._kernels._pair import solve_pair
from equipoise.assignment._kernels._records import Counts, Flags, Floats, Ints, Scores


@jit
def solve_small(
    scores: Scores,
    mask: Flags,
    capacity: Counts,
    start: int,
    stop: int,
    prices: Floats,
    z: Ints,
    value: Floats,
    gap: Floats,
    status: Ints,
) -> None:
    """Solves problems `start` to `stop` of a batch.

    `status` is -1 for a solved problem, i for a problem whose row i is illegal, and n + j for one whose expert j stays
    overfull.
    """
    n, k = scores.shape[1:]
    top_k = z.shape[2]
    held, inside = np.empty(n * k, np.bool_), np.empty(k, np.bool_)
    for b in range(start, stop):
        if k == 2 and top_k == 1 and solve_pair(scores[b], mask[b], capacity[b], prices[b], z[b, :, 0], value, gap, b):
            status[b] = -1
            continue
        z[b] = -1
        lists, status[b] = all_candidates(scores[b], mask[b], capacity[b], top_k)
        if status[b] >= 0:
            continue
        for attempt in range(2):
            for j in range(k):
                prices[b, j] = np.inf if capacity[b, j] == 0 else prices[b, j]
            stuck, _ = exact_flow(lists, capacity[b], prices[b], held, inside)
            take_held(lists, held, z[b])
            if stuck >= 0:
                status[b] = n + stuck
                break
            value[b], gap[b], proved = prove(scores[b], lists[0], capacity[b], prices[b], z[b])
            if attempt > 0 or proved:
                break
            prices[b] = 0.0  # a start so far off that rounding swallowed the scores: once more without it
