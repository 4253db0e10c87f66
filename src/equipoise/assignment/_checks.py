# SPDX-License-Identifier: Apache-2.0
"""What only the assignment requires of its input; `_infeasible.py` has what solvers find out about the values.

Legend: k columns (experts), ... batch dimensions.
"""

from torch import Tensor

from equipoise._core import FLOATS, check_tensor


def check_prices(prices: Tensor, shape: tuple[int, ...]) -> None:
    """Requires floating [..., k] that matches `shape` = [..., k]."""
    check_tensor("prices", prices)
    if prices.dtype not in FLOATS:
        raise ValueError(f"prices must be floating point, got {prices.dtype}: pass an earlier Assignment's .prices")
    if prices.shape != shape:
        raise ValueError(
            f"prices must have shape {list(shape)} (one for each problem and expert), got {list(prices.shape)}: "
            "pass the .prices of an Assignment of the same batch, or expand them"
        )
