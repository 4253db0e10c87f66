# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Two experts: a sample in one pass over the rows of each problem.

With k = 2 only two differences of a row matter: t = a_0 - a_1, whose sigmoid is the proposal's probability of expert 0,
and d = t + g_0 - g_1, by which its scores prefer expert 0. A problem's numbers stay in the nearest cache between the
steps, where tensor operations over a batch read and write all of them a dozen times.

Rows are last in memory: logits, noise and log_q are [b, 2, n].

Legend: b problems, n rows (datapoints).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise._core._elementary import log_sigmoids
from equipoise._core._jit import jit
from equipoise._core._threshold import extremes_around, threshold_above

Matrix = NDArray[np.floating[Any]]
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]


@jit
def independent_pairs(logits: Matrix, gumbel: Matrix, start: int, stop: int, z: Counts, log_q: Matrix) -> bool:
    """Draws the rows of problems `start` to `stop` on their own.

    Returns:
        False where a score is not finite: whatever is unusual is left to the general sampler.
    """
    n = z.shape[1]
    t, d, work = np.empty(n), np.empty(n), np.empty((2, n))
    for b in range(start, stop):
        if not _differences(logits[b], gumbel[b], t, d):
            return False
        for i in range(n):
            z[b, i] = 0 if d[i] >= 0.0 else 1
        log_sigmoids(t, work[0], work[1], log_q[b, 0], log_q[b, 1])
    return True


@jit
def skip_pairs(z: Counts, priority: Matrix, capacity: Counts, start: int, stop: int, kept: Flags, keep: Matrix) -> None:
    """Keeps the rows of least priority, at most c_j of expert j: the first of those that are equal."""
    n = z.shape[1]
    own = np.empty(n)
    for b in range(start, stop):
        ones = 0
        for i in range(n):
            ones += z[b, i]
            kept[b, i] = True
        for j in range(2):
            rows, c = (ones if j == 1 else n - ones), capacity[b, j]
            weight = rows / min(rows, c) if rows > 0 else 0.0
            for i in range(n):
                keep[b, i] = weight if z[b, i] == j else keep[b, i]
            if rows > c:
                _own(z[b], priority[b], j, own)
                threshold = threshold_above(own, rows - c, rows)
                if threshold == threshold:
                    _keep_below(own, threshold, kept[b])
                else:
                    _keep_least(z[b], priority[b], j, c, own, kept[b])


@jit
def _own(z: Counts, priority: Matrix, expert: int, own: Floats) -> None:
    """Lists the priorities of an expert's rows; minus infinity for the others."""
    for i in range(z.shape[0]):
        own[i] = np.float64(priority[i]) if z[i] == expert else -np.inf


@jit
def _keep_below(own: Floats, threshold: float, kept: Flags) -> None:
    for i in range(own.shape[0]):
        kept[i] &= own[i] <= threshold


@jit
def _keep_least(z: Counts, priority: Matrix, expert: int, capacity: int, own: Floats, kept: Flags) -> None:
    """The same where priorities are equal at the threshold: the first rows of those are kept. `own` is scratch."""
    n, count = z.shape[0], 0
    for i in range(n):
        if z[i] == expert:
            own[count] = priority[i]
            count += 1
    threshold, room = _select(own[:count], capacity - 1), capacity
    for i in range(n):
        room -= z[i] == expert and priority[i] < threshold
    for i in range(n):
        if z[i] == expert and priority[i] >= threshold:
            if priority[i] == threshold and room > 0:
                room -= 1
            else:
                kept[i] = False


