# SPDX-License-Identifier: Apache-2.0
"""Gumbel-Matching: exactly balanced samples."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import check_one_of
from equipoise.assignment import Assignment
from equipoise.sampling._pairs import fits_pairs, match_pairs
from equipoise.sampling._proposal import keep_all, mix_flat, propose
from equipoise.sampling._sample import Sample
from equipoise.sampling._scope import THIS_PROCESS, Scope

Marginals = Literal["conditional", "sinkhorn", "proposal"]
"""What `log_q` of a Gumbel-Matching sample is; see `sample_gumbel_matching`."""


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
    eps: float | int | Float[Tensor, "*#batch"] = 0.0,
    coin: Float[Tensor, "*batch n"] | None = None,
    scope: Scope = THIS_PROCESS,
) -> Sample:
    r"""Draws a random balanced assignment: the best one for logits with Gumbel noise.

    .. math::
        z = \arg\max_z \sum_i \left( a_{i z_i} / \tau + g_{i z_i} \right) \quad
        \text{subject to} \quad \sum_i 1[z_i = j] \le c_j \text{ for all } j.

    Without the constraint this is independent sampling. With it the distribution approximates the Gibbs distribution
    over balanced assignments, p(z) proportional to exp(sum_i a_{i z_i} / tau), eq. (5). Its marginals are intractable,
    but the probability of z_i = j given the other rows' noise is a softmax (appendix D.4), does not depend on the row's
    own noise, and serves in their place without bias.

    That probability can be tiny where the router's is high, which makes importance weights huge. A mixture bounds them:
    with probability eps, row i's logits are replaced by `prices`, which cancel the cost of an expert to the row. Given
    the other rows' noise and coins, with d* the total score that they lose if row i takes the expert,

    .. math::
        q_{ij} = (1 - \epsilon) \, \text{softmax}_j(a_{ij} / \tau - d^*_{ij})
        + \epsilon \, \text{softmax}_j(\text{prices}_j - d^*_{ij}).

    The assignment is balanced as before. The prices are those of sinkhorn(a / tau) at this capacity: a function of the
    logits alone. (Those of the solved assignment depend on row i's own noise, and would make q wrong.) With slack an
    expert below its capacity has price 0 and a free slot costs nothing, so all experts stay about equally likely.

    Bound: with u_j = prices_j - d*_ij and D_i the range of u over the k experts that row i can take, its flat component
    is 1 / sum_l exp(u_l - u_j) >= 1 / (k exp(D_i)) for every j. Hence p/q <= p / (eps / (k exp(D_i))) <=
    (k / eps) exp(D_i). D_i measures how far the other rows' noise moves the costs of experts from Sinkhorn's prices.

    Args:
        logits: unnormalised log-probabilities a; -inf forbids a pair. They may be the router's, or those of any other
            proposal.
        gumbel: standard Gumbel noise, from `draw_gumbel`.
        temperature: tau >= 0, one number or one for each problem. 0 is the deterministic assignment of the logits
            (BASE layers).
        capacity: rows an expert may take; together they hold every row. None: ceil(rows that are not masked / k); or
            one for all, one for each expert, or one for each problem and expert.
        mask: False for rows that take no expert (padding).
        sinkhorn_first: match sinkhorn(a / tau) in place of a / tau. Without slack the assignment is the same.
        marginals: what `log_q` is. "conditional": the exact probability given the other rows' noise. "sinkhorn":
            sinkhorn(a / tau) at this capacity, which approximates the marginals. "proposal": softmax(a / tau), as if
            nothing had been balanced. With eps > 0, the same of each component, mixed.
        eps: the mixture weight, in [0, 1), one number or one for each problem; 0 where the temperature is 0.
        coin: uniform numbers, one a row: rows below eps draw from the flat component. Needed where eps > 0.
        scope: the rows that share the capacity: those given here, or those of several ranks.

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
    proposal = propose(logits, gumbel, temperature, mask, sinkhorn_first=sinkhorn_first, scope=scope)
    *batch, n, k = logits.shape
    slots = scope.slots(capacity, [*batch, n, k], mask, logits.device)
    proposal = mix_flat(proposal, eps, coin, [*batch, n], slots, scope)
    sinkhorns = marginals == "sinkhorn" and not (sinkhorn_first and capacity is None)
    if scope.ranks == 1 and fits_pairs(proposal, gumbel):
        found = match_pairs(proposal, gumbel, slots, conditional=marginals == "conditional")
        if found is not None:
            z, log_q, prices, gap = found
            log_q = scope.sinkhorn(proposal.logits, capacity).log_p if sinkhorns else log_q
            kept, keep_weight = keep_all(None, z, log_q.dtype)
            return Sample(z, log_q, kept, keep_weight, None, slots, prices=prices, gap=gap, scope=scope)
    scores = proposal.scores(gumbel)
    a = scope.assign(scores, slots, mask=mask)
    if proposal.deterministic is True:
        log_q = torch.zeros_like(scores)  # one-hot below, whatever the marginals
    elif marginals == "conditional":
        log_q = proposal.log_mixture(price_of_room(scores, a, proposal.logits.dtype, scope))
    elif not sinkhorns:  # the proposal, which has Sinkhorn's marginals if it was balanced
        log_q = proposal.log_mixture()
    elif proposal.flat is None:
        log_q = scope.sinkhorn(proposal.logits, capacity, mask=mask).log_p
    else:
        log_q = proposal.log_mixture(proposal.flat.prices.mT)
    log_q = proposal.log_q(log_q, a.z)
    kept, keep_weight = keep_all(mask, a.z, log_q.dtype)
    return Sample(
        a.z,
        log_q,
        kept,
        keep_weight,
        mask,
        a.capacity,
        proposal.deterministic,
        prices=a.prices,
        gap=a.gap,
        scope=scope,
    )


def price_of_room(scores: Tensor, a: Assignment, dtype: torch.dtype, scope: Scope = THIS_PROCESS) -> Tensor:
    """Returns d*_jz for each row, [..., k, n]: the others' loss of score if the row takes expert j in place of z_i.

    It does not depend on the row's own scores but for a constant (eq. 8), and q(z_i = j | A, G_-i) is the softmax over
    j of the row's logits less this cost: v*|z_ij=1 - g_ij of eq. (9), where the row's own noise cancels.
    """
    *batch, n, k = scores.shape
    taken = a.z.clamp_max(k - 1).unsqueeze(-2).expand(*batch, k, n)
    return scope.detour_costs(scores, a).to(dtype).gather(-1, taken)
