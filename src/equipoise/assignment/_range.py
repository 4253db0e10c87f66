# SPDX-License-Identifier: Apache-2.0
"""Scores and prices at the ends of float64: what overflowed, or was lost to rounding, is solved again.

Solvers compute differences and sums of scores. Where those exceed the largest number, or differences have no digits
left, what a solver then returns, or says about the scores, may be untrue. A power of two changes no digit of a score,
hence no comparison between assignments: so such problems are solved in float64 with smaller scores, or larger ones, and
the results divided. To find the largest score takes a pass over the matrix, so it is done only where a result, or an
error, gives reason to. A value, prices and a gap below 1e154 give none: from such prices and any scores the gap is
computed without overflow, or is infinite.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# z, counts, capacity, mask, value, prices, gap.
Solved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Solver = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], Solved]
Floats = NDArray[np.float64]
# Copies a tensor to the host.
Reader = Callable[[Tensor], Tensor]

# Scores are brought below 2 to this power, less one for each bit of n: room for prices of k times their size. And
# the largest of tiny scores to half of it, below 1.
_EXPONENT = 960
# A price of so many times the average score is rounded as much more coarsely. The sum of n such errors is 1e-13 of the
# value; a gap may be 1e-9 of it.
_COARSER = 1024.0


def solve_in_range(
    solve: Solver,
    scores: Tensor,
    capacity: Tensor | None,
    mask: Tensor | None,
    prices: Tensor | None,
    read: Reader = Tensor.cpu,
) -> Solved:
    """Solves, and solves again where numbers left the range of float64 or a warm start hides the scores.

    Args:
        solve: the solver, from scores, capacity, mask and prices.
        scores: float32 or float64 [..., n, k].
        capacity: int64 [..., k] or None.
        mask: bool [..., n] or None.
        prices: floating [..., k] to start from, or None.
        read: how numbers are read that are not on the host.

    Raises:
        ValueError: what the solver says about scores of a usual size; or the value or a price is beyond float64.
    """
    try:
        solved = solve(scores, capacity, mask, prices)
        if _is_sound(solved, scores, prices is not None, read):
            return solved
    except ValueError:
        at_fault = scores.dtype == torch.float64 and bool((_power_of_two(scores, mask, read) != 1.0).any())
        if not (at_fault if prices is None else bool(read(prices.isfinite().all()))):
            raise
    except ArithmeticError:
        pass
    scale = torch.from_numpy(_power_of_two(scores, mask, read)).to(scores.device)
    z, counts, capacity, mask, value, prices, gap = solve(scores * scale[..., None, None], capacity, mask, None)
    value, prices, gap = value / scale, prices / scale[..., None], gap / scale
    bad = ~(value.isfinite() & prices.isfinite().all(-1) & gap.isfinite()).flatten()
    if bool(bad.any()):
        raise _too_large(scores, mask, int(bad.nonzero()[0]))
    return z, counts, capacity, mask, value, prices, gap


def _is_sound(solved: Solved, scores: Tensor, warm: bool, read: Reader) -> bool:
    """Tells whether nothing overflowed, and prices are so small that the gap can be computed from them."""
    wide = scores.dtype == torch.float64
    if not (wide or warm):
        return True
    # Written for small problems, where a call of NumPy's counts: a square is finite below 1e154, and never if NaN.
    value, prices, gap = (x.numpy() for x in _read_results(solved, read))
    if wide and not all(np.vdot(x, x) < np.inf for x in (value, prices, gap)):
        return False
    return not warm or bool((prices.max(-1) * scores.shape[-2] <= _COARSER * abs(value)).all())


def _read_results(solved: Solved, read: Reader) -> tuple[Tensor, Tensor, Tensor]:
    """Value, prices and gap on the host, read at once."""
    value, prices, gap = solved[4:]
    if value.device.type == "cpu":
        return value, prices, gap
    at_once = read(torch.cat([value.unsqueeze(-1), prices, gap.unsqueeze(-1)], -1))
    return at_once[..., 0], at_once[..., 1:-1], at_once[..., -1]


def _power_of_two(scores: Tensor, mask: Tensor | None, read: Reader) -> Floats:
    """What to multiply the scores of each problem with, [...]; 1 where they are small enough."""
    *batch, n, _ = scores.shape
    if scores.numel() == 0:
        return np.ones(batch)
    used = scores.isfinite() if mask is None else scores.isfinite() & mask.unsqueeze(-1)
    _, exponent = np.frexp(read(scores.double().abs().where(used, 0.0).amax((-2, -1))).numpy())
    shift = np.minimum(0, _EXPONENT - n.bit_length() - exponent) + np.maximum(0, -_EXPONENT // 2 - exponent)
    return np.asarray(np.ldexp(1.0, shift))


def _too_large(scores: Tensor, mask: Tensor, problem: int) -> ValueError:
    """The error for a value or a price beyond float64."""
    where = f" in problem {problem}" if mask.ndim > 1 and mask.shape[:-1].numel() > 1 else ""
    part, rows = scores.reshape(-1, *scores.shape[-2:])[problem], mask.reshape(-1, scores.shape[-2])[problem, :, None]
    largest = float(part.abs().where(part.isfinite() & rows, 0.0).max())
    return ValueError(
        "scores must have a total, and differences, that float64 can hold (up to 1.8e308), got scores of up to "
        f"{largest:.3g}{where}: divide them by a power of two, which changes no assignment"
    )
