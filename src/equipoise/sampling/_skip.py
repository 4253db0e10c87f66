# SPDX-License-Identifier: Apache-2.0
"""Independent sampling, then a uniform subset of each expert's rows."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import check_floating, check_same_device, check_shape, checked_draws, checked_slots
from equipoise.ops import count_groups
from equipoise.sampling._pairs import draw_rows, fits_pairs, keep_pairs
from equipoise.sampling._proposal import mix_flat, propose
from equipoise.sampling._sample import Sample
from equipoise.sampling._scope import THIS_PROCESS, Scope


@torch.no_grad()
def sample_skip(
    logits: Float[Tensor, "*batch n k"],
    gumbel: Float[Tensor, "*batch n k"],
    priority: Float[Tensor, "*batch n"],
    *,
    temperature: float | int | Float[Tensor, "*#batch"] = 1.0,
    capacity: int | Sequence[int] | Int[Tensor, "..."] | None = None,
    mask: Bool[Tensor, "*batch n"] | None = None,
    sinkhorn_first: bool = False,
    eps: float | int | Float[Tensor, "*#batch"] = 0.0,
    coin: Float[Tensor, "*batch n"] | None = None,
    scope: Scope = THIS_PROCESS,
) -> Sample:
    r"""Draws an expert for each row independently, then keeps at most c_j rows of expert j, chosen uniformly.

    .. math::
        z_i \sim q(\cdot | x_i), \quad n_j = \sum_i 1[z_i = j], \quad
        P(\delta_i = 1 | z) = \frac{\min\{n_{z_i}, c_{z_i}\}}{n_{z_i}}.

    The rows with the smallest `priority` are kept. With independent uniform priorities all subsets of the same size of
    an expert's rows are equally likely, whatever the order of the batch. Equal priorities are ordered by position.
    Sorting takes O(n log n), and no n x k table is built.

    With probability eps a row draws from the uniform distribution over the experts that are allowed to it, so that
    q = (1 - eps) softmax(a / tau) + eps / k >= eps / k, and p/q <= k / eps.

    Args:
        logits: unnormalised log-probabilities a; -inf forbids a pair. They may be the router's, or those of any other
            proposal.
        gumbel: standard Gumbel noise, from `draw_gumbel`.
        priority: independent uniform numbers, one a row; the rows with the smallest are kept.
        temperature: tau >= 0, one number or one for each problem. 0 takes the largest logit, without noise.
        capacity: rows an expert may keep, at least 1. None: ceil(rows that are not masked / k); or one for all, one
            for each expert, or one for each problem and expert.
        mask: False for rows that take no expert (padding).
        sinkhorn_first: draw from sinkhorn(a / tau), whose columns sum to n / k, in place of softmax(a / tau).
        eps: the mixture weight, in [0, 1), one number or one for each problem; 0 where the temperature is 0.
        coin: uniform numbers, one a row: rows below eps draw from the uniform component. Needed where eps > 0.
        scope: the rows that share the capacity: those given here, or those of several ranks.

    Returns:
        The sample. `log_q` is exact; `keep_weight` is the inverse of the probability of being kept.

    Example:
        >>> logits = torch.tensor([[0.0, 5.0], [0.0, 5.0], [5.0, 0.0]])
        >>> s = sample_skip(logits, torch.zeros(3, 2), torch.tensor([0.9, 0.2, 0.5]), capacity=1)
        >>> s.z, s.kept, s.keep_weight
        (tensor([1, 1, 0]), tensor([False,  True,  True]), tensor([2., 2., 1.]))

    References:
        Kool, Maddison, Mnih, Unbiased gradient estimation with balanced assignments for mixtures of experts (2021),
        section 2.1 and appendix C.
    """
    proposal = propose(logits, gumbel, temperature, mask, sinkhorn_first=sinkhorn_first, scope=scope)
    *batch, n, k = logits.shape
    check_shape("priority", priority, [*batch, n], "one number a row")
    check_floating("priority", priority)
    check_same_device("priority", priority, "logits", logits)
    priority = checked_draws("priority", priority)
    slots = scope.slots(capacity, [*batch, n, k], mask, logits.device)
    if capacity is not None:
        slots = checked_slots(slots)
    proposal = mix_flat(proposal, eps, coin, [*batch, n], scope=scope)
    z, log_q = draw_rows(proposal, gumbel)
    if scope.ranks == 1 and fits_pairs(proposal, gumbel, priority):
        kept, keep_weight = keep_pairs(z, priority, slots, log_q.dtype)
    else:
        kept, keep_weight = _subsample(z, priority, slots, log_q.dtype, scope, masked=mask is not None)
    return Sample(z, log_q, kept, keep_weight, mask, slots, proposal.deterministic, assigns_all=False, scope=scope)


def _subsample(
    z: Tensor, priority: Tensor, capacity: Tensor, dtype: torch.dtype, scope: Scope, *, masked: bool
) -> tuple[Tensor, Tensor]:
    """Keeps the rows of least priority, at most c_j of expert j, with n_j / min(n_j, c_j) for each (eq. (3))."""
    if masked:  # masked rows are one more expert, without capacity
        capacity = torch.nn.functional.pad(capacity, (0, 1))
    counts = scope.total(count_groups(z, capacity.shape[-1]))
    kept = scope.rank_within_groups(z, priority, counts) < capacity.gather(-1, z)
    # An expert that nobody drew has weight 0 / 1, which nobody reads; so do masked rows, whose expert keeps none.
    taken = torch.minimum(counts, capacity)
    weight = torch.where(taken > 0, counts, 0).to(dtype) / taken.clamp_min(1)
    return kept, weight.gather(-1, z)
