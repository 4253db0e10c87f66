# SPDX-License-Identifier: Apache-2.0
"""Balancing as one opaque operator: its loop depends on values, and `torch.compile` does not have to look inside.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from equipoise._core import check_no_tangent, in_transform
from equipoise.balancing._feasible import require_capacity, require_rows
from equipoise.balancing._gradient import implicit_gradient
from equipoise.balancing._problem import count_rows, is_tight
from equipoise.balancing._result import ConvergenceWarning
from equipoise.balancing._solve import Solution, log_p_dtype, solve


@torch.library.custom_op("equipoise::sinkhorn", mutates_args=())
def balance(
    logits: Tensor, mask: Tensor | None, target: Tensor, tolerance: float, max_iterations: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Balances logits [..., n, k]; target float64 [..., k] bounds the columns.

    Returns:
        log_p [..., n, k], prices [..., k], converged [...], iterations [...], error [...]: the fields of `Balanced`.
    """
    require_rows(logits, mask)
    require_capacity(logits, mask, target, count_rows(logits, mask))
    *batch, n, k = logits.shape
    b = math.prod(batch)
    flat = logits.reshape(b, n, k)
    flat_mask = None if mask is None or bool(mask.all()) else mask.reshape(b, n)
    flat_target = target.reshape(b, k)
    solution = solve(flat, flat_mask, flat_target, tolerance, max_iterations)
    if not bool(solution.converged.all()):
        _warn(solution, tolerance)
    return (
        solution.log_p.reshape(logits.shape),
        solution.prices.reshape(target.shape),
        solution.converged.reshape(batch),
        solution.iterations.reshape(batch),
        solution.error.reshape(batch),
    )


def _warn(solution: Solution, tolerance: float) -> None:
    """Says once how far the problems that ran out of iterations or digits are off."""
    failed = ~solution.converged
    warnings.warn(
        f"sinkhorn stopped at a relative column error of {float(solution.error[failed].max()):.1e}, above the "
        f"tolerance of {tolerance:.1e}, in {int(failed.sum())} of {failed.numel()} problems after "
        f"{int(solution.iterations[failed].max())} iterations: soften the logits (a higher temperature), or allow more "
        "(max_iterations=, tolerance=)",
        ConvergenceWarning,
        stacklevel=2,
    )


@balance.register_fake
def _(
    logits: Tensor,
    mask: Tensor | None,  # pyright: ignore[reportUnusedParameter]
    target: Tensor,
    tolerance: float,  # pyright: ignore[reportUnusedParameter]
    max_iterations: int,  # pyright: ignore[reportUnusedParameter]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch = logits.shape[:-2]
    return (
        logits.new_empty(logits.shape, dtype=log_p_dtype(logits.dtype)),
        torch.empty_like(target),
        logits.new_empty(batch, dtype=torch.bool),
        logits.new_empty(batch, dtype=torch.int64),
        logits.new_empty(batch, dtype=torch.float64),
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, mask, target, _, _ = inputs
    log_p, prices = output[:2]
    ctx.save_for_backward(log_p, prices, target, mask)
    ctx.logits_dtype = logits.dtype
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    log_p, prices, target, mask = ctx.saved_tensors
    tight = is_tight(target, count_rows(log_p, mask))
    grad_logits = implicit_gradient(grad, log_p, prices, target, tight, mask)
    return grad_logits.to(ctx.logits_dtype), None, None, None, None


balance.register_autograd(_backward, setup_context=_save_for_backward)


class _Balance(torch.autograd.Function):
    """The operator once more, in the form that `torch.func` takes; where it is not needed, it takes more time."""

    generate_vmap_rule = True
    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_backward)

    @staticmethod
    def forward(
        logits: Tensor, mask: Tensor | None, target: Tensor, tolerance: float, max_iterations: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return balance(logits, mask, target, tolerance, max_iterations)


def transformable_balance(
    logits: Tensor, mask: Tensor | None, target: Tensor, tolerance: float, max_iterations: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Does what `balance` does, within `torch.func.grad`, `jacrev` and `torch.vmap` too."""
    check_no_tangent("logits", logits, remedy="use reverse mode (torch.func.grad, jacrev), or logits.detach()")
    if in_transform():
        return _Balance.apply(logits, mask, target, tolerance, max_iterations)  # pyright: ignore[reportReturnType]
    return balance(logits, mask, target, tolerance, max_iterations)
