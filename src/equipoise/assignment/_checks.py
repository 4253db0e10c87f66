# SPDX-License-Identifier: Apache-2.0
"""What only the assignment requires of its input; `_infeasible.py` says why a problem has no solution.

Legend: b problems, n rows (datapoints), k columns (experts), ... batch dimensions.
"""

import numbers

import torch
from torch import Tensor

from equipoise._core import FLOATS, check_tensor
from equipoise.assignment._infeasible import illegal_scores


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


def check_scores(scores: Tensor, open_scores: Tensor, capacity: Tensor, rows: Tensor) -> None:
    """Requires scores without NaN and +inf, and for every row an expert with a capacity above 0.

    Args:
        scores: [b, n, k].
        open_scores: the same with -inf for experts whose capacity is 0.
        capacity: [b, k].
        rows: bool [b, n]; the others may hold anything.
    """
    most = open_scores.amax(-1)
    legal = most.isfinite() & ~(scores == torch.inf).any(-1) & ~scores.isnan().any(-1)
    if not bool((legal | ~rows).all()):
        problem, row = (int(i) for i in (rows & ~legal).nonzero()[0])
        raise illegal_scores(scores[problem].double().cpu().numpy(), capacity[problem].cpu().numpy(), 1, row, problem)


def check_top_k(top_k: int, k: int, method: str) -> int:
    """Requires a number of experts that a row can take, and a method that takes it."""
    if isinstance(top_k, bool) or not isinstance(top_k, numbers.Integral):
        raise ValueError(f"top_k must be an integer or None, got {top_k!r}: give the number of experts a row")
    if not 1 <= top_k <= k:
        raise ValueError(f"top_k must be between 1 and the number of experts, {k}, got {top_k}: a row's experts differ")
    if method not in ("auto", "primal-dual", "settle"):
        raise ValueError(
            f'top_k needs the method "auto", "primal-dual" or "settle", got {method!r}: leave one of them out'
        )
    return int(top_k)
