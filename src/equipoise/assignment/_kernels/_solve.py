# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Solve and prove: what is left of a problem once its settled rows are known.

Newton steps on the contested rows leave few that a price could still move. Chains of moves run on those few first. If
that does not end in a proof, they run on all contested rows. If that does not either, the caller widens the radius.

Legend: n rows, k experts, K experts a row, m contested rows. `_records.py` has the types.
"""

import numpy as np

from equipoise._core._jit import jit
from equipoise.assignment._kernels._books import prove, settled_for_sure, take_held
from equipoise.assignment._kernels._contested import copy_to, less_least
from equipoise.assignment._kernels._flow import exact_flow
from equipoise.assignment._kernels._newton import LOST, descend
from equipoise.assignment._kernels._records import Counts, Flags, Floats, Ints, Lists, Problem, Scores, Settled

# How it ends: proved; chains find no room; settled rows have better offers; contested rows have. Or prices are lost.
PROVED, STUCK, BETTER, MISSED = LOST + 1, LOST + 2, LOST + 3, LOST + 4


@jit
def place(
    problem: Problem,
    contested: Ints,
    lists: Lists,
    room: Counts,
    leads: Scores,
    prices: Floats,
    inside: Flags,
    z: Ints,
) -> tuple[int, float, float, int]:
    """Chains of moves for the rows of a list, then the proof, which reads all `contested` rows.

    Returns:
        How it ended, the value, what rows miss, and the number of chains.
    """
    scores, _, capacity = problem[:3]
    held = np.empty(lists[3].shape[0], np.bool_)
    stuck, chains = exact_flow(lists, room, prices, held, inside)
    if stuck >= 0:
        return STUCK, 0.0, 0.0, chains
    if not settled_for_sure(leads, prices):
        return BETTER, 0.0, 0.0, chains
    take_held(lists, held, z)
    value, regret, proved = prove(scores, contested, capacity, prices, z)
    return PROVED if proved else MISSED, value, regret, chains


@jit
def solve_contested(
    problem: Problem, lists: Lists, settled: Settled, mu: float, prices: Floats, radius: Floats, z: Ints
) -> tuple[int, float, float, int, int]:
    """Places contested rows, and proves that the whole is optimal.

    Args:
        problem: all rows.
        lists: the contested ones.
        settled: what is known of the others.
        mu: the first width of Newton steps; 0: none are made.
        prices: [k], changed in place; without a proof, those at which to settle rows again.
        radius: [k], how far each price may move with the candidates that are listed.
        z: [n, K], completed here.

    Returns:
        How it ended, the value, what rows miss, the number of chains, and the rows that Newton steps left.
    """
    rows, need, first, cols, vals = lists
    certain, leads = settled
    target, free = problem[3:]
    slots, inside, before = target.astype(np.int64), np.empty(prices.shape[0], np.bool_), prices.copy()
    few, chains = rows.shape[0], 0
    if mu > 0:
        own = (rows.copy(), need.copy(), first.copy(), cols.copy(), vals.copy())
        fixed, deviation = certain.astype(np.float64), np.empty(prices.shape[0])
        goal = prices.shape[0] / 2
        status, _, own = descend(own, fixed, target, free, prices, mu, goal, radius, deviation, z)
        few = own[0].shape[0]
        less_least(prices)
        if status == LOST:
            return status, 0.0, 0.0, 0, few
        copy_to(prices, before)
        room = slots - fixed.astype(np.int64)
        status, value, regret, chains = place(problem, rows, own, room, leads, prices, inside, z)
        if status == PROVED:
            return PROVED, value, regret, chains, few
    copy_to(before, prices)
    status, value, regret, more = place(problem, rows, lists, slots - certain, leads, prices, inside, z)
    if status != PROVED:
        copy_to(before, prices)
    return status, value, regret, chains + more, few
