# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false
"""exp and log sigmoid for arrays, as vector instructions.

A call of the C library's exp for each number takes several times as long as everything around it. Series without a
branch become vector instructions, and are exact to rounding where their arguments are small.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise._core._jit import jit

Floats = NDArray[np.float64]

# Adding it to a number of moderate size leaves the nearest integer in the last bits of the sum.
_ROUND = 1.5 * 2.0**52
_LOG2E = 1.0 / math.log(2.0)
# log 2 in two parts: multiples of the first are exact.
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
# exp(700) is still a number; arguments beyond are taken to be this large.
_FAR = 700.0


@jit
def exponentials(x: Floats, power: Floats) -> None:
    """Puts exp(x) in the place of x, for x cut off at +-700; `power` is scratch of the same length.

    With x = m log 2 + r, exp(x) = 2^m exp(r), where |r| is at most half of log 2 and twelve terms of the series are
    exact to rounding.
    """
    bits = power.view(np.int64)
    for i in range(x.shape[0]):
        y = min(max(x[i], -_FAR), _FAR)
        power[i] = y * _LOG2E + _ROUND
        m = power[i] - _ROUND
        r = (y - m * _LN2_HIGH) - m * _LN2_LOW
        high = 1.0 + r * (1 / 9) * (1.0 + r * (1 / 10) * (1.0 + r * (1 / 11) * (1.0 + r * (1 / 12))))
        middle = 1.0 + r * (1 / 5) * (1.0 + r * (1 / 6) * (1.0 + r * (1 / 7) * (1.0 + r * (1 / 8) * high)))
        x[i] = 1.0 + r * (1.0 + r * (1 / 2) * (1.0 + r * (1 / 3) * (1.0 + r * (1 / 4) * middle)))
    for i in range(x.shape[0]):
        bits[i] = (bits[i] << 52) + (1023 << 52)  # the number 2^m
    for i in range(x.shape[0]):
        x[i] *= power[i]


@jit
def log_sigmoids(
    t: Floats, e: Floats, power: Floats, first: NDArray[np.floating[Any]], second: NDArray[np.floating[Any]]
) -> None:
    """Writes log sigmoid(t) = min(t, 0) - log(1 + exp(-|t|)) to `first`, and log sigmoid(-t) to `second`.

    log(1 + e) = 2 artanh(e / (2 + e)), whose argument is at most 1/3: seventeen terms of the series. `power` is
    scratch, and `e` ends as exp(-|t|).
    """
    for i in range(t.shape[0]):
        e[i] = -abs(t[i])
    exponentials(e, power)
    for i in range(t.shape[0]):
        y = e[i] / (2.0 + e[i])
        s = y * y
        far = 1 / 23 + s * (1 / 25 + s * (1 / 27 + s * (1 / 29 + s * (1 / 31 + s * (1 / 33)))))
        middle = 1 / 13 + s * (1 / 15 + s * (1 / 17 + s * (1 / 19 + s * (1 / 21 + s * far))))
        near = 1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s * middle))))
        log = 2.0 * y * (1.0 + s * near)
        first[i] = min(t[i], 0.0) - log
        second[i] = min(-t[i], 0.0) - log
