# SPDX-License-Identifier: Apache-2.0
"""What each row adds to a weighted sum and to its gradient, in one pass over ordinary tensors on the CPU.

Legend: n rows, ... batch dimensions.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def weigh_rows(
    weight: Float[Tensor, "*batch n"],
    kept: Bool[Tensor, "*batch n"],
    losses: Float[Tensor, "*batch n"],
    advantage: Float[Tensor, "*batch n"],
) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch n"], Float[Tensor, "*batch n"]]:
    """Computes w, w f and w a for the rows that are kept and whose w is not 0; 0 for the others, whatever they hold.

    Args:
        weight: w, float32 or float64.
        kept: which rows count.
        losses: f, of the same dtype.
        advantage: a, of the same dtype.

    Returns:
        The three, detached.

    Example:
        >>> one, no = torch.ones(2), torch.tensor([2.0, torch.nan])
        >>> weigh_rows(one, torch.tensor([True, False]), no, -no)
        (tensor([1., 0.]), tensor([2., 0.]), tensor([-2., 0.]))
    """
    from equipoise.ops._kernels._weigh import weigh

    n = losses.shape[-1]
    own, terms, score = (torch.empty(losses.shape, dtype=losses.dtype) for _ in range(3))
    given = (weight, kept, losses, advantage)
    if losses.numel():
        weigh(*(x.detach().contiguous().numpy().reshape(-1, n) for x in (*given, own, terms, score)))
    return own, terms, score
