# SPDX-License-Identifier: Apache-2.0
"""What each row adds to an estimate and to its gradient, in one pass.

Legend: b problems, n rows (datapoints).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit

Matrix = NDArray[np.floating[Any]]
Flags = NDArray[np.bool_]


@jit
def weigh(
    weight: Matrix, kept: Flags, losses: Matrix, advantage: Matrix, own: Matrix, terms: Matrix, score: Matrix
) -> None:
    """Writes w, w f and w (f - b) of each row, [b, n]: all 0 where it has no term, whatever its loss holds."""
    for b in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            w, term, scored = weight[b, i], weight[b, i] * losses[b, i], weight[b, i] * advantage[b, i]
            active = kept[b, i] & (w != 0.0)
            own[b, i] = w if active else 0.0
            terms[b, i] = term if active else 0.0
            score[b, i] = scored if active else 0.0
