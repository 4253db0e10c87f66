# SPDX-License-Identifier: Apache-2.0
"""Exact balanced assignment and unbiased gradient estimation for sparse mixtures of experts."""

from equipoise.assignment import Assignment as Assignment
from equipoise.assignment import assign as assign

__version__ = "0.1.0"
