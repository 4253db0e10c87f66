# SPDX-License-Identifier: Apache-2.0
"""The primal-dual solver, part by part: prices from few rows, prices from all rows, exact flow."""

import numpy as np
from numpy.typing import NDArray

from equipoise.assignment._kernels._choices import (
    Choices,
    Scores,
    all_choices,
    best_counts,
    collect,
    first,
    narrow,
    room_for_choices,
)
from equipoise.assignment._kernels._flow import balance, expert_at, new_flow, seat_rows, settle_vacancies
from equipoise.assignment._kernels._jit import jit
from equipoise.assignment._kernels._pricing import finite_prices, price_rows
from equipoise.assignment._kernels._smoothing import (
    dense_demand,
    gap_quantile,
    laplacian,
    mean_spread,
    newton_step,
    rest_prices,
    sinkhorn_step,
    soft_demand,
)

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]

# The first sample has this many rows for each expert, every later one is this many times as large.
COARSE_ROWS_PER_EXPERT = 8
LEVEL_RATIO = 8


@jit
def radius_for(scores: Scores, mask: Flags, prices: Floats, stride: int) -> float:
    """How far below its best offer a row's candidates may lie, at prices from a sample an eighth of the size.

    With m rows, counts are known to about sqrt(m/k), so prices to about sqrt(k/m) divided by the density of near-ties;
    measured in rows instead of prices that is a fraction of about sqrt(k/m). So the radius is a quantile of the gap
    between a row's two best offers, which makes it right for scores of any scale.
    """
    n, k = scores.shape
    rows = max(1, n // stride)
    fraction = min(0.6, 3 * np.sqrt(k * LEVEL_RATIO / rows))
    return gap_quantile(scores, mask, max(stride, n // 256), prices, fraction)


@jit
def coarse_prices(scores: Scores, mask: Flags, target: Floats, slack: bool, prices: Floats, z: Ints) -> None:
    """Prices from samples of the rows, each larger than the one before, all smaller than the whole."""
    n, k = scores.shape
    stride = max(1, n // (COARSE_ROWS_PER_EXPERT * k))
    mu = mean_spread(scores, mask, max(stride, n // 64), prices) / 2
    if not mu > 0:
        return
    for _ in range(2):
        for _ in range(2):
            demand = dense_demand(scores, mask, stride, prices, mu)
            share = 1.0 / stride if slack else demand.sum() / target.sum()
            sinkhorn_step(prices, demand, target * share, mu, slack)
        mu /= 3
    stride //= LEVEL_RATIO
    while stride > 1:
        radius = radius_for(scores, mask, prices, stride)
        choices, settled = room_for_choices(scores, n // stride + 1), np.zeros(k)
        m, _ = collect(scores, mask, prices, radius, 0, n, stride, choices, 0, settled, z)
        newton(first(choices, m), settled, target, slack, stride, radius / 8, 3, prices)
        stride //= LEVEL_RATIO


@jit
def newton(
    choices: Choices, settled: Floats, target: Floats, slack: bool, stride: int, mu: float, steps: int, prices: Floats
) -> None:
    """Newton steps at one smoothing width, until they are small against it."""
    k = prices.shape[0]
    for _ in range(steps):
        demand = settled.copy()
        hessian = np.zeros((k, k))
        soft_demand(choices, prices, mu, demand, hessian)
        laplacian(hessian)
        share = 1.0 / stride if slack else demand.sum() / target.sum()
        if newton_step(prices, demand, target * share, hessian, mu, 4 * mu, slack) < mu / 4:
            break


@jit
def refine(
    choices: Choices, settled: Floats, target: Floats, slack: bool, radius: float, prices: Floats, z: Ints
) -> Choices:
    """Newton steps on all rows, with less and less smoothing, as long as that brings the counts nearer to balance.

    Rows that the smoothing no longer reaches are settled on the way, so that each stage costs less than the one before.
    """
    k = prices.shape[0]
    mu = radius / 8
    kept = prices.copy()
    least = np.inf
    while mu > 0:
        newton(choices, settled, target, slack, 1, mu, 2, prices)
        excess = np.maximum(best_counts(choices, prices, settled) - target, 0.0).sum()
        if excess < least:
            kept[:] = prices
        if excess <= k // 4 or excess > 0.7 * least:
            break
        least = excess
        choices = narrow(choices, prices, 8 * mu, settled, z)
        mu /= 4
    prices[:] = kept
    return choices


@jit
def exact_flow(choices: Choices, settled: Floats, capacity: Counts, prices: Floats, z: Ints) -> int:
    """Every row to its best offer, then chains of moves until no expert is overfull.

    Returns:
        -1 if all is well; else an expert that stays overfull because its rows can go nowhere else.
    """
    m, k = choices.rows.shape[0], prices.shape[0]
    flow = new_flow(m, k)
    seat_rows(flow, choices, capacity, prices, settled)
    settle_vacancies(flow, capacity, prices, capacity.sum() - flow.load.sum())
    _, stuck = balance(flow, choices, capacity, prices)
    for a in range(m):
        z[choices.rows[a]] = expert_at(choices, a, flow.at[a]) if flow.at[a] >= 0 else -1
    return stuck


@jit
def reinstate(
    scores: Scores, mask: Flags, prices: Floats, radius: float, wrong: Ints, choices: Choices, settled: Floats, z: Ints
) -> Choices:
    """Gives the rows that found a better offer elsewhere their choice back."""
    is_wrong = np.zeros(scores.shape[0], np.bool_)
    for i in wrong:
        is_wrong[i] = True
        settled[z[i]] -= 1
    more = room_for_choices(scores, choices.rows.shape[0] + wrong.shape[0])
    m = 0
    for a in range(choices.rows.shape[0]):
        i = choices.rows[a]
        if is_wrong[i]:
            settled[z[i]] += 1  # it had a choice before, so it was never settled
        else:
            more.rows[m] = i
            more.cols[m], more.vals[m], more.width[m] = choices.cols[a], choices.vals[a], choices.width[a]
            m += 1
    for i in wrong:
        m += collect(scores, mask, prices, radius, i, i + 1, 1, more, m, settled, z)[0]
    return first(more, m)


@jit
def solve_direct(
    scores: Scores, mask: Flags, capacity: Counts, start: int, stop: int, prices: Floats, z: Ints, value: Floats,
    gap: Floats, status: Ints,
) -> None:
    """Solves problems `start` to `stop` of a batch without detours, every expert a candidate of every row.

    `status` is -1 for a solved problem, i for a problem whose row i is illegal, and n + j for one whose expert j stays
    overfull.
    """
    n = scores.shape[1]
    wrong = np.empty(n, np.int32)
    for b in range(start, stop):
        status[b] = illegal_row(scores[b], mask[b], capacity[b])
        if status[b] >= 0:
            continue
        close_experts(capacity[b], prices[b])
        choices = all_choices(scores[b], mask[b])
        stuck = exact_flow(choices, np.zeros(scores.shape[2]), capacity[b], prices[b], z[b])
        if stuck >= 0:
            status[b] = n + stuck
            continue
        rest_prices(prices[b], False)
        finite_prices(scores[b], z[b], prices[b])
        value[b], gap[b], _, _ = price_rows(scores[b], z[b], prices[b], 0, n, wrong)


@jit
def close_experts(capacity: Counts, prices: Floats) -> None:
    """An expert that may take no row has an infinite price."""
    for j in range(capacity.shape[0]):
        if capacity[j] == 0:
            prices[j] = np.inf


@jit
def illegal_row(scores: Scores, mask: Flags, capacity: Counts) -> int:
    """The first row that holds a NaN or +inf or has no expert to go to; -1 if there is none."""
    for i in range(scores.shape[0]):
        legal, possible = True, False
        for j in range(scores.shape[1]):
            legal = legal and scores[i, j] < np.inf
            possible = possible or (scores[i, j] > -np.inf and capacity[j] > 0)
        if mask[i] and not (legal and possible):
            return i
    return -1
