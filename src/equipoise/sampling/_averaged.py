# SPDX-License-Identifier: Apache-2.0
"""Gumbel-Matching with conditionals averaged over several solves, of which one is used."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import check_floating, check_matrix, check_same_device, check_shape, checked_draws
from equipoise.sampling._checks import check_solves_of
from equipoise.sampling._gumbel_matching import price_of_room
from equipoise.sampling._proposal import keep_all, mix_flat, propose
from equipoise.sampling._sample import Sample
from equipoise.sampling._scope import THIS_PROCESS, Scope


@torch.no_grad()
def sample_averaged(
    logits: Float[Tensor, "*batch n k"],
    gumbel: Float[Tensor, "*batch m n k"],
    pick: Float[Tensor, "*batch"],
    *,
    temperature: float | int | Float[Tensor, "*#batch"] = 1.0,
    capacity: int | Sequence[int] | Int[Tensor, "..."] | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
    sinkhorn_first: bool = False,
    eps: float | int | Float[Tensor, "*#batch"] = 0.0,
    coin: Float[Tensor, "*batch m n"] | None = None,
    scope: Scope = THIS_PROCESS,
) -> Sample:
    r"""Draws one of m balanced assignments, and takes the mean of their conditionals as its probability.

    .. math::
        z = \text{GM}(A, G^{(l)}), \quad l \sim \text{Uniform}\{1, \ldots, m\}, \qquad
        q_i(j) = \frac{1}{m} \sum_{l=1}^m P(z_i = j | A, G^{(l)}_{-i}).

    Given the other rows' noise in all m matrices, row i's expert is a draw from this mixture, because the row's own
    noise and the choice of the matrix are independent of the others' noise. So importance weights with the mixture are
    unbiased, as are those with the single conditional of `sample_gumbel_matching`. As m grows, the mixture approaches
    the marginal of z_i, whose weights vary least. All rows use the same matrix, so the assignment is balanced. A draw
    takes m solves and one evaluation of the experts.

    Args:
        logits: unnormalised log-probabilities a; -inf forbids a pair. They may be the router's, or those of any other
            proposal.
        gumbel: standard Gumbel noise, from `draw_gumbel`, m matrices for each problem.
        pick: a uniform number in [0, 1) for each problem: assignment number floor(m * pick), from 0, is used.
        temperature: tau >= 0, one number or one for each problem. 0 is the deterministic assignment of the logits.
        capacity: rows an expert may take; together they hold every row. None: ceil(rows that are not masked / k); or
            one for all, one for each expert, or one for each problem and expert.
        mask: False for rows that take no expert (padding).
        sinkhorn_first: match sinkhorn(a / tau) in place of a / tau.
        eps: the mixture weight of the flat component of `sample_gumbel_matching`, in [0, 1); 0 where the temperature
            is 0.
        coin: uniform numbers, one a row and solve: rows below eps draw from the flat component. Needed where eps > 0.
        scope: the rows that share the capacity: those given here, or those of several ranks, whose `pick` is then one.

    Returns:
        The sample; every row is kept. Prices and gap are those of the assignment that is used.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0], [0.0, 5.0]])
        >>> gumbel = torch.tensor([[[9.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [9.0, 0.0]]])
        >>> sample_averaged(logits, gumbel, torch.tensor(0.3)).z, sample_averaged(logits, gumbel, torch.tensor(0.6)).z
        (tensor([0, 1]), tensor([1, 0]))

    References:
        Owen, Zhou, Safe and effective importance sampling (2000), for mixtures as proposals.
    """
    check_matrix("logits", logits)
    *batch, n, k = logits.shape
    m = check_solves_of(gumbel, [*logits.shape])
    check_shape("pick", pick, batch, "one number for each problem")
    check_floating("pick", pick)
    check_same_device("pick", pick, "logits", logits)
    pick = checked_draws("pick", pick)
    proposal = propose(logits, gumbel, temperature, mask, sinkhorn_first=sinkhorn_first, scope=scope, solves=True)
    slots = scope.slots(capacity, [*batch, n, k], mask, logits.device)
    proposal = mix_flat(proposal, eps, coin, [*batch, m, n], slots, scope)
    each = proposal.over_solves()
    scores = each.scores(gumbel)
    slots_of_each = slots.unsqueeze(-2).expand(*batch, m, k)
    a = scope.assign(scores, slots_of_each, mask=None if mask is None else mask.unsqueeze(-2).expand(*batch, m, n))
    log_q_of_each = each.log_mixture(price_of_room(scores, a, proposal.logits.dtype, scope))
    log_q = log_q_of_each.logsumexp(-3) - math.log(m)

    used = (scope.first(pick) * m).long().clamp_max(m - 1)  # m times the largest number below 1 may round up to m
    z = a.z.take_along_dim(used[..., None, None], -2).squeeze(-2)
    prices = a.prices.take_along_dim(used[..., None, None], -2).squeeze(-2)
    gap = a.gap.take_along_dim(used[..., None], -1).squeeze(-1)
    log_q = proposal.log_q(log_q, z)
    kept, keep_weight = keep_all(mask, z, log_q.dtype)
    return Sample(z, log_q, kept, keep_weight, mask, slots, proposal.deterministic, prices=prices, gap=gap, scope=scope)
