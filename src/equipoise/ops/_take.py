# SPDX-License-Identifier: Apache-2.0
"""One entry of each row, from the column that the row names.

Legend: n rows, k columns, ... batch dimensions.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

from equipoise._core import reads_values

_Rule = Callable[[Tensor, Tensor], Tensor]


def take_column(x: Float[Tensor, "*batch n k"], column: Int[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Gathers x[..., i, column[..., i]], with gradient; faster than `torch.gather` where there are two columns.

    Args:
        x: any matrix.
        column: of each row, 0 <= column < k.

    Returns:
        One entry a row.

    Example:
        >>> take_column(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0]))
        tensor([2., 3.])
    """
    if x.shape[-1] != 2:
        return x.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    if x.dtype in (torch.float32, torch.float64) and reads_values(x, column):
        if not (x.requires_grad and torch.is_grad_enabled()):
            return _take(x, column)
        return _Linear.apply(x, column, _take, _put)  # pyright: ignore[reportReturnType]
    # Choosing between two columns takes a fifth of the time of gather and of its gradient.
    first, second = x.mT.unbind(-2)
    return torch.where(column == 1, second, first)


def _take(x: Tensor, column: Tensor) -> Tensor:
    from equipoise.ops._kernels._take import take

    n = column.shape[-1]
    taken = torch.empty(column.shape, dtype=x.dtype)
    if x.numel():
        columns, entries = (t.contiguous().numpy().reshape(-1, n) for t in (column, taken))
        take(x.detach().mT.contiguous().numpy().reshape(-1, 2, n), columns, entries)
    return taken


def _put(taken: Tensor, column: Tensor) -> Tensor:
    from equipoise.ops._kernels._take import put

    *batch, n = column.shape
    x = torch.empty([*batch, 2, n], dtype=taken.dtype)
    if x.numel():
        entries, columns = (t.detach().contiguous().numpy().reshape(-1, n) for t in (taken, column))
        put(entries, columns, x.numpy().reshape(-1, 2, n))
    return x.mT


class _Linear(Function):
    """A function that is linear in x, with its adjoint as gradient; the gradient of the adjoint is the function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, column: Tensor, function: _Rule, adjoint: _Rule) -> Tensor:
        ctx.save_for_backward(column)
        ctx.swapped = adjoint, function
        return function(x, column)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (column,) = ctx.saved_tensors
        gradient: Tensor = _Linear.apply(*grad_outputs, column, *ctx.swapped)  # pyright: ignore[reportAssignmentType]
        return gradient, None, None, None
