# SPDX-License-Identifier: Apache-2.0
"""The norm of gradients that are spread over different meshes."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor

from equipoise._core import check_positive
from equipoise.distributed._ranks import explained


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Float[Tensor, ""]:
    """Scales gradients in place so that their norm over all parameters and ranks is at most `max_norm`.

    The same as `torch.nn.utils.clip_grad_norm_` in one process. Torch's function refuses parameters on different
    meshes, and experts are on another mesh than the rest. Each number counts once: a parameter that several ranks have
    is counted on one of them, and the shards of a parameter are added up over ranks.

    Args:
        parameters: with gradients, or without.
        max_norm: the largest norm.
        norm_type: p of the p-norm; may be math.inf.
        error_if_nonfinite: raise a RuntimeError where the norm is NaN or infinite.

    Returns:
        The norm before scaling, the same on all ranks.

    Example:
        >>> x = torch.nn.Parameter(torch.zeros(2))
        >>> x.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([x], 1.0), x.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    check_positive("max_norm", max_norm)
    if not math.isinf(norm_type):
        check_positive("norm_type", norm_type)
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients: list[Any] = [x.grad for x in given if x.grad is not None]
    total = _total_norm(gradients, norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the norm of the gradients must be finite, got {float(total)}: look for the layer it is from"
        )
    scale = (max_norm / (total + 1e-6)).clamp_max(1.0)
    for gradient in gradients:
        local = _local(gradient)
        local.mul_(scale.to(local.device, local.dtype))
    return total


def _total_norm(gradients: list[Any], p: float) -> Tensor:
    """Computes the norm; gradients that are spread alike are added up in one message."""
    spread: dict[tuple[Any, ...], list[Tensor]] = {}
    for gradient in gradients:
        spread.setdefault(_groups(gradient), []).append(_local(gradient))
    norms: list[Tensor] = []
    for groups, parts in spread.items():
        part = torch.stack([torch.linalg.vector_norm(x, p, dtype=torch.float64).to(parts[0].device) for x in parts])
        part = torch.linalg.vector_norm(part, p)
        norms.append(_over_ranks(part, groups, p).to(norms[0].device if norms else part.device))
    total = torch.linalg.vector_norm(torch.stack(norms), p) if norms else torch.zeros([])
    return total.to(_local(gradients[0]).dtype if gradients else torch.float32)


def _over_ranks(norm: Tensor, groups: tuple[Any, ...], p: float) -> Tensor:
    """Adds up the norm of shards over the groups that they are spread over."""
    sums = not math.isinf(p)
    norm = norm**p if sums else norm
    for group in groups:
        with explained("the norm of gradients"):
            dist.all_reduce(norm, dist.ReduceOp.SUM if sums else dist.ReduceOp.MAX, group=group)
    return norm ** (1 / p) if sums else norm


def _groups(gradient: Any) -> tuple[Any, ...]:
    """Returns the process groups that a gradient is spread over."""
    if not isinstance(gradient, DTensor):
        return ()
    placements = enumerate(gradient.placements)
    if any(placement.is_partial() for _, placement in placements):
        raise ValueError("gradients must be complete, got a partial DTensor: call clip_grad_norm_ after backward")
    mesh = gradient.device_mesh
    return tuple(mesh.get_group(i) for i, placement in enumerate(gradient.placements) if not placement.is_replicate())


def _local(gradient: Any) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
