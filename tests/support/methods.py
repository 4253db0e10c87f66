# SPDX-License-Identifier: Apache-2.0
"""The methods of `eq.assign`, for tests that hold for all of them, or for all exact ones."""

from equipoise.assignment import METHODS as TABLE

# Those that promise no optimal result.
INEXACT = ("auction",)
METHODS = tuple(TABLE)
EXACT = tuple(method for method in METHODS if method not in INEXACT)
