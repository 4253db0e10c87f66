# SPDX-License-Identifier: Apache-2.0
"""The weighted mean loss and its gradient estimate as one operation, for two experts on the CPU.

The general estimators are a dozen tensor operations with as many for the gradient. Here a compiled kernel computes what
each row adds in one pass, and the backward pass is one product for each input.

Legend: n rows (datapoints), ... batch dimensions.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from equipoise._core import reads_values
from equipoise.ops import weigh_rows
from equipoise.sampling import Sample


def weighted_mean(
    s: Sample,
    losses: Float[Tensor, "*batch n"],
    weight: Float[Tensor, "*batch n"],
    log_prob: Float[Tensor, "*batch n"] | None = None,
    advantage: Float[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch"] | None:
    r"""Computes (1/n) sum_i w_i f_i, with the gradient (1/n) sum_i w_i [(f_i - b) grad log p(z_i) + grad f_i].

    Args:
        s: the sample; rows that it dropped have no term, nor have those of weight 0.
        losses: f, with gradient.
        weight: w, detached.
        log_prob: log p(z_i), with gradient; None for no score function.
        advantage: f - b, detached; None where there is no score function.

    Returns:
        One number for each problem; None where the general estimators have to compute it: not two experts on the CPU,
        masked rows, several dtypes, within `torch.compile` or a transform.
    """
    given = [x for x in (losses, weight, log_prob, advantage) if x is not None]
    plain = s.mask is None and s.log_q.shape[-1] == 2 and losses.dtype in (torch.float32, torch.float64)
    if (
        not plain
        or losses.numel() == 0
        or any(x.dtype != losses.dtype for x in given)
        or not reads_values(*given, s.kept)
    ):
        return None
    return _WeightedMean.apply(losses, log_prob, weight, advantage, s.kept)  # pyright: ignore[reportReturnType]


class _WeightedMean(Function):
    """Linear in losses and log_prob: what the backward pass needs is known in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, losses: Tensor, log_prob: Tensor | None, weight: Tensor, advantage: Tensor | None, kept: Tensor
    ) -> Tensor:
        own, terms, score = weigh_rows(weight, kept, losses, losses if advantage is None else advantage)
        ctx.save_for_backward(own, score)
        del log_prob  # its value adds nothing, its gradient is the score
        return terms.sum(-1) / losses.shape[-1]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        own, score = ctx.saved_tensors
        share = grad_outputs[0].unsqueeze(-1) / own.shape[-1]
        by_losses, by_log_prob, *_ = ctx.needs_input_grad
        return share * own if by_losses else None, share * score if by_log_prob else None, None, None, None
