# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Solve and prove: what is left of a problem once its settled rows are known.

Newton steps on the contested rows leave few that a price could still move. Chains of moves run on those few first. If
that does not end in a proof, they run on all contested rows. If that does not either, the radius is widened.

Legend: n rows, k experts, K experts a row, m contested rows as in `_contested.py`.
"""

import numpy as np

from equipoise._core._jit import jit
from equipoise.assignment._kernels._books import list_better, open_doors, prove, settled_for_sure, take_held
from equipoise.assignment._kernels._contested import Counts, Flags, Floats, Ints, Scores, copy_to, less_least
from equipoise.assignment._kernels._flow import exact_flow
from equipoise.assignment._kernels._newton import LOST, REACHED, descend

# How it ends: proved; chains find no room; settled rows have better offers; contested rows have. Or prices are lost.
PROVED, STUCK, BETTER, MISSED = LOST + 1, LOST + 2, LOST + 3, LOST + 4
# So much wider is the radius where prices are lost. With 4, clusters of nearly equal rows take 1.4 times as long.
WIDER = 8


@jit
def place(
    scores: Scores,
    contested: Ints,
    rows: Ints,
    need: Ints,
    first: Counts,
    cols: Ints,
    vals: Scores,
    room: Counts,
    leads: Scores,
    capacity: Counts,
    prices: Floats,
    inside: Flags,
    z: Ints,
) -> tuple[int, float, float, int]:
    """Chains of moves for the rows of a list, then the proof, which reads all `contested` rows.

    Returns:
        How it ended, the value, what rows miss, and the number of chains.
    """
    held = np.empty(first[need.shape[0]], np.bool_)
    stuck, chains = exact_flow(need, first, cols, vals, room, prices, held, inside)
    if stuck >= 0:
        return STUCK, 0.0, 0.0, chains
    if not settled_for_sure(leads, prices):
        return BETTER, 0.0, 0.0, chains
    take_held(rows, need, first, cols, held, z)
    value, regret, proved = prove(scores, contested, capacity, prices, z)
    return PROVED if proved else MISSED, value, regret, chains


@jit
def solve_contested(
    scores: Scores,
    rows: Ints,
    need: Ints,
    first: Counts,
    cols: Ints,
    vals: Scores,
    settled: Counts,
    leads: Scores,
    capacity: Counts,
    slots: Counts,
    free: float,
    mu: float,
    prices: Floats,
    radius: Floats,
    z: Ints,
) -> tuple[int, float, float, int, int]:
    """Places contested rows, and proves that the whole is optimal.

    Args:
        scores: [n, k].
        rows: [m], the contested rows.
        need: [m].
        first: [m + 1].
        cols: [entries].
        vals: [entries].
        settled: [k] what settled rows and certain offers take.
        leads: [k, k] the least `s_ij - s_it` over settled rows that hold j and not t.
        capacity: [k].
        slots: [k] the capacity, as far as there are rows.
        free: the number of free slots.
        mu: the first width of Newton steps; 0: none are made.
        prices: [k], changed in place; without a proof, those at which to settle rows again.
        radius: [k], widened where there is no proof.
        z: [n, K], completed here.

    Returns:
        How it ended, the value, what rows miss, the number of chains, and the rows that Newton steps left.
    """
    k, few, chains = prices.shape[0], rows.shape[0], 0
    status, value, regret = REACHED, 0.0, 0.0
    inside, before = np.empty(k, np.bool_), prices.copy()
    if mu > 0:
        own_rows, own_need, own_first = rows.copy(), need.copy(), first.copy()
        own_cols, own_vals = cols.copy(), vals.copy()
        target, fixed, deviation = slots.astype(np.float64), settled.astype(np.float64), np.empty(k)
        status, _, few = descend(
            own_rows,
            own_need,
            own_first,
            own_cols,
            own_vals,
            fixed,
            target,
            free,
            prices,
            mu,
            k / 2,
            radius,
            deviation,
            z,
        )
        less_least(prices)
        if status == LOST:
            radius *= WIDER
            return status, 0.0, 0.0, 0, few
        copy_to(prices, before)
        status, value, regret, chains = place(
            scores,
            rows,
            own_rows[:few],
            own_need[:few],
            own_first[: few + 1],
            own_cols,
            own_vals,
            slots - fixed.astype(np.int64),
            leads,
            capacity,
            prices,
            inside,
            z,
        )
        if status == PROVED:
            return PROVED, value, regret, chains, few
    copy_to(before, prices)
    room = slots - settled
    status, value, regret, more = place(
        scores, rows, rows, need, first, cols, vals, room, leads, capacity, prices, inside, z
    )
    chains += more
    if status == STUCK:  # rows that are shut in with an overfull expert need a way out
        open_doors(leads, before, inside, radius)
    elif status == BETTER:
        list_better(leads, before, prices, radius)
    elif status == MISSED:
        radius *= 2
    if status != PROVED:
        copy_to(before, prices)
    return status, value, regret, chains, few
