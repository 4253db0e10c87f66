# SPDX-License-Identifier: Apache-2.0
"""Independent sampling: no capacity."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise.sampling._pairs import draw_rows
from equipoise.sampling._proposal import keep_all, mix_flat, propose
from equipoise.sampling._sample import Sample
from equipoise.sampling._scope import THIS_PROCESS, Scope


@torch.no_grad()
def sample_independent(
    logits: Float[Tensor, "*batch n k"],
    gumbel: Float[Tensor, "*batch n k"],
    *,
    temperature: float | int | Float[Tensor, "*#batch"] = 1.0,
    mask: Bool[Tensor, "*batch n"] | None = None,
    sinkhorn_first: bool = False,
    eps: float | int | Float[Tensor, "*#batch"] = 0.0,
    coin: Float[Tensor, "*batch n"] | None = None,
    scope: Scope = THIS_PROCESS,
) -> Sample:
    r"""Draws an expert for each row independently, without a capacity.

    .. math::
        z_i = \arg\max_j \left( a_{ij} / \tau + g_{ij} \right) \sim q(z_i = j) = \text{softmax}_j(a_{ij} / \tau).

    This is a pure function of logits and noise. No expert has a limit, so an expert may get any number of rows.

    With probability eps a row draws from the uniform distribution over the experts that are allowed to it, so that
    q = (1 - eps) softmax(a / tau) + eps / k, and no importance weight exceeds k / eps.

    Args:
        logits: unnormalised log-probabilities a; -inf forbids a pair. They may be the router's, or those of any other
            proposal.
        gumbel: standard Gumbel noise, from `draw_gumbel`.
        temperature: tau >= 0, one number or one for each problem. 0 takes the largest logit, without noise.
        mask: False for rows that take no expert (padding).
        sinkhorn_first: draw from sinkhorn(a / tau), whose columns sum to n / k, in place of softmax(a / tau).
        eps: the mixture weight, in [0, 1), one number or one for each problem; 0 where the temperature is 0.
        coin: uniform numbers, one a row: rows below eps draw from the uniform component. Needed where eps > 0.
        scope: the rows that `sinkhorn_first` balances: those given here, or those of several ranks.

    Returns:
        The sample; `log_q` is exact.

    Example:
        >>> logits = torch.tensor([[0.0, 5.0], [5.0, 0.0]])
        >>> sample_independent(logits, torch.zeros(2, 2)).z
        tensor([1, 0])

    References:
        Kool, Maddison, Mnih, Unbiased gradient estimation with balanced assignments for mixtures of experts (2021),
        section 2.
    """
    proposal = propose(logits, gumbel, temperature, mask, sinkhorn_first=sinkhorn_first, scope=scope)
    proposal = mix_flat(proposal, eps, coin, [*logits.shape[:-1]])
    z, log_q = draw_rows(proposal, gumbel)
    kept, keep_weight = keep_all(mask, z, log_q.dtype)
    return Sample(z, log_q, kept, keep_weight, mask, deterministic=proposal.deterministic, scope=scope)
