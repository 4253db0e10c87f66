# SPDX-License-Identifier: Apache-2.0
"""The gradient of balanced log-probabilities, by implicit differentiation.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

import torch
from torch import Tensor

from equipoise.balancing._newton import laplacian

# Relative to the column sums. Far below any eigenvalue that matters to the gradient, and enough above rounding that the
# null directions, which do not enter the result, stay small beside the rest.
_DAMPING = {torch.float64: 1e-13, torch.float32: 1e-10}


def implicit_gradient(
    grad: Tensor, log_p: Tensor, prices: Tensor, target: Tensor, tight: Tensor, mask: Tensor | None
) -> Tensor:
    """Pulls a gradient with respect to log_p back to the logits.

    With a the logits and log_p_ij = a_ij - prices_j - log sum_l exp(a_il - prices_l):

    1. At fixed prices this is a log-softmax: grad_a = grad - p * (row sums of grad) =: direct.
    2. The prices enter as -a does, so the loss falls on them with v_j = -sum_i direct_ij.
    3. They are defined by sum_i p_ij = c_j for the columns A that are tight. Differentiating,
       sum_i p_ij (da_ij - sum_l p_il da_il) - sum_l L_jl dprices_l = 0 for j in A, with L = diag(columns) - P'P, and
       dprices = 0 outside of A, where the price is 0 and stays so.
    4. So with L_AA w = v_A and w = 0 outside, grad_a = direct_ij + p_ij (w_j - sum_l p_il w_l).

    When all columns are tight L has the null direction 1 (a constant added to all prices). v has no part in it, and
    p_ij (w_j - sum_l p_il w_l) does not see it: any solution will do, and the one with mean 0 loses no digits. The same
    holds for each block when forbidden pairs split the experts into several.

    Args:
        grad: of the loss with respect to log_p, [..., n, k].
        log_p: the balanced log-probabilities, [..., n, k]; differentiable, so that this is too.
        prices: float64 [..., k].
        target: column sums that are allowed, float64 [..., k].
        tight: whether every column meets its target, bool [...].
        mask: rows that count, bool [..., n], or None.

    Returns:
        The gradient with respect to the logits, [..., n, k], in the dtype of log_p.
    """
    p = log_p.exp()
    if mask is not None:
        p = p.masked_fill(~mask[..., None], 0.0)
        grad = grad.masked_fill(~mask[..., None], 0.0)
    direct = grad - p * grad.sum(-1, keepdim=True)
    on_prices = -direct.sum(-2, dtype=torch.float64)
    active = ((tight[..., None] | (prices > 0)) & (target > 0)).double()
    response = _solve_active((p.mT @ p).double(), on_prices, active, _DAMPING[p.dtype]).to(p.dtype)[..., None, :]
    return direct + p * (response - (p * response).sum(-1, keepdim=True))


def _solve_active(overlap: Tensor, right: Tensor, active: Tensor, damping: float) -> Tensor:
    """Solves the Laplacian's system on the active columns; 0 elsewhere, mean 0 among the active ones if all are."""
    columns = overlap.sum(-1)
    scale = active * columns.clamp(min=torch.finfo(columns.dtype).tiny).rsqrt()
    matrix = laplacian(overlap) * (scale[..., None] * scale[..., None, :])
    matrix = matrix + torch.diag_embed(active * damping + (1 - active))
    factor, _ = torch.linalg.cholesky_ex(matrix)
    solution = scale * torch.cholesky_solve((scale * right)[..., None], factor)[..., 0]
    complete = (active > 0).all(-1, keepdim=True)
    return solution - torch.where(complete, solution.mean(-1, keepdim=True), 0.0)
