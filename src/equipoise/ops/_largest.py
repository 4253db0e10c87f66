# SPDX-License-Identifier: Apache-2.0
"""The maximum along the last dimension, also where that is short."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Below this width torch's reductions with an index spend their time on overhead for each row, and a hundred times that
# where the matrix is a transposed view; comparing columns is vectorised across rows.
_NARROW = 8


def largest(x: Float[Tensor, "*batch n k"]) -> tuple[Float[Tensor, "*batch n"], Int[Tensor, "*batch n"]]:
    """Finds the maximum of each row and the first column that holds it: `x.max(-1)`, faster for a few columns.

    Args:
        x: any matrix with at least one column; a NaN makes the maximum of its row NaN, with any column.

    Returns:
        The maxima, and int64 columns.

    Example:
        >>> largest(torch.tensor([[1.0, 3.0, 3.0]]))
        (tensor([3.]), tensor([1]))
    """
    k = x.shape[-1]
    if not 0 < k < _NARROW or x.device.type != "cpu":
        best, column = x.max(-1)
        return best, column
    columns = x.unbind(-1)
    best, column = columns[0], torch.zeros_like(columns[0], dtype=torch.int64)
    for j in range(1, k):
        better = columns[j] > best
        column = better.long() if j == 1 else torch.where(better, j, column)
        best = torch.maximum(best, columns[j])
    return (best.clone() if k == 1 else best), column
