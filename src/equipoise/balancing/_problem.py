# SPDX-License-Identifier: Apache-2.0
"""A group of prepared problems, and the one pass over its matrices that the solver repeats.

Legend: b problems of a group, n rows (datapoints), k columns (experts).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Matrix entries of one chunk of rows: the chunk, its softmax and their product stay near the core.
_CHUNK = 1 << 18
# With fewer columns than this, torch's softmax is faster across rows, over a transposed copy, than along them.
_NARROW = 16


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Balancing problems of one shape: P_ij = softmax_j(x_ij - prices_j), with column sums bounded by `target`.

    Attributes:
        x: logits less the row's maximum, so that rounding does not depend on a row's offset; 0 in masked rows.
            [b, n, k], or [b, k, n] where `rows_last`, in the precision of the passes.
        weight: 1 for the rows that count, 0 for the masked, shaped to multiply `x`; None when all count.
        target: what each column may sum to, float64 [b, k]; above 0.
        tight: the columns that must meet their target, because the targets sum to the number of rows; bool [b, k].
        rows_last: the layout.
        reduce: adds up over those who hold other rows of the same problems; None: nobody does.
    """

    x: Tensor
    weight: Tensor | None
    target: Tensor
    tight: Tensor
    rows_last: bool
    reduce: Callable[[Tensor], Tensor] | None = None

    @property
    def row_dim(self) -> int:
        """The dimension of x that counts rows."""
        return -1 if self.rows_last else -2

    @property
    def column_dim(self) -> int:
        """The dimension of x that counts columns."""
        return -2 if self.rows_last else -1

    def take(self, keep: Tensor) -> "Problem":
        """The problems where `keep` (bool [b]) is True."""
        weight = None if self.weight is None else self.weight[keep]
        return replace(self, x=self.x[keep], weight=weight, target=self.target[keep], tight=self.tight[keep])

    def thin(self, stride: int) -> "Problem":
        """The same problems on every `stride`-th row, the targets scaled to the rows that are left."""
        step = (..., slice(None, None, stride)) if self.rows_last else (..., slice(None, None, stride), slice(None))
        x = self.x[step].contiguous()
        if self.weight is None:
            return Problem(x, None, self.target * (x.shape[self.row_dim] / self.rows), self.tight, self.rows_last)
        weight = self.weight[step]
        share = weight.sum((-2, -1)).double() / self.weight.sum((-2, -1)).double().clamp(min=1)
        return Problem(x, weight, self.target * share[:, None], self.tight, self.rows_last)

    @property
    def rows(self) -> int:
        """The number of rows, masked ones included."""
        return self.x.shape[self.row_dim]


def prepare(logits: Tensor, mask: Tensor | None, target: Tensor, dtype: torch.dtype, *, forbid: bool = True) -> Problem:
    """Brings logits [b, n, k] into the form of the passes.

    Columns whose target is 0 are left out if `forbid`: x is -inf, and any target then keeps their price at 0.
    """
    rows_last = logits.shape[-1] < _NARROW and logits.device.type == "cpu"
    x = (logits.mT.contiguous() if rows_last else logits).to(dtype)
    per_row, per_column = (-2, -1) if rows_last else (-1, -2)
    closed = target == 0
    if forbid and bool(closed.any()):
        x = x.masked_fill(closed.unsqueeze(per_column), -torch.inf)
    if mask is not None:
        x = x.masked_fill(~mask.unsqueeze(per_row), 0.0)
    x = x - x.amax(per_row, keepdim=True)
    weight = None if mask is None else mask.to(dtype).unsqueeze(per_row)
    tight = is_tight(target, count_rows(logits, mask))[:, None] & ~closed
    return Problem(x, weight, target.masked_fill(closed, 1.0), tight, rows_last)


def count_rows(matrix: Tensor, mask: Tensor | None) -> Tensor:
    """The number of rows that are not masked, float64 [...], for a matrix [..., n, k] and mask [..., n]."""
    if mask is None:
        return torch.full(matrix.shape[:-2], matrix.shape[-2], dtype=torch.float64, device=matrix.device)
    return mask.sum(-1).double()


def is_tight(target: Tensor, rows: Tensor) -> Tensor:
    """Whether targets [..., k] leave no slack for that many rows [...]; fractions need not add up to the last bit."""
    return (target.sum(-1) - rows).abs() <= 1e-9 * rows


def evaluate(problem: Problem, prices: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Column sums and overlaps at the given prices.

    Args:
        problem: b problems.
        prices: float64 [b, k].
        temperature: P is softmax((x - prices) / temperature); float64 [b].

    Returns:
        The column sums sum_i P_ij, float64 [b, k], and the overlaps P'P, float64 [b, k, k].
    """
    columns = torch.zeros_like(prices)
    overlap = prices.new_zeros(*prices.shape, prices.shape[-1])
    inverse = None if bool((temperature == 1).all()) else temperature.reciprocal().to(problem.x.dtype)[:, None, None]
    for shifted, weight in _shifted_chunks(problem, prices):
        p = torch.softmax(shifted if inverse is None else shifted.mul_(inverse), problem.column_dim)
        if weight is not None:
            p.mul_(weight)
        # Rounding of single entries averages out over the rows; rounding of a long float32 sum would not.
        columns += p.sum(problem.row_dim, dtype=torch.float64)
        overlap += p @ p.mT if problem.rows_last else p.mT @ p
    if problem.reduce is not None:
        columns, *rest = problem.reduce(torch.cat([columns.unsqueeze(1), overlap], 1)).split([1, columns.shape[-1]], 1)
        return columns.squeeze(1), rest[0]
    return columns, overlap


def log_probabilities(problem: Problem, prices: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithm of softmax_j(x_ij - prices_j), [b, n, k]; 0 in masked rows."""
    shape = problem.x.mT.shape if problem.rows_last else problem.x.shape
    log_p = torch.empty(shape, dtype=dtype, device=problem.x.device)
    start = 0
    for shifted, weight in _shifted_chunks(problem, prices):
        part = torch.log_softmax(shifted, problem.column_dim)
        if weight is not None:
            part.masked_fill_(weight == 0, 0.0)
        stop = start + part.shape[problem.row_dim]
        log_p[:, start:stop] = part.mT if problem.rows_last else part
        start = stop
    return log_p


def _shifted_chunks(problem: Problem, prices: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yields x - prices for one chunk of rows after the other, with the chunk's weights."""
    dtype, dim = problem.x.dtype, problem.row_dim
    # A float32 price of 20 is off by up to 1e-6, alike in every row of its column, and so would be the column's sum.
    # The two parts together are exact; what is rounded then is the difference, differently in every row.
    high = prices.to(dtype)
    low = (prices - high.double()).to(dtype)
    high, low = (v[..., None] if problem.rows_last else v[:, None] for v in (high, low))
    b, k = prices.shape
    size = max(1, _CHUNK // (b * k))
    for start in range(0, problem.rows, size):
        length = min(size, problem.rows - start)
        shifted = problem.x.narrow(dim, start, length) - high
        if dtype != torch.float64:
            shifted.sub_(low)
        yield shifted, None if problem.weight is None else problem.weight.narrow(dim, start, length)
