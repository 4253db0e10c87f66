# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false, reportReturnType=false
"""A threshold that a given number of entries exceed, found by counting.

A pass that counts is a few vector instructions for an array of a hundred numbers. Partitioning has a branch for every
entry, which no processor foresees, and takes several times as long.
"""

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit, jit_vector

Floats = NDArray[np.float64]

# Passes after which the search gives up: most take five.
_PASSES = 12


@jit
def threshold_above(d: Floats, count: int, finite: int) -> float:
    """Finds a number that exactly `count` entries of d exceed, by false position on the number of entries above.

    Args:
        d: entries, of which some may be minus infinity: those do not count.
        count: above 0 and below `finite`.
        finite: how many entries are finite.

    Returns:
        The number; NaN if none was found, as where entries that are equal leave none.
    """
    low, high = _range(d)
    above_low, above_high = finite - 1, 0
    for _ in range(_PASSES):
        middle = low + (high - low) * ((above_low - count) / (above_low - above_high))
        above = 0
        for i in range(d.shape[0]):
            above += d[i] > middle
        if above == count:
            return middle
        if above > count:
            low, above_low = middle, above
        else:
            high, above_high = middle, above
    return np.nan


@jit_vector
def _range(d: Floats) -> tuple[float, float]:
    """The least and the largest of the entries above minus infinity."""
    low, high = np.inf, -np.inf
    for i in range(d.shape[0]):
        low = min(low, d[i] if d[i] > -np.inf else np.inf)
        high = max(high, d[i])
    return low, high


@jit_vector
def extremes_around(d: Floats, threshold: float) -> tuple[float, float]:
    """The least entry above a threshold, and the largest of the others."""
    least, most = np.inf, -np.inf
    for i in range(d.shape[0]):
        least = min(least, d[i] if d[i] > threshold else np.inf)
        most = max(most, -np.inf if d[i] > threshold else d[i])
    return least, most
