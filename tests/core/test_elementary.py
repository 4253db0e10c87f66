# SPDX-License-Identifier: Apache-2.0
"""exp and log sigmoid as vector instructions, against float64's own."""

import numpy as np
import torch

from equipoise._core._elementary import exponentials, log_sigmoids

ARGUMENTS = np.concatenate([np.linspace(-800, 800, 4001), np.linspace(-2, 2, 4001), [0.0, -0.0, 1e-300, -1e-17]])


def test_exponentials_are_exact_to_rounding() -> None:
    found = ARGUMENTS.copy()
    exponentials(found, np.empty_like(found))
    np.testing.assert_allclose(found, np.exp(ARGUMENTS.clip(-700, 700)), rtol=1e-15)


def test_log_sigmoids_are_exact_to_rounding() -> None:
    t, work = ARGUMENTS.clip(-690, 690), np.empty((4, len(ARGUMENTS)))
    log_sigmoids(t, *work)
    for found, sign in ((work[2], 1.0), (work[3], -1.0)):
        expected = torch.nn.functional.logsigmoid(torch.from_numpy(sign * t))
        np.testing.assert_allclose(found, expected.numpy(), rtol=3e-15, atol=1e-14)
    np.testing.assert_allclose(work[0], np.exp(-np.abs(t)), rtol=1e-15)


def test_log_sigmoids_of_infinity_are_0_and_minus_infinity() -> None:
    work = np.empty((4, 2))
    log_sigmoids(np.array([np.inf, -np.inf]), *work)
    np.testing.assert_allclose(work[2:], [[0.0, -np.inf], [-np.inf, 0.0]], atol=1e-300)
