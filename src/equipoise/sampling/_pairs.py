# SPDX-License-Identifier: Apache-2.0
"""Samples of two experts on the CPU by compiled kernels, several times faster than the general samplers.

The usual case only: eager code, finite logits, no mask, no mixture, a positive temperature. For anything else the
functions return None, and the general sampler goes on, with its errors.

Legend: b problems, n rows (datapoints), 2 columns (experts), ... batch dimensions.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise._core import reads_values
from equipoise._core._threads import cut, run_blocks
from equipoise.sampling._proposal import Proposal, draw_each_row

# Rows that a thread takes at once.
_BLOCK = 1 << 14


def fits_pairs(proposal: Proposal, *others: Tensor) -> bool:
    """Returns whether a proposal and the other inputs are of the usual case, see above."""
    logits = proposal.logits
    return (
        logits.shape[-1] == 2
        and logits.numel() > 0
        and proposal.deterministic is False
        and proposal.mask is None
        and proposal.flat is None
        and reads_values(logits)
        and all(x.dtype == logits.dtype for x in others)
    )


def draw_rows(proposal: Proposal, gumbel: Tensor) -> tuple[Tensor, Tensor]:
    """Draws every row independently: z and log_q, for any proposal."""
    found = _draw_pairs(proposal, gumbel) if fits_pairs(proposal, gumbel) else None
    return draw_each_row(proposal, gumbel) if found is None else found


def _draw_pairs(proposal: Proposal, gumbel: Tensor) -> tuple[Tensor, Tensor] | None:
    from equipoise.sampling._kernels._pairs import independent_pairs

    z, log_q = _outputs(proposal.logits)
    given = (_rows_last(proposal.logits), _rows_last(gumbel))
    if not _run(lambda start, stop: independent_pairs(*given, start, stop, z, log_q), z):
        return None
    return _shaped(proposal.logits, z, log_q)


def keep_pairs(z: Tensor, priority: Tensor, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keeps the rows of least priority, at most c_j of expert j, with n_j / min(n_j, c_j) for each (eq. (3))."""
    from equipoise.sampling._kernels._pairs import skip_pairs

    n = z.shape[-1]
    kept, weight = torch.empty(z.shape, dtype=torch.bool), torch.empty(z.shape, dtype=dtype)
    rows, order, capacity = (x.contiguous().numpy().reshape(-1, m) for x, m in ((z, n), (priority, n), (slots, 2)))
    flags, factors = kept.numpy().reshape(-1, n), weight.numpy().reshape(-1, n)

    def keep(start: int, stop: int) -> None:
        skip_pairs(rows, order, capacity, start, stop, flags, factors)

    run_blocks(keep, cut(len(rows), max(1, _BLOCK // n)))
    return kept, weight


def match_pairs(
    proposal: Proposal, gumbel: Tensor, slots: Tensor, *, conditional: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Draws balanced assignments: z, log_q (conditional, or the proposal), prices and the gap."""
    from equipoise.sampling._kernels._pairs import matching_pairs

    z, log_q = _outputs(proposal.logits)
    prices, gap = np.empty((len(z), 2)), np.empty(len(z))
    capacity = slots.contiguous().numpy().reshape(-1, 2)
    given = (_rows_last(proposal.logits), _rows_last(gumbel), capacity, conditional)
    if not _run(lambda start, stop: matching_pairs(*given, start, stop, z, log_q, prices, gap), z):
        return None
    batch = proposal.logits.shape[:-2]
    duals = torch.from_numpy(prices).reshape(*batch, 2), torch.from_numpy(gap).reshape(batch)
    return (*_shaped(proposal.logits, z, log_q), *duals)


def _rows_last(x: Tensor) -> NDArray[np.floating[Any]]:
    return x.detach().mT.contiguous().numpy().reshape(-1, 2, x.shape[-2])


def _outputs(logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.floating[Any]]]:
    *batch, n, _ = logits.shape
    b = math.prod(batch)
    return np.empty((b, n), np.int64), np.empty((b, 2, n), np.float64 if logits.dtype == torch.float64 else np.float32)


def _shaped(logits: Tensor, z: NDArray[np.int64], log_q: NDArray[np.floating[Any]]) -> tuple[Tensor, Tensor]:
    *batch, n, _ = logits.shape
    return torch.from_numpy(z).reshape(*batch, n), torch.from_numpy(log_q).reshape(*batch, 2, n).mT


def _run(work: Callable[[int, int], bool], z: NDArray[np.int64]) -> bool:
    return all(run_blocks(work, cut(len(z), max(1, _BLOCK // z.shape[1]))))
