# SPDX-License-Identifier: Apache-2.0
"""Tensor primitives that know nothing of experts: Gumbel noise, ranks within groups, softmax, shortest paths."""

from equipoise.ops._groups import count_groups as count_groups
from equipoise.ops._groups import rank_within_groups as rank_within_groups
from equipoise.ops._gumbel import draw_gumbel as draw_gumbel
from equipoise.ops._gumbel import draw_uniform as draw_uniform
from equipoise.ops._largest import largest as largest
from equipoise.ops._log_softmax import log_softmax as log_softmax
from equipoise.ops._shortest_paths import ShortestPaths as ShortestPaths
from equipoise.ops._shortest_paths import floyd_warshall as floyd_warshall
from equipoise.ops._shortest_paths import negative_cycles as negative_cycles
from equipoise.ops._shortest_paths import visited as visited
from equipoise.ops._take import take_column as take_column
from equipoise.ops._weigh import weigh_rows as weigh_rows

__all__ = [
    "ShortestPaths",
    "count_groups",
    "draw_gumbel",
    "draw_uniform",
    "floyd_warshall",
    "largest",
    "log_softmax",
    "negative_cycles",
    "rank_within_groups",
    "take_column",
    "visited",
    "weigh_rows",
]
