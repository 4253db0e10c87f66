# SPDX-License-Identifier: Apache-2.0
# Compiled code knows no difference between a NumPy scalar and a Python number.
# pyright: reportArgumentType=false
"""The model of the toy experiment, forward and backward, for many runs: two linear experts, a logistic router.

The estimators see log p and the predictions of the sampled experts as any model would give them, and return gradients
for both; these kernels take them on to the six parameters of each run (see `_task`).

Legend: r runs, s datasets, n rows (datapoints).
"""

import numpy as np
from numpy.typing import NDArray

from equipoise._core._elementary import log_sigmoids
from equipoise._core._jit import jit, jit_vector

Floats = NDArray[np.float32]
Places = NDArray[np.int64]


@jit
def route(theta: Floats, x: Floats, dataset: Places, log_p: Floats, p: Floats) -> None:
    """Writes log p(z | x), [r, 2, n], and p(z = 1 | x), [r, n]: the sigmoid of a line."""
    n = x.shape[1]
    a, e, power = np.empty(n), np.empty(n), np.empty(n)
    for r in range(theta.shape[0]):
        row, slope, constant = x[dataset[r]], np.float64(theta[r, 0]), np.float64(theta[r, 1])
        for i in range(n):
            a[i] = slope * row[i] + constant
        log_sigmoids(a, e, power, log_p[r, 1], log_p[r, 0])
        for i in range(n):
            p[r, i] = (1.0 if a[i] >= 0.0 else e[i]) / (1.0 + e[i])


@jit
def predict(theta: Floats, x: Floats, dataset: Places, z: Places, prediction: Floats) -> None:
    """Writes what the expert of each row predicts, [r, n]."""
    for r in range(theta.shape[0]):
        row = x[dataset[r]]
        first, second = theta[r, 2], theta[r, 3]
        constant, other = theta[r, 4], theta[r, 5]
        for i in range(x.shape[1]):
            prediction[r, i] = second * row[i] + other if z[r, i] == 1 else first * row[i] + constant


@jit_vector
def pull_back(
    x: Floats, dataset: Places, z: Places, p: Floats, by_log_p: Floats, by_prediction: Floats, gradient: Floats
) -> None:
    """Writes the gradient for the parameters, [r, 6], given those for log p, [r, 2, n], and the predictions, [r, n].

    With a the router's logit, d log p_1 / da = p_0 and d log p_0 / da = -p_1.
    """
    for r in range(p.shape[0]):
        row = x[dataset[r]]
        slope, constant, first, second, first_constant, second_constant = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for i in range(x.shape[1]):
            here, own = np.float64(row[i]), np.float64(by_prediction[r, i])
            by_a = by_log_p[r, 1, i] * (1.0 - p[r, i]) - by_log_p[r, 0, i] * np.float64(p[r, i])
            slope += by_a * here
            constant += by_a
            one = own if z[r, i] == 1 else 0.0
            second += one * here
            second_constant += one
            first += (own - one) * here
            first_constant += own - one
        gradient[r, 0], gradient[r, 1] = slope, constant
        gradient[r, 2], gradient[r, 3] = first, second
        gradient[r, 4], gradient[r, 5] = first_constant, second_constant
