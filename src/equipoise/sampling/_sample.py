# SPDX-License-Identifier: Apache-2.0
"""The result of sampling."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import Record, compact_repr
from equipoise.ops import count_groups


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sample(Record):
    """An expert for each of n rows, with the probability it was drawn with. Nothing in it carries a gradient.

    Attributes:
        z: the expert that each row drew; k for a masked row. A dropped row keeps the expert it drew.
        log_q: log-probability with which row i draws expert j, the one that was really used; rows sum to 1. Rows that
            are masked are 0 and mean nothing.
        kept: rows that their expert processes: False for those beyond its capacity, and for masked rows.
        keep_weight: 1 / P(row i is kept | z) = n_j / min(n_j, c_j) for j = z_i; 1 where nothing is skipped, 0 for
            masked rows.
        mask: rows that take an expert; None for all of them.
        capacity: rows that each expert could take; None where there was no limit.
        deterministic: whether the temperature was 0, so that q is 1 at z: for all problems (bool) or for each.
        assigns_all: whether every row that is not masked gets an expert; False where rows may be dropped.
        prices: of the assignment that was solved, in units of its scores, logits / temperature; None where none was.
        gap: the optimality gap of that assignment, float64; None where none was solved.
    """

    z: Int[Tensor, "*batch n"]
    log_q: Float[Tensor, "*batch n k"]
    kept: Bool[Tensor, "*batch n"]
    keep_weight: Float[Tensor, "*batch n"]
    mask: Bool[Tensor, "*batch n"] | None = None
    capacity: Int[Tensor, "*batch k"] | None = None
    deterministic: bool | Bool[Tensor, "..."] = False
    assigns_all: bool = True
    prices: Float[Tensor, "*batch k"] | None = None
    gap: Float[Tensor, "*batch"] | None = None

    def __repr__(self) -> str:
        """Shows the sizes, and how it was drawn."""
        *batch, n, k = self.log_q.shape
        drawn = {
            "respects_capacity": self.respects_capacity,
            "assigns_all": self.assigns_all,
            "deterministic": self.deterministic,
            "gap": self.gap,
        }
        return compact_repr(self, batch=batch or None, n=n, k=k, **drawn)

    @property
    def respects_capacity(self) -> bool:
        """Whether no expert processes more rows than its capacity. Where `assigns_all` too, the capacity sets z."""
        return self.capacity is not None

    @property
    def counts(self) -> Int[Tensor, "*batch k"]:
        """Rows that drew each expert (n_j), before any were dropped."""
        k = self.log_q.shape[-1]
        return count_groups(self.z, k) if self.mask is None else count_groups(self.z, k + 1)[..., :k]

    @property
    def num_points(self) -> int | Int[Tensor, "*batch"]:
        """Rows that are not masked (n): a number without a mask, else one for each problem."""
        return self.z.shape[-1] if self.mask is None else self.mask.sum(-1)

    def at_z(self, x: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n"]:
        """Gathers [..., n, k] at the sampled experts; masked rows give 0."""
        if self.mask is None:
            return x.gather(-1, self.z.unsqueeze(-1)).squeeze(-1)
        # A masked row has no expert k to gather at: read any column, then put 0.
        x_z = x.gather(-1, self.z.clamp_max(x.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
        return torch.where(self.mask, x_z, 0.0)
