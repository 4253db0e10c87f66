# SPDX-License-Identifier: Apache-2.0
"""What kernels hand each other. Plain tuples, which a kernel unpacks first: arrays bound to names are read fastest.

Legend: n rows, k experts, K experts a row, m rows of a list.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Counts = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Scores = NDArray[np.floating[Any]]

Problem = tuple[Scores, Flags, Counts, Floats, float]
"""One problem: its scores [n, k]; the mask [n]; the capacity [k]; the target [k], which is the capacity as far as there
are rows; and the number of free slots, which the targets sum to beyond K rows."""

Lists = tuple[Ints, Ints, Counts, Ints, Scores]
"""Rows with a choice: `rows` [m] where each stands in the matrix, `need` [m], `first` [m + 1], `cols` and `vals`. Row a
takes `need[a]` of the candidates `first[a]:first[a + 1]` of `cols`, whose scores are in `vals`."""

Settled = tuple[Counts, Scores]
"""What is known of all other rows: `counts` [k], how many each expert has for certain, those that are certain for rows
with a choice included; and `leads` [k, k], the least `s_ij - s_it` over settled rows that hold j and not t."""
