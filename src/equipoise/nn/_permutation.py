# SPDX-License-Identifier: Apache-2.0
"""Taking rows to their experts and back, with gradients that are gathers too.

The gradient of a gather is a scatter, which torch has to make safe for repeated indices. Here every row of a group
belongs to one choice of one token, and both directions of that map are known, so each backward pass is a gather as
well: no atomic additions, no zeroed buffer, and the same result every time.

Legend: T tokens, K choices a token, m rows in groups, D = dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def gather_rows(
    x: Float[Tensor, "T D"],
    choice_of: Int[Tensor, "m"],
    row_of: Int[Tensor, "T K"],
    empty: Bool[Tensor, "m"] | None,
    dropped: Bool[Tensor, "T K"] | None,
) -> Float[Tensor, "m D"]:
    """Copies each token into the rows of its choices.

    Args:
        x: the tokens.
        choice_of: the choice t * K + i that each row holds; of an empty row any.
        row_of: the row of each choice; of a dropped choice any.
        empty: rows that hold no choice, and become zero; None: there is none, or nobody reads them.
        dropped: choices that have no row; None: there is none.

    Returns:
        The rows, differentiable with respect to x.
    """
    return _GatherRows.apply(x, choice_of, row_of, empty, dropped)  # pyright: ignore[reportReturnType]


def combine_rows(
    outputs: Float[Tensor, "m D"],
    scores: Float[Tensor, "T K"],
    choice_of: Int[Tensor, "m"],
    row_of: Int[Tensor, "T K"],
    empty: Bool[Tensor, "m"] | None,
    dropped: Bool[Tensor, "T K"] | None,
) -> Float[Tensor, "T D"]:
    r"""Sums each token's rows with its scores: :math:`y_t = \sum_i s_{ti} \, o_{r(t, i)}`, dropped choices left out.

    Args:
        outputs: what the experts made of the rows.
        scores: the factor of each choice; the sum is made in its dtype.
        choice_of: see `gather_rows`.
        row_of: see `gather_rows`.
        empty: see `gather_rows`.
        dropped: see `gather_rows`.

    Returns:
        The sums in the dtype of the scores, differentiable with respect to outputs and scores.
    """
    return _CombineRows.apply(outputs, scores, choice_of, row_of, empty, dropped)  # pyright: ignore[reportReturnType]


def reshaped(x: Float[Tensor, "..."], shape: Sequence[int]) -> Float[Tensor, "..."]:
    """Gives a tensor that nobody else holds another shape, without the mark of a view.

    FSDP2 hangs its backward pass on a module's output, and warns where that is a view.

    Args:
        x: fresh.
        shape: of as many numbers.
    """
    return torch.ops.aten._unsafe_view(x.contiguous(), list(shape))


class _GatherRows(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, choice_of: Tensor, row_of: Tensor, empty: Tensor | None, dropped: Tensor | None) -> Tensor:
        del dropped
        return _take(x, choice_of // row_of.shape[1] if row_of.shape[1] > 1 else choice_of, empty)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        _, _, row_of, _, dropped = inputs
        ctx.save_for_backward(row_of, dropped)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        row_of, dropped = ctx.saved_tensors
        total = _take(grad, row_of[:, 0], None if dropped is None else dropped[:, 0])
        for i in range(1, row_of.shape[1]):
            total += _take(grad, row_of[:, i], None if dropped is None else dropped[:, i])
        return total, None, None, None, None


class _CombineRows(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        outputs: Tensor,
        scores: Tensor,
        choice_of: Tensor,
        row_of: Tensor,
        empty: Tensor | None,
        dropped: Tensor | None,
    ) -> Tensor:
        del choice_of, empty
        total = _scale(_taken(outputs, row_of, dropped, 0, scores.dtype), scores[:, :1])
        for i in range(1, row_of.shape[1]):
            total.addcmul_(_taken(outputs, row_of, dropped, i, scores.dtype), scores[:, i : i + 1])
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        outputs, scores, choice_of, row_of, empty, dropped = inputs
        # Without a gradient for the scores the outputs are not needed again, and their memory is free at once.
        ctx.save_for_backward(outputs if ctx.needs_input_grad[1] else None, scores, choice_of, row_of, empty, dropped)
        ctx.dtype = outputs.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        outputs, scores, choice_of, row_of, empty, dropped = ctx.saved_tensors
        k = row_of.shape[1]
        grad_outputs = grad_scores = None
        if ctx.needs_input_grad[0]:
            factor = scores.reshape(-1).index_select(0, choice_of).unsqueeze(-1)
            grad_outputs = _scale(_take(grad, choice_of // k if k > 1 else choice_of, empty), factor).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_scores = torch.stack(
                [(_taken(outputs, row_of, dropped, i, grad.dtype) * grad).sum(-1) for i in range(k)], dim=1
            )
        return grad_outputs, grad_scores, None, None, None, None


def _take(x: Tensor, index: Tensor, absent: Tensor | None) -> Tensor:
    """Gathers rows of x; zero where absent, also where x is not finite."""
    taken = x.index_select(0, index)
    return taken if absent is None else taken.masked_fill_(absent.unsqueeze(-1), 0.0)


def _scale(taken: Tensor, factor: Tensor) -> Tensor:
    """Multiplies, in place unless somebody differentiates this: fresh memory costs more than the product."""
    return taken * factor if torch.is_grad_enabled() else taken.mul_(factor)


def _taken(outputs: Tensor, row_of: Tensor, dropped: Tensor | None, i: int, dtype: torch.dtype) -> Tensor:
    """The outputs of the i-th choice of each token, in `dtype`."""
    return _take(outputs, row_of[:, i], None if dropped is None else dropped[:, i]).to(dtype)
