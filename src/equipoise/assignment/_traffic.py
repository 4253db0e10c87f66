# SPDX-License-Identifier: Apache-2.0
"""`assign_with_traffic`: the same assignment, and what it took to find it where the scores are on a device."""

import functools

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise._core import Capacity
from equipoise.assignment._assign import check_problem
from equipoise.assignment._assignment import Assignment
from equipoise.assignment._exchange import Meter, Traffic
from equipoise.assignment._range import solve_in_range
from equipoise.assignment._settle import settle_in_torch


@torch.no_grad()
def assign_with_traffic(
    scores: Float[Tensor, "*batch n k"],
    capacity: Capacity = None,
    *,
    top_k: int | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
    prices: Float[Tensor, "*batch k"] | None = None,
) -> tuple[Assignment, Traffic]:
    """Solves as `assign(..., method="settle")` does, and counts what is copied and how often the host waits.

    On an accelerator this is the default method of `assign`. On the CPU the same code runs and makes the same copies,
    so that the traffic can be counted without an accelerator.

    Args:
        scores: see `assign`; so are the others.
        capacity: rows that an expert may take.
        top_k: None, or K experts a row.
        mask: False for rows that take no expert.
        prices: a start from an earlier `Assignment.prices`.

    Returns:
        The assignment, whose value carries no gradient, and the traffic.

    Raises:
        ValueError: as `assign`.

    Example:
        >>> import torch
        >>> scores = torch.randn(8192, 16, generator=torch.Generator().manual_seed(0))
        >>> a, traffic = assign_with_traffic(scores)
        >>> a.counts.unique().tolist(), traffic.waits <= 8, traffic.rows_copied < 8192 // 10
        ([512], True, True)
    """
    given, each = check_problem(scores, capacity, top_k, mask, prices, "settle")
    meter = Meter()
    solve = functools.partial(settle_in_torch, top_k=each, meter=meter)
    wide = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    z, counts, full, used, value, final, gap = solve_in_range(solve, wide, given, mask, prices, meter.read)
    z = z.squeeze(-1) if top_k is None else z
    return Assignment(z, counts, full, used, value, final, gap), meter.traffic()
