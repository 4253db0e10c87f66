# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Place rows by chains of moves, and prove it; small problems, many at a time, need nothing else.

Legend: n rows, k experts, K experts a row. `_records.py` has the types.
"""

import numpy as np

from equipoise._core._jit import jit
from equipoise.assignment._kernels._books import prove, settled_for_sure, take_held
from equipoise.assignment._kernels._contested import all_candidates
from equipoise.assignment._kernels._flow import exact_flow
from equipoise.assignment._kernels._pair import solve_pair
from equipoise.assignment._kernels._records import Counts, Flags, Floats, Ints, Lists, Scores

# How it ends besides at an expert that stays overfull: with a proof; or some row has a better offer.
PROVED, BETTER = -1, -2


@jit
def place(
    scores: Scores, capacity: Counts, rows: Ints, lists: Lists, room: Counts, leads: Scores, prices: Floats, z: Ints
) -> tuple[int, int, float, float]:
    """Chains of moves for the rows of a list, then the proof.

    Args:
        scores: [n, k].
        capacity: [k].
        rows: those that the proof reads: all that are not settled.
        lists: those that chains may move.
        room: [k], the slots that the others leave.
        leads: [k, k], of the settled rows.
        prices: [k], changed in place.
        z: [n, K], completed here.

    Returns:
        How it ended, the number of chains, the value, and what rows miss.
    """
    held = np.empty(lists[3].shape[0], np.bool_)
    stuck, chains = exact_flow(lists, room, prices, held)
    take_held(lists, held, z)
    if stuck >= 0 or not settled_for_sure(leads, prices):
        return stuck if stuck >= 0 else BETTER, chains, 0.0, 0.0
    value, regret, proved = prove(scores, rows, capacity, prices, z)
    return PROVED if proved else BETTER, chains, value, regret


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
    """Solves problems `start` to `stop` of a batch, with every expert a candidate of every row.

    `status` is -1 for a solved problem, i for a problem whose row i is illegal, and n + j for one whose expert j stays
    overfull.
    """
    n, k = scores.shape[1:]
    top_k, leads = z.shape[2], np.full((k, k), np.inf, scores.dtype)
    for b in range(start, stop):
        if k == 2 and top_k == 1 and solve_pair(scores[b], mask[b], capacity[b], prices[b], z[b, :, 0], value, gap, b):
            status[b] = -1
            continue
        z[b] = -1
        lists, status[b] = all_candidates(scores[b], mask[b], capacity[b], top_k)
        if status[b] >= 0:
            continue
        attempts = 0
        while True:
            for j in range(k):
                prices[b, j] = np.inf if capacity[b, j] == 0 else prices[b, j]
            ended, _, value[b], gap[b] = place(
                scores[b], capacity[b], lists[0], lists, capacity[b], leads, prices[b], z[b]
            )
            attempts += 1
            if ended != BETTER or attempts == 2:
                break
            prices[b] = 0.0  # a start so far off that rounding swallowed the scores: once more without it
        if ended >= 0:
            status[b] = n + ended
