# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""Two experts: balancing is finding one number.

With k = 2 only the differences d_i = a_i0 - a_i1 matter, p_i0 = sigmoid(d_i - t), and the column sum of expert 0 falls
with the price difference t = p_0 - p_1. The targets bound that sum between n - c_1 and c_0: if it is within the bounds
at t = 0 there is nothing to do, else t is the root for the bound that it breaks. Newton's method, which the general
solver uses too, kept inside a bracket that bisection narrows, takes a handful of passes over a row of numbers that
stays in the nearest cache.

Legend: b problems, n rows (datapoints).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise._core._elementary import exponentials, log_sigmoids
from equipoise._core._jit import jit, jit_vector
from equipoise._core._threshold import extremes_around, threshold_above

Floats = NDArray[np.float64]
Matrix = NDArray[np.floating[Any]]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]


@jit
def balance_pairs(
    logits: Matrix,
    mask: Flags,
    target: Floats,
    tolerance: float,
    max_iterations: int,
    start: int,
    stop: int,
    log_p: Matrix,
    prices: Floats,
    iterations: Counts,
    error: Floats,
) -> None:
    """Balances problems `start` to `stop` of [b, 2, n], and writes all fields of `Balanced`, log_p as [b, n, 2].

    An error of infinity marks a problem that is left to the general solver: forbidden pairs or differences beyond the
    largest number, a target of 0.
    """
    n = logits.shape[2]
    d, own, work, both = np.empty(n), np.empty(n), np.empty((2, n)), np.empty((2, n))
    for b in range(start, stop):
        count = _differences(logits[b], mask[b], d, own)
        first, second = target[b, 0], target[b, 1]
        error[b], iterations[b] = np.inf, 0
        if count < 0 or not (first > 0 and second > 0):
            continue
        t, error[b] = 0.0, 0.0
        if count > 0:
            t, iterations[b], error[b] = _root(
                own[:count], work[0, :count], work[1, :count], first, second, tolerance, max_iterations
            )
        prices[b, 0] = t if t > 0.0 else 0.0
        prices[b, 1] = -t if t < 0.0 else 0.0
        for i in range(n):
            d[i] -= t
        log_sigmoids(d, work[0], work[1], both[0], both[1])
        for i in range(n):
            log_p[b, i, 0] = both[0, i] if mask[b, i] else 0.0
            log_p[b, i, 1] = both[1, i] if mask[b, i] else 0.0


@jit
def _differences(logits: Matrix, mask: Flags, d: Floats, own: Floats) -> int:
    """Writes d_i = a_i0 - a_i1, and lists those of the rows that are not masked; how many, or -1 if one is not finite.

    Masked rows may hold anything.
    """
    n, count, finite = d.shape[0], 0, 0
    for i in range(n):
        d[i] = np.float64(logits[0, i]) - np.float64(logits[1, i]) if mask[i] else 0.0
        finite += abs(d[i]) < np.inf
        count += mask[i]
    if finite < n:
        return -1
    if count == n:
        own[:] = d
        return n
    count = 0
    for i in range(n):
        if mask[i]:
            own[count] = d[i]
            count += 1
    return count


@jit
def _root(
    d: Floats, e: Floats, power: Floats, first: float, second: float, tolerance: float, max_iterations: int
) -> tuple[float, int, float]:
    """The price difference, how often the column sum was evaluated, and the relative column error."""
    n = d.shape[0]
    tight = abs(first + second - n) <= 1e-9 * n
    t = _middle(d, first) if tight else 0.0
    low, high = d.min() - 40.0, d.max() + 40.0  # beyond these every row is settled
    iterations, error, wanted = 0, 0.0, first
    while iterations < max_iterations:
        for i in range(n):
            e[i] = t - d[i]
        exponentials(e, power)
        total, slope = _column(e)
        iterations += 1
        if not tight and iterations == 1:
            if n - second <= total <= first:
                return 0.0, 1, 0.0
            wanted = min(first, max(n - second, total))
        excess = total - wanted
        error = abs(excess) / min(wanted, n - wanted)
        if error <= tolerance:
            break
        if excess > 0:
            low = t
        else:
            high = t
        step = t + excess / slope if slope > 0 else low
        t = step if low < step < high else 0.5 * (low + high)
    return t, iterations, error


@jit_vector
def _column(e: Floats) -> tuple[float, float]:
    """The column sum of expert 0 where e = exp(t - d), and how fast it falls with t."""
    total, slope = 0.0, 0.0
    for i in range(e.shape[0]):
        p = 1.0 / (1.0 + e[i])
        total += p
        slope += p * (1.0 - p)
    return total, slope


@jit
def _middle(d: Floats, first: float) -> float:
    """Where the rows would split if each were sure: right for sharp logits, and near for others."""
    n = d.shape[0]
    if n < 2:
        return d[0]
    above = min(max(int(first), 1), n - 1)
    threshold = threshold_above(d, above, n)
    if threshold == threshold:
        least, most = extremes_around(d, threshold)
        return 0.5 * (least + most)
    ordered = np.partition(d, n - above)
    return 0.5 * (ordered[: n - above].max() + ordered[n - above])
