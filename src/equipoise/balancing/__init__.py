# SPDX-License-Identifier: Apache-2.0
"""Balancing in expectation: Sinkhorn's row-stochastic matrix with bounded column sums."""

from equipoise.balancing._result import Balanced as Balanced
from equipoise.balancing._result import ConvergenceWarning as ConvergenceWarning
from equipoise.balancing._sinkhorn import sinkhorn as sinkhorn

__all__ = [
    "Balanced",
    "ConvergenceWarning",
    "sinkhorn",
]
