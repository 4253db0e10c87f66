# SPDX-License-Identifier: Apache-2.0
"""Exact balanced assignment: n rows to k experts of limited capacity."""

from equipoise.assignment._assign import METHODS as METHODS
from equipoise.assignment._assign import assign as assign
from equipoise.assignment._assign import certified as certified
from equipoise.assignment._assignment import Assignment as Assignment
from equipoise.assignment._conditional import conditional_values as conditional_values
from equipoise.assignment._conditional import detour_costs as detour_costs
from equipoise.assignment._exchange import Traffic as Traffic
from equipoise.assignment._traffic import assign_with_traffic as assign_with_traffic

__all__ = [
    "Assignment",
    "METHODS",
    "Traffic",
    "assign",
    "assign_with_traffic",
    "certified",
    "conditional_values",
    "detour_costs",
]
