# SPDX-License-Identifier: Apache-2.0
"""What a tensor tells about the transform that it is in: `torch.func`, `torch.vmap`, forward-mode differentiation.

Operators written in other languages than torch's know some transforms and not others. Where one is not known, torch
either stops with words about its own parts, or goes on without a derivative. These functions tell before that happens.
Each is one look at a global number where no transform is active.
"""

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad

_functorch = torch._C._functorch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def in_transform() -> bool:
    """Tells whether a transform of `torch.func` (or `torch.vmap`) is at work around the caller."""
    return not torch.compiler.is_compiling() and _functorch.peek_interpreter_stack() is not None


def is_batched(*tensors: Tensor | None) -> bool:
    """Tells whether `torch.vmap` maps over any of the tensors; shapes then lack a dimension, and values are hidden."""
    return in_transform() and any(_is_batched(x) for x in tensors if x is not None)


def _is_batched(x: Tensor) -> bool:
    """Looks at every level: transforms nest."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def in_forward_mode() -> bool:
    """Tells whether forward-mode differentiation is at work around the caller."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]


def has_tangent(*tensors: Tensor | None) -> bool:
    """Tells whether any of the tensors is differentiated in forward mode (`torch.func.jvp`, `jacfwd`, `hessian`)."""
    return in_forward_mode() and any(_has_tangent(x) for x in tensors if x is not None)


def _has_tangent(x: Tensor) -> bool:
    """Looks at every level: the tangent of an outer transform does not show within the inner ones."""
    innermost = _functorch.peek_interpreter_stack()
    if innermost is None or innermost.key() == _functorch.TransformType.Jvp:
        if forward_ad.unpack_dual(x).tangent is not None:
            return True
        if innermost is None:
            return False
    if _functorch.maybe_get_level(x) == innermost.level():
        x = _functorch.get_unwrapped(x)
    with temporarily_pop_interpreter_stack():
        return _has_tangent(x)


def reads_values(*tensors: Tensor) -> bool:
    """Tells whether compiled code may read the tensors: eager code, ordinary tensors on the CPU, no transform."""
    return (
        not torch.compiler.is_compiling()
        and _functorch.peek_interpreter_stack() is None  # within one, tensors hide their values
        and forward_ad._current_level < 0  # pyright: ignore[reportPrivateUsage]
        # Not a tensor without values, nor one that is spread over devices.
        and all(type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" for x in tensors)
    )


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
