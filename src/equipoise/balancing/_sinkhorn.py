# SPDX-License-Identifier: Apache-2.0
"""Balancing in expectation (section 2.3 of the paper).

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from equipoise._core import (
    Capacity,
    check_capacity,
    check_iterations,
    check_mask,
    check_matrix,
    check_positive,
    check_same_device,
)
from equipoise.balancing._operator import transformable_balance
from equipoise.balancing._problem import count_rows
from equipoise.balancing._result import Balanced


def sinkhorn(
    logits: Float[Tensor, "*batch n k"],
    capacity: Capacity = None,
    *,
    mask: Bool[Tensor, "*batch n"] | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 500,
) -> Balanced:
    r"""Finds the balanced probabilities closest to a router's.

    Solves, for each problem of the batch, the entropy-regularised transportation problem

    .. math::
        \max_{p \ge 0} \sum_{ij} p_{ij} (a_{ij} - \log p_{ij})
        \quad\text{with}\quad \sum_j p_{ij} = 1, \quad \sum_i p_{ij} \le c_j,

    where a are the logits; that is, p minimises the Kullback-Leibler divergence to softmax(a) within these bounds. The
    solution is p_ij = softmax_j(a_ij - prices_j) with prices >= 0 that are positive only where a column meets its
    bound. Sinkhorn's algorithm finds it by normalising rows and columns in turn; here the k prices are found by damped
    Newton steps on the dual, from a high temperature down to 1, which takes 5 to 17 passes over the matrix, also
    where the logits are so sharp that the plain algorithm converges very slowly.

    The result is differentiable: the gradient takes into account how the prices move with the logits, by implicit
    differentiation with one k x k solve. Where a column just meets its bound at price 0 it is a one-sided derivative;
    where `converged` is False it is approximate, like the result itself.

    Args:
        logits: router logits [..., n, k]; -inf forbids a pair. float16, bfloat16, float32 or float64.
        capacity: what a column may sum to: an int, [k] or [..., k], as `assign` takes it. None: every column sums to
            (rows that are not masked) / k exactly, which need not be a whole number.
        mask: rows that count [..., n]; False rows (padding) have no effect.
        tolerance: the relative column error to stop at.
        max_iterations: how often the column sums may be evaluated.

    Returns:
        A `Balanced`: log_p, prices, and how it ended. Values are computed in float32 (float64 for float64, and wherever
        float32 has too few digits for the tolerance) with float64 sums.

    Raises:
        ValueError: the input is malformed, holds NaN or +inf, or has no solution: capacities below the number of rows,
            a row without an expert, forbidden pairs that leave some experts more rows than they may take.

    Warns:
        ConvergenceWarning: once a call, when a problem was not solved to the tolerance.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[2.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
        >>> balanced = sinkhorn(logits)
        >>> balanced.log_p.exp().sum(0).round(decimals=4)
        tensor([2., 2.])
        >>> balanced.prices.round(decimals=4)
        tensor([1., 0.], dtype=torch.float64)
        >>> sinkhorn(logits, capacity=3).prices  # the columns of softmax(logits) are within 3 already
        tensor([0., 0.], dtype=torch.float64)

    References:
        Sinkhorn, A relationship between arbitrary positive matrices and doubly stochastic matrices (1964).
        Cuturi, Sinkhorn distances: lightspeed computation of optimal transport (2013).
        Brauer, Clason, Lorenz, Wirth, A Sinkhorn-Newton method for entropic optimal transport (2017).
    """
    check_matrix("logits", logits)
    check_mask(mask, logits.shape[:-1])
    check_same_device("mask", mask, "logits", logits)
    check_positive("tolerance", tolerance)
    check_iterations("max_iterations", max_iterations)
    *batch, n, k = logits.shape
    if capacity is None:
        target = (count_rows(logits, mask) / k)[..., None].expand(*batch, k).contiguous()
    else:
        if isinstance(capacity, Tensor):
            check_same_device("capacity", capacity, "logits", logits)
        target = check_capacity(capacity, batch, n, k, mask, logits.device).double()
    log_p, prices, converged, iterations, error = transformable_balance(logits, mask, target, tolerance, max_iterations)
    return Balanced(log_p=log_p, prices=prices, converged=converged, iterations=iterations, error=error)
