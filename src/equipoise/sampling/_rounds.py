# SPDX-License-Identifier: Apache-2.0
"""More than one expert a row: rounds of sampling in which a row's earlier choices are forbidden.

Legend: n rows (datapoints), k columns (experts), K rounds, ... batch dimensions.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import check_mask, check_matrix
from equipoise.ops import count_groups
from equipoise.sampling._checks import check_rounds
from equipoise.sampling._sample import Sample, among_the_rest


@runtime_checkable
class DrawsWeighted(Protocol):
    """The part of a strategy that a round needs; every `equipoise.Strategy` has it.

    Example:
        Independent draws from the router, whose weights are 1:

        >>> import equipoise as eq
        >>> class Independent:
        ...     def draw(self, log_p, noise, mask=None, **how):
        ...         return eq.sample_independent(log_p, noise, mask=mask), torch.ones(log_p.shape[:-1])
        >>> isinstance(Independent(), DrawsWeighted)
        True
        >>> log_p = torch.log_softmax(torch.randn(6, 3), -1)
        >>> s, weight = sample_rounds(log_p, Independent(), [eq.draw_gumbel([6, 3]) for _ in range(2)])
        >>> s.z_rounds.shape
        torch.Size([6, 2])
    """

    @property
    def draw(self) -> Callable[..., tuple[Sample, Tensor]]:
        """Draws one expert a row from log_p and noise, and computes each row's weight; a pure function."""
        ...


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
) -> tuple[Sample, Float[Tensor, "*batch n"]]:
    r"""Draws K different experts for each row, in K rounds of any strategy.

    .. math::
        p(z_i^1, \ldots, z_i^K) = \prod_r p^r(z_i^r), \qquad
        p^r(j) = \frac{p_{ij}}{\sum_{j' \notin \{z_i^1, \ldots, z_i^{r-1}\}} p_{ij'}}, \qquad
        w_i = \prod_r w_i^r,

    which is the Plackett-Luce distribution. Round r runs the strategy on p^r, in which the row's earlier choices are
    forbidden (-inf), with noise of its own.

    Unbiased when: the strategy is unbiased. Given the rounds before, the expectation of w_i^r h(z_i^r) over round r is
    that of h under p^r, for every h; from the last round to the first this makes w_i h(z_i^1, ..., z_i^K) unbiased
    under p.

    Capacities of rounds add up. Through round r expert j takes at most r c_j rows, so in round r at most r c_j minus
    the rows that it kept before, and K c_j in all: a round may fill the slots that earlier ones left free. With equal
    capacities that hold all rows (k c >= n) every round can be assigned, and any row can take any expert that it has
    not had. With unequal capacities, or with pairs that you forbid, there may be no assignment left; the solver then
    raises.

    Proof for equal capacities: after r rounds, spread every row evenly over its k - r other experts. If u_j <= r c rows
    have had expert j, it gets (n - u_j) / (k - r) rows, which is at most its room (r + 1) c - u_j: the left side minus
    the right grows with u_j, and at u_j = r c the inequality is n <= k c. A fractional assignment within capacity is an
    average of whole ones. This one gives every allowed pair a share, so each pair is part of a whole assignment.

    A row that a round drops has weight 0 from then on. Its later experts still process it, so that rows which attend to
    it get nearly the input that they will get when nothing is dropped. The expert that it drew stays forbidden to it.

    Args:
        log_p: the router's log-probabilities, `log_softmax(logits)` at temperature 1. No gradient flows from it.
        strategy: anything with `draw`, such as a row of `equipoise.STRATEGIES`.
        noises: one for each round, independent of each other, from the strategy's `draw_noise`.
        capacity: c: rows that an expert may take a round, as in `sample_skip`.
        mask: False for rows that take no expert.
        sinkhorn_first: balance the proposal of the first round in expectation. Later rounds are not balanced: there,
            too few rows may be left that can take an expert, and then no proposal is balanced.
        how: the rest of what `strategy.draw` takes: temperature, importance, ...

    Returns:
        What `strategy.draw` returns: the sample of the first round, with the others in `later`, and the weights, the
        product over rounds of each round's; 0 for a row that any round dropped.

    Example:
        >>> import equipoise as eq
        >>> strategy = eq.STRATEGIES["gm-iw"]
        >>> log_p = torch.log_softmax(torch.randn(6, 3), -1)
        >>> s, weight = sample_rounds(log_p, strategy, [strategy.draw_noise([6, 3]) for _ in range(2)])
        >>> s.z_rounds.shape, s.z_rounds.flatten().bincount().tolist()
        (torch.Size([6, 2]), [4, 4, 4])

    References:
        Plackett, The analysis of permutations (1975).
        Kool, van Hoof, Welling, Stochastic beams and where to find them: the Gumbel-top-k trick for sampling sequences
        without replacement (2019).
    """
    check_matrix("log_p", log_p)
    check_mask(mask, log_p.shape[:-1])
    check_rounds(len(noises), log_p.shape[-1])
    log_p = log_p.detach()
    s, weight = strategy.draw(log_p, noises[0], capacity=capacity, mask=mask, sinkhorn_first=sinkhorn_first, **how)
    if len(noises) == 1:
        return s, weight
    samples, taken = [s], None
    slots = room = s.scope.slots(capacity, log_p.shape, mask, log_p.device)
    for noise in noises[1:]:
        # A strategy that knows no capacity may have used more than there is, and will not look at what is left.
        room = (room - s.scope.total(_load(s))).clamp_min(0) + slots
        taken = s.taken(taken)
        s, w = strategy.draw(among_the_rest(log_p, taken), noise, capacity=room, mask=mask, **how)
        samples.append(s)
        weight = weight * w
    return replace(samples[0], later=tuple(samples[1:])), weight


def _load(s: Sample) -> Tensor:
    """Counts the rows that each expert processes, int64 [..., k]."""
    k = s.log_q.shape[-1]
    return count_groups(torch.where(s.kept, s.z, k), k + 1)[..., :k]
