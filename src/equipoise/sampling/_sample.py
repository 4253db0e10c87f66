# SPDX-License-Identifier: Apache-2.0
"""The result of sampling."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import Record, compact_repr
from equipoise.ops import count_groups, log_softmax, take_column
from equipoise.sampling._scope import Scope, this_process


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sample(Record):
    """An expert for each of n rows, and the probability with which it was drawn. No field carries a gradient.

    Attributes:
        z: the expert that each row drew; k for a masked row. A dropped row keeps the expert it drew.
        log_q: log-probability with which row i drew expert j; the probabilities of a row sum to 1. Masked rows have 0,
            which means nothing.
        kept: rows that their expert processes: False for those beyond its capacity, and for masked rows.
        keep_weight: 1 / P(row i is kept | z) = n_j / min(n_j, c_j) for j = z_i; 1 where nothing is dropped, 0 for
            masked rows.
        mask: rows that take an expert; None for all of them.
        capacity: rows that each expert could take; None if there was no limit.
        deterministic: whether the temperature was 0, so that q is 1 at z: for all problems (bool) or for each.
        assigns_all: whether every row that is not masked gets an expert; False where rows may be dropped.
        prices: the prices of the assignment that was solved, in units of its scores, logits / temperature; None if none
            was solved.
        gap: the gap of that assignment, float64; None if none was solved.
        later: the samples of the rounds after the first, if each row draws K experts in K rounds without replacement.
            All other fields are those of the first round. `log_q` of a later round is conditional on the rounds before,
            and -inf at a row's earlier experts.
        scope: the rows that shared the capacity.

    Example:
        >>> import equipoise as eq
        >>> logits = torch.tensor([[0.0, 5.0], [0.0, 5.0], [5.0, 0.0]])
        >>> s = eq.sample_skip(logits, torch.zeros(3, 2), torch.tensor([0.9, 0.2, 0.5]), capacity=1)
        >>> s.z.tolist(), s.kept.tolist(), s.counts.tolist()
        ([1, 1, 0], [False, True, True], [1, 2])
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
    later: tuple["Sample", ...] = ()
    scope: Scope = field(default_factory=this_process)

    def __repr__(self) -> str:
        """Shows the sizes, and how it was drawn."""
        *batch, n, k = self.log_q.shape
        drawn = {
            "K": len(self.rounds) if self.later else None,
            "respects_capacity": self.respects_capacity,
            "assigns_all": self.assigns_all,
            "deterministic": self.deterministic,
            "gap": self.gap,
        }
        return compact_repr(self, batch=batch or None, n=n, k=k, **drawn)

    @property
    def respects_capacity(self) -> bool:
        """Whether no expert processes more rows than its capacity. If `assigns_all` too, z depends on the capacity."""
        return self.capacity is not None

    @property
    def rounds(self) -> "tuple[Sample, ...]":
        """The sample of every round, this one first."""
        return (self, *self.later)

    @property
    def z_rounds(self) -> Int[Tensor, "*batch n K"]:
        """The experts that each row drew, in the order of the rounds; k for a masked row."""
        return torch.stack([s.z for s in self.rounds], -1)

    @property
    def kept_rounds(self) -> Bool[Tensor, "*batch n K"]:
        """Which of its experts process the row, in the order of the rounds."""
        return torch.stack([s.kept for s in self.rounds], -1)

    @property
    def total_gap(self) -> Float[Tensor, "*batch"] | None:
        """The sum of the gaps of all rounds; None if nothing was solved."""
        total = self.gap
        for s in self.later:
            total = None if total is None or s.gap is None else total + s.gap
        return total

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
            return take_column(x, self.z)
        # A masked row has no expert k to gather at: read any column, then put 0.
        return torch.where(self.mask, take_column(x, self.z.clamp_max(x.shape[-1] - 1)), 0.0)

    def log_prob(self, log_p: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n"]:
        r"""Computes the log-probability that the router gives to each row's experts, in the order of the rounds.

        .. math::
            \sum_r \log p^r(z_i^r) =
            \sum_r \Big( \log p_{i z_i^r} - \log \sum_{j \notin \{z_i^s : s < r\}} p_{ij} \Big).

        Args:
            log_p: the router's log-probabilities, with gradient.

        Returns:
            With gradient; 0 for masked rows. Rows that a round dropped have the log-probability of all they drew.

        Example:
            >>> import equipoise as eq
            >>> log_p = torch.tensor([[0.5, 0.3, 0.2]]).log()
            >>> s, _ = eq.sample_rounds(log_p, eq.STRATEGIES["sample"], [eq.Noise(torch.zeros(1, 3))] * 2)
            >>> s.z_rounds, s.log_prob(log_p).exp()  # 0.5 * 0.3 / (0.3 + 0.2)
            (tensor([[0, 1]]), tensor([0.3000]))
        """
        total, taken = self.at_z(log_p), None
        for before, s in zip(self.rounds, self.later, strict=False):
            taken = before.taken(taken)
            total = total + s.at_z(among_the_rest(log_p, taken))
        return total

    def taken(self, before: Bool[Tensor, "*batch n k"] | None) -> Bool[Tensor, "*batch n k"]:
        """Adds this round's experts to those that a row has had; a masked row has none, since its z is no column."""
        chosen = torch.arange(self.log_q.shape[-1], device=self.z.device) == self.z.unsqueeze(-1)
        return chosen if before is None else before | chosen


def among_the_rest(
    log_p: Float[Tensor, "*batch n k"], taken: Bool[Tensor, "*batch n k"]
) -> Float[Tensor, "*batch n k"]:
    """Renormalises over the experts that a row has not had; in logarithms, to keep small p beside one near 1."""
    return log_softmax(log_p.masked_fill(taken, -torch.inf))
