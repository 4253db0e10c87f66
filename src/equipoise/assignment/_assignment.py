# SPDX-License-Identifier: Apache-2.0
"""The result of an assignment."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils import _pytree  # pyright: ignore[reportPrivateUsage]

from equipoise._core import Record, compact_repr


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Assignment(Record):
    """A balanced assignment of n rows to k experts, with its certificate.

    Attributes:
        z: the expert of each row, [..., n], or its K experts, best offer first, [..., n, K] (`top_k`); k where a row
            takes no expert (it is masked).
        counts: rows that each expert took.
        capacity: rows that each expert could take, as used; at most 2**40.
        mask: rows that had to be assigned, as used.
        value: the sum of the scores of the assigned pairs, differentiable with respect to the scores.
        prices: an optimal dual variable for each expert, >= 0, and 0 for every expert with a free slot; when no expert
            has one, shifted so that the least is 0. Row i is at z_i because no other expert offers
            more than `scores[i, z_i] - prices[z_i]`.
        gap: dual value minus primal value, computed from `prices` and the scores. No assignment is better by more
            than this, so a gap of (numerically) zero proves optimality.

    Example:
        >>> import torch, equipoise as eq
        >>> a = eq.assign(torch.tensor([[2.0, 0.0], [3.0, 1.0], [1.0, 0.5]]), capacity=[1, 2])
        >>> a.z.tolist(), a.counts.tolist(), a.value.item()
        ([0, 1, 1], [1, 2], 3.5)
    """

    z: Int[Tensor, "..."]
    counts: Int[Tensor, "*batch k"]
    capacity: Int[Tensor, "*batch k"]
    mask: Bool[Tensor, "*batch n"]
    value: Float[Tensor, "*batch"]
    prices: Float[Tensor, "*batch k"]
    gap: Float[Tensor, "*batch"]

    def __repr__(self) -> str:
        """Shows the sizes, and how good it is."""
        *batch, n = self.mask.shape
        several = self.z.shape[-1] if self.z.ndim > self.mask.ndim else None
        sizes = {"batch": batch or None, "n": n, "k": self.counts.shape[-1], "top_k": several}
        return compact_repr(self, **sizes, value=self.value, gap=self.gap)


# So that torch.vmap may return one.
_pytree.register_dataclass(Assignment, serialized_type_name="equipoise.assignment.Assignment")
