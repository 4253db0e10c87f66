# SPDX-License-Identifier: Apache-2.0
"""What a tensor tells about the transform that it is in: `torch.func`, `torch.vmap`, forward-mode differentiation.

Operators written in other languages than torch's know some transforms and not others. Where one is not known, torch
either stops with words about its own parts, or goes on without a derivative. These functions tell before that happens.
Each is one look at a global number where no transform is active.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

_functorch = torch._C._functorch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def in_transform() -> bool:
    """Tells whether a transform of `torch.func` (or `torch.vmap`) is at work around the caller."""
    return not torch.compiler.is_compiling() and _functorch.peek_interpreter_stack() is not None


def is_batched(*tensors: Tensor | None) -> bool:
    """Tells whether `torch.vmap` maps over any of the tensors; shapes then lack a dimension, and values are hidden."""
    return in_transform() and any(_functorch.is_batchedtensor(level) for level in _levels(tensors))


def _levels(tensors: Sequence[Tensor | None]) -> Iterator[Tensor]:
    """Yields the tensors, and what is inside of them: transforms nest."""
    for x in tensors:
        level = x
        while level is not None:
            yield level
            wrapped = _functorch.is_functorch_wrapped_tensor(level)
            level = _functorch.get_unwrapped(level) if wrapped else None


def has_tangent(*tensors: Tensor | None) -> bool:
    """Tells whether any of the tensors is differentiated in forward mode (`torch.func.jvp`, `jacfwd`, `hessian`)."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:  # pyright: ignore[reportPrivateUsage]
        return False
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors if x is not None):
        return True
    stack = _functorch.get_interpreter_stack() or []
    # The tangent of an outer transform does not show at the inner ones, but the wrapper of its level does.
    jvp = {transform.level() for transform in stack if transform.key() == _functorch.TransformType.Jvp}
    return any(_functorch.maybe_get_level(level) in jvp for level in _levels(tensors))


def check_not_batched(name: str, *tensors: Tensor | None, remedy: str) -> None:
    """Requires that `torch.vmap` maps over none of the tensors."""
    if is_batched(*tensors):
        raise ValueError(f"{name} must not be mapped over by torch.vmap, got a tensor within a vmap: {remedy}")


def check_no_tangent(name: str, *tensors: Tensor | None, remedy: str) -> None:
    """Requires that none of the tensors is differentiated in forward mode."""
    if has_tangent(*tensors):
        raise ValueError(
            f"{name} must not be differentiated in forward mode (torch.func.jvp, jacfwd, hessian, dual numbers), got "
            f"a tensor with a tangent: {remedy}"
        )
