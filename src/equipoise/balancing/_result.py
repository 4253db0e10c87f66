# SPDX-License-Identifier: Apache-2.0
"""The result of balancing in expectation."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import Record, compact_repr


class ConvergenceWarning(RuntimeWarning):
    """Balancing stopped before the column sums were within the tolerance; the message says how far they are off.

    Example:
        >>> import torch, warnings, equipoise as eq
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     balanced = eq.sinkhorn(30 * torch.randn(64, 8), max_iterations=1)
        >>> [warning.category.__name__ for warning in caught], bool(balanced.converged)
        (['ConvergenceWarning'], False)
    """


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Balanced(Record):
    """Probabilities whose rows sum to 1 and whose columns respect the capacity, with how they were reached.

    Attributes:
        log_p: `logits - prices - logsumexp(logits - prices)`, differentiable with respect to the logits (implicitly:
            the prices move with them). The dtype of the logits, and float32 for float16 and bfloat16, which hold too
            few digits for rows that sum to 1. Rows that are masked are 0 and mean nothing.
        prices: what each expert costs, float64, detached. Finite, >= 0, and 0 for every expert below its capacity; when
            there is none, shifted so that the least is 0. An expert of capacity 0 has a price at which every
            probability underflows to 0.
        converged: whether `error` is within the tolerance.
        iterations: how many times the column sums were evaluated, on all rows or on a sample of them.
        error: the largest relative column error |sum_i p_ij - c_j| / c_j, float64; where the price is 0 and there is
            slack, only an excess counts.

    Example:
        >>> import torch, equipoise as eq
        >>> balanced = eq.sinkhorn(torch.tensor([[2.0, 0.0], [1.0, 0.0]]))
        >>> balanced.log_p.exp().sum(0).round(decimals=4), bool(balanced.converged)
        (tensor([1., 1.]), True)
    """

    log_p: Float[Tensor, "*batch n k"]
    prices: Float[Tensor, "*batch k"]
    converged: Bool[Tensor, "*batch"]
    iterations: Int[Tensor, "*batch"]
    error: Float[Tensor, "*batch"]

    def __repr__(self) -> str:
        """Shows the sizes, and how it ended."""
        *batch, n, k = self.log_p.shape
        ended = {"converged": self.converged, "iterations": self.iterations, "error": self.error}
        return compact_repr(self, batch=batch or None, n=n, k=k, **ended)
