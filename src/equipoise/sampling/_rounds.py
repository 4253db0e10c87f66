# SPDX-License-Identifier: Apache-2.0
"""More than one expert a row: rounds of sampling in which a row's earlier choices are forbidden.

Legend: n rows (datapoints), k columns (experts), K rounds, ... batch dimensions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import Record, check_capacity, check_mask, check_matrix, check_rounds, compact_repr
from equipoise.ops import count_groups, log_softmax
from equipoise.sampling._sample import Sample


@runtime_checkable
class DrawsWeighted(Protocol):
    """What a round asks of a strategy; every `equipoise.Strategy` has it."""

    @property
    def draw(self) -> Callable[..., tuple[Sample, Tensor]]:
        """From log_p, noise and keywords to one expert a row, and each row's weight; a pure function."""
        ...


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Rounds(Record):
    """K different experts for each of n rows, in the order in which they were drawn. Nothing in it carries a gradient.

    Attributes:
        samples: the draw of each round. `log_q` is that round's, given the rounds before; -inf at a row's earlier
            choices.
        weight: the product over rounds of each round's weight; 0 for a row that any round dropped.
    """

    samples: tuple[Sample, ...]
    weight: Float[Tensor, "*batch n"]

    def __repr__(self) -> str:
        """Shows the sizes."""
        *batch, n, k = self.samples[0].log_q.shape
        return compact_repr(self, batch=batch or None, n=n, k=k, K=len(self.samples))

    @property
    def z(self) -> Int[Tensor, "*batch n K"]:
        """The experts that each row drew; k for a masked row."""
        return torch.stack([s.z for s in self.samples], -1)

    @property
    def kept(self) -> Bool[Tensor, "*batch n K"]:
        """Which of its experts process the row."""
        return torch.stack([s.kept for s in self.samples], -1)

    def log_prob(self, log_p: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch n"]:
        """Computes the router's log-probability of each row's choices, with gradient; see `rounds_log_prob`."""
        return rounds_log_prob(log_p, self.samples)


@torch.no_grad()
def sample_rounds(
    log_p: Float[Tensor, "*batch n k"],
    strategy: DrawsWeighted,
    noises: Sequence[Any],
    *,
    capacity: int | Sequence[int] | Int[Tensor, "..."] | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
    sinkhorn_first: bool = False,
    **how: Any,
) -> Rounds:
    r"""Draws K experts a row without replacement, by K rounds of any strategy.

    .. math::
        p(z_i^1, \ldots, z_i^K) = \prod_r p^r(z_i^r), \qquad
        p^r(j) = \frac{p_{ij}}{\sum_{j' \notin \{z_i^1, \ldots, z_i^{r-1}\}} p_{ij'}}, \qquad
        w_i = \prod_r w_i^r,

    the Plackett-Luce distribution. Round r runs the strategy on p^r, in which the row's earlier choices are forbidden
    (-inf), with noise of its own.

    Unbiased when: the strategy is. Given the rounds before, the expectation of w_i^r h(z_i^r) over round r is that of h
    under p^r, for every h; from the last round to the first this makes w_i h(z_i^1, ..., z_i^K) unbiased under p.

    Capacity adds up. Through round r expert j takes at most r c_j rows, so in round r at most r c_j minus the rows that
    it kept before, and K c_j in all: what one round leaves free, the next may fill. With equal capacities that hold all
    rows (k c >= n) every round can be assigned, and any row can take any expert that it has not had. For let every row,
    after r rounds, spread evenly over its k - r other experts: expert j, which u_j <= r c rows have had, gets
    (n - u_j) / (k - r) <= (r + 1) c - u_j rows (the left side minus the right grows with u_j, and at u_j = r c the
    inequality is n <= k c). A fractional assignment within capacity is an average of whole ones, and this one gives
    every allowed pair a share, so each pair is part of some whole assignment. Unequal capacities, or pairs that you
    forbid, may leave none; that is an error of the solver.

    A row that a round drops has weight 0 from then on, and goes on all the same: its later experts process it, so that
    rows which look at it (attention) see something near to what they will see when nothing is dropped. It has had its
    draw: that expert stays forbidden to it.

    Args:
        log_p: the router's log-probabilities, `log_softmax(logits)` at temperature 1. No gradient flows from it.
        strategy: anything with `draw`, such as a row of `equipoise.STRATEGIES`.
        noises: one for each round, independent of each other, from the strategy's `draw_noise`.
        capacity: c: rows that an expert may take a round, as in `sample_skip`.
        mask: False for rows that take no expert.
        sinkhorn_first: balance the proposal of the first round in expectation. Not of later ones: nobody may be left to
            take an expert that most rows have had, and then no proposal is balanced.
        how: the rest of what `strategy.draw` takes: temperature, importance, ...

    Returns:
        The draws of all rounds, and the weights.

    Example:
        >>> import equipoise as eq
        >>> strategy = eq.STRATEGIES["gm-iw"]
        >>> log_p = torch.log_softmax(torch.randn(6, 3), -1)
        >>> rounds = sample_rounds(log_p, strategy, [strategy.draw_noise([6, 3]) for _ in range(2)])
        >>> rounds.z.shape, rounds.z.flatten().bincount().tolist()
        (torch.Size([6, 2]), [4, 4, 4])

    References:
        Plackett, The analysis of permutations (1975).
        Kool, van Hoof, Welling, Stochastic beams and where to find them: the Gumbel-top-k trick for sampling sequences
        without replacement (2019).
    """
    check_matrix("log_p", log_p)
    check_mask(mask, log_p.shape[:-1])
    *batch, n, k = log_p.shape
    check_rounds(len(noises), k)
    log_p = log_p.detach()
    s, weight = strategy.draw(log_p, noises[0], capacity=capacity, mask=mask, sinkhorn_first=sinkhorn_first, **how)
    if len(noises) == 1:
        return Rounds((s,), weight)
    samples, taken = [s], None
    slots = room = check_capacity(capacity, batch, n, k, mask, log_p.device)
    for noise in noises[1:]:
        # A strategy that knows no capacity may have used more than there is, and will not look at what is left.
        room = (room - _load(s)).clamp_min(0) + slots
        taken = _with_choice(taken, s)
        s, w = strategy.draw(_among_the_rest(log_p, taken), noise, capacity=room, mask=mask, **how)
        samples.append(s)
        weight = weight * w
    return Rounds(tuple(samples), weight)


def rounds_log_prob(log_p: Float[Tensor, "*batch n k"], samples: Sequence[Sample]) -> Float[Tensor, "*batch n"]:
    r"""Computes the log-probability that the router gives to each row's choices, in the order of the rounds.

    .. math::
        \sum_r \log p^r(z_i^r) = \sum_r \Big( \log p_{i z_i^r} - \log \sum_{j \notin \{z_i^s : s < r\}} p_{ij} \Big).

    Args:
        log_p: the router's log-probabilities, with gradient.
        samples: the draw of each round; one is an ordinary sample.

    Returns:
        With gradient; 0 for masked rows. Rows that a round dropped have the log-probability of all they drew.

    Example:
        >>> import equipoise as eq
        >>> strategy = eq.STRATEGIES["sample"]
        >>> log_p = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> rounds = sample_rounds(log_p, strategy, [eq.Noise(torch.zeros(1, 3))] * 2)
        >>> rounds.z, rounds_log_prob(log_p, rounds.samples).exp()  # 0.5 * 0.3 / (0.3 + 0.2)
        (tensor([[0, 1]]), tensor([0.3000]))
    """
    total, taken = samples[0].at_z(log_p), None
    for before, s in zip(samples, samples[1:], strict=False):
        taken = _with_choice(taken, before)
        total = total + s.at_z(_among_the_rest(log_p, taken))
    return total


def _with_choice(taken: Tensor | None, s: Sample) -> Tensor:
    """Adds a round's experts to those that a row has had; a masked row has none, since its z is no column."""
    chosen = torch.arange(s.log_q.shape[-1], device=s.z.device) == s.z.unsqueeze(-1)
    return chosen if taken is None else taken | chosen


def _among_the_rest(log_p: Tensor, taken: Tensor) -> Tensor:
    """Renormalises over the experts that a row has not had; in logarithms, where no p is lost next to one near 1."""
    return log_softmax(log_p.masked_fill(taken, -torch.inf))


def _load(s: Sample) -> Tensor:
    """Counts the rows that each expert processes, int64 [..., k]."""
    k = s.log_q.shape[-1]
    return count_groups(torch.where(s.kept, s.z, k), k + 1)[..., :k]
