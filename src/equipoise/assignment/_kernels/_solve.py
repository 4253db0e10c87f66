# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""The primal-dual solver, part by part: prices from few rows, prices from all rows, exact flow."""

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit
from equipoise.assignment._kernels._amend import open_doors, reinstate
from equipoise.assignment._kernels._choices import (
    Choices,
    Scores,
    all_choices,
    count_spread,
    crowded,
    first,
    narrow,
    room_for_choices,
)
from equipoise.assignment._kernels._collect import Listing, all_listed, collect, enlist, new_listing
from equipoise.assignment._kernels._descent import approach, follow
from equipoise.assignment._kernels._flow import exact_flow
from equipoise.assignment._kernels._groups import shift_groups_apart
from equipoise.assignment._kernels._pair import solve_pair
from equipoise.assignment._kernels._pricing import final_prices, finite_prices, price_rows
from equipoise.assignment._kernels._samples import (
    agrees,
    coarse_stride,
    equal_prices,
    error_variance,
    forget_near,
    next_stride,
    sampling_radius,
)
from equipoise.assignment._kernels._smoothing import (
    furthest_apart,
    imbalance,
    laplacian,
    linear_part,
    mean_spread,
    newton_step,
    soft_demand,
    step_back,
)

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]

# Below this fraction of the spread of offers, differences are rounding in float32.
LEAST_MU = 1e-5
# How a refinement can fail: demand could not be met; or prices moved so far that other candidates count.
LOST, DRIFTED = -1.0, -2.0
# Newton steps of a refinement, and those of them at one mu, at most.
MOST_STEPS, MOST_STAYS = 24, 4
# A first mu, and in units of mu: how far experts that share rows move apart in a step, how far ahead an offer is safe.
FIRST_MU = 1 / 6
STEP = 4.0
SETTLED = 8.0
# Rows with a choice for each that has to move.
ROWS_TO_CHOOSE = 48
# What an earlier draw's prices add to the variance of the error, in units of what all rows leave unknown. Their noise
# has a variance of 1, but where lists reach less far, the few rows that lack a candidate get it back at little cost.
EARLIER_NOISE = 0.75
# Prices that moved apart by so many radii have left their candidates behind; how often others are collected, at most.
DRIFT = 1.5
MOST_DRIFTS = 4
# How often rows get choices that they turn out to need (`_amend.py`).
MOST_ROUNDS = 16
# A gap of this much of the value, or of the largest score assigned, is rounding. Ten times stricter than promised.
ENOUGH = 1e-10