@jit
def matching_pairs(
    logits: Matrix,
    gumbel: Matrix,
    capacity: Counts,
    conditional: bool,
    start: int,
    stop: int,
    z: Counts,
    log_q: Matrix,
    prices: Floats,
    gap: Floats,
) -> bool:
    """Draws balanced assignments; log_q is the conditional given the other rows' noise, or the proposal.

    If m rows go to expert 0, they are those of largest d. The least d among them is what it costs to hand one of their
    slots to expert 1 (d*_01 of appendix D.3), minus the largest d among the others what it costs the other way.

    Returns:
        False where a score is not finite or the capacities do not hold all rows.
    """
    n = z.shape[1]
    t, d, work = np.empty(n), np.empty(n), np.empty((2, n))
    for b in range(start, stop):
        if min(capacity[b, 0], capacity[b, 1]) < 0 or capacity[b, 0] + capacity[b, 1] < n:
            return False
        if not _differences(logits[b], gumbel[b], t, d):
            return False
        least, most, count = _match(d, capacity[b], z[b], work[0])
        price = max(most, min(least, 0.0))  # of those that content every row, the one nearest to 0
        prices[b, 0], prices[b, 1] = max(price, 0.0), max(-price, 0.0)
        gap[b] = prices[b, 0] * (capacity[b, 0] - count) + prices[b, 1] * (capacity[b, 1] - (n - count))
        if conditional:
            from_0 = min(least, 0.0) if count < capacity[b, 0] else least
            from_1 = min(-most, 0.0) if n - count < capacity[b, 1] else -most
            for i in range(n):
                t[i] += from_1 if z[b, i] == 0 else -from_0
        log_sigmoids(t, work[0], work[1], log_q[b, 0], log_q[b, 1])
    return True


@jit
def _match(d: Floats, capacity: Counts, z: Counts, work: Floats) -> tuple[float, float, int]:
    """Writes z; returns the least d of expert 0's rows, the largest of expert 1's, and how many expert 0 has."""
    n, above, level = d.shape[0], 0, 0
    for i in range(n):
        above += d[i] > 0.0
        level += d[i] == 0.0
    # As many rows as want expert 0, within the capacities; the indifferent are shared out.
    fair = n * capacity[0] // max(1, capacity[0] + capacity[1])
    count = max(max(0, n - capacity[1]), min(min(n, capacity[0]), max(above, min(above + level, fair))))
    if count == 0 or count == n:
        threshold = np.inf if count == 0 else -np.inf
    elif count == above:
        threshold = 0.0
    else:
        threshold = threshold_above(d, count, n)
    if threshold == threshold:
        for i in range(n):
            z[i] = 0 if d[i] > threshold else 1
        least, most = extremes_around(d, threshold)
        return least, most, count
    threshold, room = 0.0, count - above
    if not above <= count <= above + level:
        for i in range(n):
            work[i] = d[i]
        threshold, room = _select(work, n - count), count
        for i in range(n):
            room -= d[i] > threshold
    least, most = np.inf, -np.inf
    for i in range(n):
        first = d[i] > threshold
        if d[i] == threshold and room > 0:
            first, room = True, room - 1
        z[i] = 0 if first else 1
        least = min(least, d[i] if first else np.inf)
        most = max(most, -np.inf if first else d[i])
    return least, most, count


@jit
def _differences(logits: Matrix, gumbel: Matrix, t: Floats, d: Floats) -> bool:
    """Writes t and d of a problem; tells whether all of them are finite."""
    n, finite = t.shape[0], 0
    for i in range(n):
        t[i] = np.float64(logits[0, i]) - np.float64(logits[1, i])
        d[i] = t[i] + (np.float64(gumbel[0, i]) - np.float64(gumbel[1, i]))
    for i in range(n):
        finite += abs(d[i]) < np.inf
    return finite == n


@jit
def _select(d: Floats, place: int) -> float:
    """The number that stands at a place in increasing order; d is reordered."""
    low, high = 0, d.shape[0] - 1
    while low < high:
        middle = (low + high) // 2
        pivot = max(min(d[low], d[middle]), min(max(d[low], d[middle]), d[high]))
        i, j = low, high
        while i <= j:
            while d[i] < pivot:
                i += 1
            while d[j] > pivot:
                j -= 1
            if i <= j:
                d[i], d[j] = d[j], d[i]
                i += 1
                j -= 1
        if place <= j:
            high = j
        elif place >= i:
            low = i
        else:
            break
    return d[place]
