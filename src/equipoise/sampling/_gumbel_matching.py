# SPDX-License-Identifier: Apache-2.0
"""Gumbel-Matching: exactly balanced samples."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import check_one_of
from equipoise.assignment import Assignment, assign, conditional_values
from equipoise.balancing import sinkhorn
from equipoise.ops import log_softmax
from equipoise.sampling._proposal import keep_all, propose
from equipoise.sampling._sample import Sample

Marginals = Literal["conditional", "sinkhorn", "proposal"]


@torch.no_grad()
def sample_gumbel_matching(
    logits: Float[Tensor, "*batch n k"],
    gumbel: Float[Tensor, "*batch n k"],
    *,
    temperature: float | int | Float[Tensor, "*#batch"] = 1.0,
    capacity: int | Sequence[int] | Int[Tensor, "..."] | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
    sinkhorn_first: bool = False,
    marginals: Marginals = "conditional",
) -> Sample:
    r"""Draws a balanced assignment: the best one for perturbed logits.

    .. math::
        z = \arg\max_z \sum_i \left( a_{i z_i} / \tau + g_{i z_i} \right) \quad
        \text{subject to} \quad \sum_i 1[z_i = j] \le c_j \text{ for all } j.

    Without the constraint this is independent sampling. With it the distribution approximates the Gibbs distribution
    over balanced assignments, p(z) proportional to exp(sum_i a_{i z_i} / tau), eq. (5). Its marginals are intractable,
    but the probability of z_i = j given the other rows' noise is a softmax (appendix D.4), does not depend on the row's
    own noise, and serves in their place without bias.

    Args:
        logits: unnormalised log-probabilities a; -inf forbids a pair. The proposal may be any: the router's logits, or
            others.
        gumbel: standard Gumbel noise, from `draw_gumbel`.
        temperature: tau >= 0, one number or one for each problem. 0 is the deterministic assignment of the logits
            (BASE layers).
        capacity: rows an expert may take; together they hold every row. None: ceil(rows that are not masked / k); or
            one for all, one for each expert, or one for each problem and expert.
        mask: False for rows that take no expert (padding).
        sinkhorn_first: match sinkhorn(a / tau) in place of a / tau. The same assignment where there is no slack.
        marginals: what `log_q` is. "conditional": the exact probability given the other rows' noise. "sinkhorn":
            sinkhorn(a / tau) at this capacity, which approximates the marginals. "proposal": softmax(a / tau), as if
            nothing had been balanced.

    Returns:
        The sample; every row is kept.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0], [0.0, 5.0]])
        >>> s = sample_gumbel_matching(logits, torch.zeros(2, 2))
        >>> s.z
        tensor([0, 1])

    References:
        Kool, Maddison, Mnih, Unbiased gradient estimation with balanced assignments for mixtures of experts (2021),
        section 2.2 and appendix D.
        Mena, Belanger, Linderman, Snoek, Learning latent permutations with Gumbel-Sinkhorn networks (2018).
        Lewis, Bhosale, Dettmers, Goyal, Zettlemoyer, BASE layers (2021).
    """
    check_one_of("marginals", marginals, get_args(Marginals))
    proposal = propose(logits, gumbel, temperature, mask, sinkhorn_first=sinkhorn_first)
    scores = proposal.scores(gumbel)
    a = assign(scores, capacity, mask=mask)
    if proposal.deterministic is True:
        log_q = torch.zeros_like(scores)  # one-hot below, whatever the marginals
    elif marginals == "conditional":
        log_q = _conditional_log_q(scores, a, proposal.noise(gumbel)).to(proposal.logits.dtype)
    elif marginals == "sinkhorn" and not (sinkhorn_first and capacity is None):  # else the proposal is just that
        log_q = sinkhorn(proposal.logits, capacity, mask=mask).log_p
    else:
        log_q = log_softmax(proposal.logits)
    log_q = proposal.log_q(log_q, a.z)
    kept, keep_weight = keep_all(mask, a.z, log_q.dtype)
    return Sample(
        a.z, log_q, kept, keep_weight, mask, a.capacity, proposal.deterministic, True, prices=a.prices, gap=a.gap
    )


def _conditional_log_q(scores: Tensor, a: Assignment, noise: Tensor) -> Tensor:
    """Returns log q(z_i = j | A, G_-i), eq. (9): the softmax over j of v*|z_ij=1 - g_ij, where g_i cancels."""
    return log_softmax(conditional_values(scores, a) - noise)
