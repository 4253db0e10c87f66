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

from equipoise._core._elementary import exponentials
from equipoise._core._jit import jit, jit_vector

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
    prices: Floats,
    iterations: Counts,
    error: Floats,
) -> None:
    """Balances problems `start` to `stop` of [b, n, 2], and writes all fields of `Balanced` but log_p, in float64.

    An error of infinity marks a problem that is left to the general solver: forbidden pairs or differences beyond the
    largest number, a target of 0.
    """
    n = logits.shape[1]
    d, e, power = np.empty(n), np.empty(n), np.empty(n)
    for b in range(start, stop):
        count = _differences(logits[b], mask[b], d)
        first, second = target[b, 0], target[b, 1]
        error[b], iterations[b] = np.inf, 0
        if count < 0 or not (first > 0 and second > 0):
            continue
        t, error[b] = 0.0, 0.0
        if count > 0:
            t, iterations[b], error[b] = _root(
                d[:count], e[:count], power[:count], first, second, tolerance, max_iterations
            )
        prices[b, 0] = t if t > 0.0 else 0.0
        prices[b, 1] = -t if t < 0.0 else 0.0


@jit
def _differences(logits: Matrix, mask: Flags, d: Floats) -> int:
    """Lists a_i0 - a_i1 for the rows that are not masked; returns how many, or -1 if one is not finite."""
    count = 0
    for i in range(logits.shape[0]):
        if mask[i]:
            d[count] = np.float64(logits[i, 0]) - np.float64(logits[i, 1])
            if not abs(d[count]) < np.inf:
                return -1
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
    cut = n - min(max(int(first), 1), n - 1)
    ordered = np.partition(d, cut)
    return 0.5 * (ordered[:cut].max() + ordered[cut])
