# SPDX-License-Identifier: Apache-2.0
"""The permanent of a square matrix: what the normaliser of eq. (5) is when n = k (App. D.5).

Legend: n rows, n columns.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.reference._checks import check_one_problem, check_small_enough, check_square

MAX_ORDER = 20


def permanent(matrix: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """Computes Perm(U) = sum over permutations z of prod_i u_{i, z_i}, by Ryser's formula.

    Perm(U) = sum over sets S of columns of (-1)^(n - |S|) prod_i sum_{j in S} u_ij: a product of row sums counts every
    map from rows into S, and inclusion-exclusion removes those that miss a column. It shares nothing with
    `log_normaliser`, and is compared with it. The signs alternate, so digits are lost as n grows: a rough count is
    one for every two rows.

    Args:
        matrix: U, square, at most 20 x 20.

    Returns:
        The permanent.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> reference.permanent(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).item()
        10.0

    References:
        H. J. Ryser, Combinatorial Mathematics, 1963, chapter 2.
    """
    check_one_problem("matrix", matrix)
    check_square("matrix", matrix)
    n = len(matrix)
    check_small_enough("rows", n, MAX_ORDER)
    chosen = torch.arange(2**n)[:, None].bitwise_right_shift(torch.arange(n)).bitwise_and(1)
    sign = 1 - 2 * ((n - chosen.sum(1)) % 2)
    return (sign * (chosen.double() @ matrix.double().T).prod(1)).sum()
