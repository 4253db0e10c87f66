# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Two experts: the assignment is a selection.

With k = 2 only the differences d_i = s_i0 - s_i1 matter. If m rows go to expert 0, they are the m rows of largest d,
and one price difference t = p_0 - p_1 between the least of them and the largest of the others makes every row content.
The capacities bound m; within the bounds it is the number of rows that prefer expert 0. So a problem takes one pass,
and a selection in linear time where a bound holds, instead of chains of moves.
"""

import numpy as np

from equipoise._core._jit import jit
from equipoise.assignment._kernels._records import Counts, Flags, Floats, Ints, Scores


@jit
def solve_pair(
    scores: Scores, mask: Flags, capacity: Counts, prices: Floats, z: Ints, value: Floats, gap: Floats, problem: int
) -> bool:
    """Solves one problem of two experts, and writes z, prices, the value and the sum of regrets.

    Returns:
        False for a problem with an illegal row, with too many rows that -inf confines to an expert, or with differences
        beyond the largest number: whatever is unusual is left to the general solver.
    """
    n = scores.shape[0]
    d, rows = np.empty(n), np.empty(n, np.int32)
    legal, count, above, level, confined = _differences(scores, mask, d, rows)
    if not legal or confined[0] > capacity[0] or confined[1] > capacity[1]:
        return False
    d = d[:count]
    z[:] = -1  # what masked rows keep
    m = _share(count, above, level, capacity)
    threshold = 0.0
    if not above <= m <= above + level:
        threshold = np.partition(d, count - m)[count - m] if m > 0 else np.inf
    room = m - _count_above(d, threshold)  # for rows exactly at the threshold: the first of them
    least, most = np.inf, -np.inf
    for a in range(count):
        first = d[a] > threshold or (d[a] == threshold and room > 0)
        if d[a] == threshold and first:
            room -= 1
        z[rows[a]] = 0 if first else 1
        if first:
            least = min(least, d[a])
        else:
            most = max(most, d[a])
    t = max(most, min(least, 0.0))  # of the differences that content every row, the one nearest to 0
    prices[0] = t if t > 0.0 else 0.0
    prices[1] = -t if t < 0.0 else 0.0
    value[problem], gap[problem] = _worth(scores, z, rows[:count], prices)
    return True


@jit
def _differences(scores: Scores, mask: Flags, d: Floats, rows: Ints) -> tuple[bool, int, int, int, tuple[int, int]]:
    """Lists the rows that are not masked with what they prefer expert 0 by.

    Returns:
        Whether all is usual; how many rows there are; how many prefer expert 0, and how many are indifferent; and how
        many have no other expert than 0, and than 1.
    """
    count, above, level, only_0, only_1 = 0, 0, 0, 0, 0
    for i in range(scores.shape[0]):
        if not mask[i]:
            continue
        first, second = np.float64(scores[i, 0]), np.float64(scores[i, 1])
        preference = first - second
        if not abs(preference) < np.inf:
            # NaN, +inf, -inf twice, or two finite scores whose difference is not.
            if not (first < np.inf and second < np.inf) or (first == -np.inf) == (second == -np.inf):
                return False, 0, 0, 0, (0, 0)
            only_0 += second == -np.inf
            only_1 += first == -np.inf
        d[count] = preference
        rows[count] = i
        count += 1
        above += preference > 0.0
        level += preference == 0.0
    return True, count, above, level, (only_0, only_1)


@jit
def _share(count: int, above: int, level: int, capacity: Counts) -> int:
    """How many rows expert 0 takes: as many as want it, within the capacities; the indifferent are shared out."""
    least, most = max(0, count - capacity[1]), min(count, capacity[0])
    fair = count * capacity[0] // max(1, capacity[0] + capacity[1])
    wanted = max(above, min(above + level, fair))
    return max(least, min(most, wanted))


@jit
def _count_above(d: Floats, threshold: float) -> int:
    count = 0
    for a in range(d.shape[0]):
        count += d[a] > threshold
    return count


@jit
def _worth(scores: Scores, z: Ints, rows: Ints, prices: Floats) -> tuple[float, float]:
    """The sum of the scores at z, and of what rows miss by not being at the other expert."""
    value, regret = 0.0, 0.0
    for a in range(rows.shape[0]):
        i = rows[a]
        j = z[i]
        own, other = np.float64(scores[i, j]), np.float64(scores[i, 1 - j])
        value += own
        regret += max(0.0, (other - prices[1 - j]) - (own - prices[j]))
    return value, regret