@jit
def coarse_prices(
    scores: Scores, mask: Flags, target: Floats, slack: bool, warm: bool, prices: Floats, z: Ints
) -> tuple[float, float]:
    """Prices from samples of the rows, each larger than the one before, all smaller than the whole.

    A sample in which prices are right but for chance has nothing to teach: its own would only be further off. Prices of
    a warm start that it does not agree with are forgotten.

    Returns:
        The radius for candidates of all rows, and 0; or where the first sample is not enough for lists of candidates, 0
        and the mu down to which it could be followed.
    """
    n, k = scores.shape
    stride = coarse_stride(n, k)
    spread = mu = 0.0
    noise = EARLIER_NOISE if warm else 0.0
    found = not agrees(scores, mask, stride, target, slack, prices, warm)
    if found and warm:
        noise = 0.0
        equal_prices(prices)
        found = not agrees(scores, mask, stride, target, slack, prices, False)
    if found:
        mu, spread = first_prices(scores, mask, target, slack, prices)
        if not spread > 0:
            return 0.0, 0.0
    finer = next_stride(n, k, stride, found)
    variance = error_variance(stride // finer, found) + noise / finer
    radius = sampling_radius(scores, mask, prices, stride, finer, variance)
    # Rows choose by gaps that the sample's prices are too coarse for; or the sample is tied down to a small mu.
    if found and (radius < 0.75 * mu or mu < spread / 512):
        return 0.0, mu
    while finer > 1:
        stride = finer
        found = not agrees(scores, mask, stride, target, slack, prices, noise > 0)
        if found:
            noise = 0.0
            choices, settled, before = room_for_choices(scores, n // stride + 1), np.zeros(k), prices.copy()
            goal = 0.25 * np.sqrt(k * (n / stride))  # counts of a sample are not known better than this
            listing = new_listing(scores, prices, radius)
            m, _ = collect(scores, mask, listing, 0, n, stride, choices, 0, settled, z)
            _, excess, _ = refine(
                first(choices, m), settled, target, slack, stride, radius, FIRST_MU * radius, goal, prices, z
            )
            if excess == LOST:
                prices[:] = before
        finer = next_stride(n, k, stride, found)
        variance = error_variance(stride // finer, found) + noise / finer
        radius = sampling_radius(scores, mask, prices, stride, finer, variance)
    return radius, 0.0


@jit
def first_prices(scores: Scores, mask: Flags, target: Floats, slack: bool, prices: Floats) -> tuple[float, float]:
    """Prices from the first sample, starting where they are: the mu down to which it led, and how far offers spread."""
    n, k = scores.shape
    spread = mean_spread(scores, mask, max(1, n // 64), prices)
    if not spread > 0:
        return 0.0, 0.0
    stride, mu = coarse_stride(n, k), spread / 4
    if not slack:
        approach(scores, mask, stride, target, prices, mu)
    return follow(scores, mask, stride, target, slack, prices, mu, LEAST_MU * spread), spread


@jit
def near_balance(excess: float, n: int, k: int) -> bool:
    """Whether so few rows are left to move (and prices were not lost) that chains can do it."""
    return 0 <= excess <= n / 64 + k


@jit
def refine(
    choices: Choices,
    settled: Floats,
    target: Floats,
    slack: bool,
    stride: int,
    radius: float,
    mu: float,
    goal: float,
    prices: Floats,
    z: Ints,
) -> tuple[Choices, float, float]:
    """Newton steps on every `stride`-th row with less and less smoothing, until counts are within `goal` of balance.

    The smoothing is reduced after every step, unless that was much too short: prices that lag behind could not catch up
    with shorter steps, unless it is experts that share next to no rows. Rows that the smoothing no longer reaches are
    settled on the way, so that each step costs less than the one before.

    Returns:
        The rows that still have a choice; how many rows would have to move, or LOST or DRIFTED; and the last mu.
    """
    k = prices.shape[0]
    rows = settled.sum() + choices.rows.shape[0]
    target = target * (1.0 / stride if slack else rows / target.sum())
    before, last, counts, lowest = prices.copy(), prices.copy(), np.empty(k), np.empty(k)
    least, length, stays = np.inf, np.inf, 0
    for _ in range(MOST_STEPS):
        demand, hessian = settled.copy(), np.zeros((k, k))
        dual = soft_demand(choices, prices, mu, demand, hessian)
        dual += linear_part(prices, target) - linear_part(prices, settled)
        if dual > least and length > mu / 2:
            step_back(prices, last)
            continue
        least = dual
        last[:] = prices
        laplacian(hessian)
        length = newton_step(prices, demand, target, hessian, mu, STEP * mu, slack)
        if furthest_apart(hessian, prices - before) > DRIFT * radius:
            return choices, DRIFTED, mu
        stays += 1
        if length > 2 * STEP * mu and stays < MOST_STAYS:
            continue
        stays = 0
        if SETTLED * mu < radius:
            choices = narrow(choices, prices, SETTLED * mu, settled, z, counts)
            # A price that the next step may take to 0 need not be the right one.
            for j in range(k):
                lowest[j] = max(prices[j] - STEP * mu, 0.0)
            excess = imbalance(counts, target, lowest, slack)
            # Chains need rows to choose from, of which narrowing must not leave too few.
            if excess <= goal or choices.rows.shape[0] < ROWS_TO_CHOOSE * excess or mu < radius / 8192:
                if not near_balance(excess, rows, k) and not crowded(choices):
                    # It may be that rows are tied, and only counted in one place.
                    resting = (lowest == 0) & slack
                    count_spread(choices, prices, SETTLED * mu, settled, target, resting, counts)
                    excess = min(excess, imbalance(counts, target, lowest, slack))
                # Chains would set it right too, but less quickly than other candidates do.
                if excess > 2 * goal and furthest_apart(hessian, prices - before) > radius:
                    return choices, DRIFTED, mu
                return choices, excess, mu
        mu /= 4
        least = np.inf  # another function from here on: of less smoothing, and without the rows that were settled
    return choices, LOST, mu


@jit
def shift_listed_groups(
    scores: Scores,
    mask: Flags,
    choices: Choices,
    settled: Floats,
    target: Floats,
    slack: bool,
    mu: float,
    prices: Floats,
) -> bool:
    """Moves groups of experts that no row with a choice connects (`_groups.py`); returns whether there were any."""
    k = prices.shape[0]
    demand, hessian = settled.copy(), np.zeros((k, k))
    soft_demand(choices, prices, mu, demand, hessian)
    laplacian(hessian)
    return shift_groups_apart(scores, mask, 1, target, slack, prices, demand, hessian)


@jit
def goal_of(k: int) -> float:
    """So few rows to move that chains of moves take less time than another step."""
    return k / 2


@jit
def solve_usual(
    scores: Scores, mask: Flags, capacity: Counts, warm: bool, prices: Floats, z: Ints
) -> tuple[bool, float, float, float, bool]:
    """The usual case from beginning to end, for problems so small that calls from Python would take a third of it.

    Returns:
        Whether it is solved; its value and the sum of regrets; mu, where a sample was not enough, else 0; and whether
        it began with the prices of a warm start.
    """
    n, k = scores.shape
    target = capacity.astype(np.float64)
    slack, radius = prepare(scores, mask, capacity, target, warm, prices)
    kept = warm and radius < 0
    if radius < 0:
        radius, mu = coarse_prices(scores, mask, target, slack, warm, prices, z)
        if mu > 0:
            return False, 0.0, 0.0, mu, kept
    room, settled = room_for_choices(scores, n), np.empty(k)
    for _ in range(MOST_DRIFTS):  # more than once if prices move so far that other candidates count
        settled[:] = 0.0
        listing = new_listing(scores, prices, radius)
        m, illegal = collect(scores, mask, listing, 0, n, 1, room, 0, settled, z)
        if illegal >= 0:
            break
        choices, excess = first(room, m), 0.0
        if radius > 0:
            choices, excess, _ = refine(
                choices, settled, target, slack, 1, radius, FIRST_MU * radius, goal_of(k), prices, z
            )
        if excess == DRIFTED:
            continue
        if not near_balance(excess, n, k):
            break
        solved, value, regret = finish_usual(scores, mask, capacity, listing, choices, settled, prices, z)
        if solved:
            return True, value, regret, 0.0, kept
        if not far_apart(prices, listing.prices, radius):
            break
    return False, 0.0, 0.0, 0.0, kept


@jit
def finish_usual(
    scores: Scores,
    mask: Flags,
    capacity: Counts,
    listing: Listing,
    choices: Choices,
    settled: Floats,
    prices: Floats,
    z: Ints,
) -> tuple[bool, float, float]:
    """Exact flow on the choices until no row has a better offer elsewhere.

    Returns:
        Whether that was reached, or too many rows wanted what is not among their choices; the value, and the sum of
        regrets.
    """
    n, k = scores.shape
    distance, wrong, seated = np.empty(k), np.empty(n, np.int32), 0
    for _ in range(MOST_ROUNDS):
        if exact_flow(choices, settled, capacity, prices, z, 0.0, seated, distance) >= 0:
            choices, opened = open_doors(scores, capacity, prices, distance, choices, settled, z)
            if opened == 0:
                break
            seated = choices.rows.shape[0]
            enlist(listing, choices.rows)
            continue
        final_prices(z, capacity, prices)
        value, regret, largest, count = price_rows(scores, z, prices, listing, 0, n, wrong)
        if regret <= ENOUGH * max(abs(value), largest):
            finite_prices(scores, z, prices)
            return True, value, regret
        if count > n // 32:
            break
        choices, seated = reinstate(scores, mask, prices, 2 * listing.radius, wrong[:count], choices, settled, z)
        enlist(listing, wrong[:count])
    return False, 0.0, 0.0


@jit
def far_apart(prices: Floats, before: Scores, radius: float) -> bool:
    """Whether two experts' prices moved apart by more than a radius."""
    least, most = np.inf, -np.inf
    for j in range(prices.shape[0]):
        change = prices[j] - before[j]
        if abs(change) < np.inf:  # not for a closed expert, whose price is inf and change NaN
            least, most = min(least, change), max(most, change)
    return most - least > radius


@jit
def solve_direct(
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
    """Solves problems `start` to `stop` of a batch without detours, every expert a candidate of every row.

    `status` is -1 for a solved problem, i for a problem whose row i is illegal, and n + j for one whose expert j stays
    overfull.
    """
    n, k = scores.shape[1:]
    wrong, distance, listing = np.empty(n, np.int32), np.empty(k), all_listed(scores[0])
    for b in range(start, stop):
        status[b] = -1
        if k == 2 and solve_pair(scores[b], mask[b], capacity[b], prices[b], z[b], value, gap, b):
            continue
        status[b] = illegal_row(scores[b], mask[b], capacity[b])
        if status[b] >= 0:
            continue
        for attempt in range(2):
            close_experts(capacity[b], prices[b])
            choices = all_choices(scores[b], mask[b])
            stuck = exact_flow(choices, np.zeros(k), capacity[b], prices[b], z[b], 0.0, 0, distance)
            if stuck >= 0:
                status[b] = n + stuck
                break
            final_prices(z[b], capacity[b], prices[b])
            finite_prices(scores[b], z[b], prices[b])
            value[b], gap[b], largest, _ = price_rows(scores[b], z[b], prices[b], listing, 0, n, wrong)
            if attempt > 0 or gap[b] <= ENOUGH * max(abs(value[b]), largest):
                break
            prices[b] = 0.0  # a start so far off that rounding swallowed the scores: once more without it


@jit
def can_start(capacity: Counts, mask: Flags, masked: bool, prices: Floats) -> bool:
    """Whether capacities hold the rows of every problem and prices are finite; `masked`: whether the mask says more."""
    for b in range(capacity.shape[0]):
        rows = mask[b].sum() if masked else mask.shape[1]
        for j in range(capacity.shape[1]):
            if capacity[b, j] < 0 or not abs(prices[b, j]) < np.inf:
                return False
            rows -= capacity[b, j]
        if rows > 0:
            return False
    return True


@jit
def prepare(
    scores: Scores, mask: Flags, capacity: Counts, target: Floats, warm: bool, prices: Floats
) -> tuple[bool, float]:
    """Makes prices ready to start from.

    Returns:
        Whether slots will be left; and the radius for candidates of all rows, if a warm start tells it, else -1.
    """
    slots = 0
    for j in range(capacity.shape[0]):
        slots += capacity[j]
    for i in range(mask.shape[0]):
        slots -= mask[i]
    close_experts(capacity, prices)
    return slots > 0, forget_near(scores, mask, target, slots > 0, prices) if warm else -1.0


@jit
def close_experts(capacity: Counts, prices: Floats) -> None:
    """Shifts prices so that the least is 0; an expert that may take no row has an infinite one."""
    least = np.inf
    for j in range(capacity.shape[0]):
        least = min(least, prices[j] if capacity[j] > 0 else np.inf)
    for j in range(capacity.shape[0]):
        prices[j] = np.inf if capacity[j] == 0 else prices[j] - least


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
