# SPDX-License-Identifier: Apache-2.0
"""Log-softmax along the last dimension, also where that is short."""

import torch
from jaxtyping import Float
from torch import Tensor

# Below this width torch's kernel for the last dimension spends its time on overhead for each row (2 columns: 4 times
# as long as a transposed copy and the kernel for an inner dimension, which is vectorised across rows).
_NARROW = 8


def log_softmax(x: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n k"]:
    """Computes `torch.log_softmax(x, -1)`, several times faster for a few columns on the CPU.

    Args:
        x: any matrix; the result of a narrow one is a transposed view.

    Returns:
        The logarithm of the softmax of each row, same shape and dtype, differentiable.

    Example:
        >>> log_softmax(torch.zeros(1, 2)).exp()
        tensor([[0.5000, 0.5000]])
    """
    if x.shape[-1] < _NARROW and x.device.type == "cpu":
        return torch.log_softmax(x.mT.contiguous(), -2).mT
    return torch.log_softmax(x, -1)
