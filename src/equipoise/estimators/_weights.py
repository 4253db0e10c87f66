# SPDX-License-Identifier: Apache-2.0
"""Weights that correct for how the experts were sampled.

A weight is the product of two corrections. The ratio p/q says that expert z_i was drawn from the proposal, not from the
router. The other says that some of the rows that drew an expert were dropped.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_shape, reads_values
from equipoise.estimators._checks import check_one_round
from equipoise.estimators._log_p_checks import check_stochastic, checked_log_p, checked_log_ratio
from equipoise.sampling import Sample


def importance_weight(log_p: Float[Tensor, "*batch n k"], s: Sample) -> Float[Tensor, "*batch n"]:
    r"""Computes the weight that makes a sum over sampled rows unbiased for the router.

    .. math::
        w_i = \frac{p(z_i | x_i)}{q(z_i)} \cdot \delta_i \cdot \frac{n_{z_i}}{\min\{n_{z_i}, c_{z_i}\}}.

    Approximates: the gradient of E[(1/n) sum_i f(x_i, z_i)] under the router, when used by `reinforce`.
    With: w_i times each row's term, eq. (2), (3) and (6) of the paper.
    Requires: q > 0 wherever p > 0; a sample drawn at temperature > 0.
    Unbiased when: `log_q` is the probability that was really used, marginally or given the other rows' noise.

    Args:
        log_p: the router's log-probabilities, `log_softmax(logits)` at temperature 1.
        s: the sample.

    Returns:
        The weights, detached; 0 for rows that were dropped or are masked.

    Example:
        >>> import equipoise.sampling as sampling
        >>> logits = torch.tensor([[0.0, 5.0], [5.0, 0.0]])
        >>> s = sampling.sample_independent(logits, torch.zeros(2, 2))
        >>> importance_weight(torch.log_softmax(logits, -1), s)
        tensor([1., 1.])
    """
    return probability_ratio(log_p, s, finite=True) * per_expert(s)


@torch.no_grad()
def probability_ratio(
    log_p: Float[Tensor, "*batch n k"], s: Sample, *, finite: bool = False
) -> Float[Tensor, "*batch n"]:
    """Computes p/q at the sampled experts, detached; 1 for rows that are dropped or masked.

    Args:
        log_p: the router's log-probabilities, `log_softmax(logits)` at temperature 1.
        s: the sample, drawn at temperature > 0.
        finite: whether a ratio that overflows is an error, as in `importance_weight` and the strategies; False: it is
            returned as inf.

    Returns:
        [..., n], at least float32.

    Example:
        >>> import equipoise.sampling as sampling
        >>> log_p = torch.tensor([[0.8, 0.2]]).log()
        >>> s = sampling.sample_independent(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))  # drawn with probability 1/2
        >>> probability_ratio(log_p, s)
        tensor([1.6000])
    """
    check_one_round("weight=None", len(s.rounds))
    check_shape("log_p", log_p, s.log_q.shape, "that of the logits that were sampled")
    if isinstance(s.deterministic, bool):
        check_stochastic(s.deterministic)
    deterministic = None if isinstance(s.deterministic, bool) else s.deterministic
    log_p_z, log_q_z = checked_log_p(log_p, s.mask, s.at_z(log_p.detach())), s.at_z(s.log_q)
    return checked_log_ratio(log_p_z.to(log_q_z.dtype), log_q_z, deterministic, finite).exp()


def per_expert(s: Sample) -> Float[Tensor, "*batch n"]:
    """Makes up for dropped rows within each expert: kept times n_j / min(n_j, c_j), eq. (3).

    Example:
        >>> import equipoise.sampling as sampling
        >>> logits = torch.tensor([[5.0, 0.0], [5.0, 0.0], [0.0, 5.0]])
        >>> s = sampling.sample_skip(logits, torch.zeros(3, 2), torch.tensor([0.1, 0.2, 0.3]), capacity=1)
        >>> per_expert(s)
        tensor([2., 0., 1.])
    """
    # On the CPU a look at the flags is free, and bool times float is not.
    if reads_values(s.kept) and s.kept.numel() > 0 and bool(s.kept.view(torch.uint8).amin()):
        return s.keep_weight
    return s.keep_weight * s.kept


def over_batch(s: Sample) -> Float[Tensor, "*batch n"]:
    """Makes up for dropped rows over the whole batch: kept times n / sum(kept), the average over what is left.

    Biased: rows of crowded experts are dropped more often than others, and nothing makes up for that.

    Example:
        >>> import equipoise.sampling as sampling
        >>> logits = torch.tensor([[5.0, 0.0], [5.0, 0.0], [0.0, 5.0]])
        >>> s = sampling.sample_skip(logits, torch.zeros(3, 2), torch.tensor([0.1, 0.2, 0.3]), capacity=1)
        >>> over_batch(s)
        tensor([1.5000, 0.0000, 1.5000])
    """
    left = s.scope.total(s.kept.sum(-1, keepdim=True)).clamp_min(1).to(s.keep_weight.dtype)
    n = s.scope.count(s.z.shape[-1]) if s.mask is None else s.scope.total(s.mask.sum(-1, keepdim=True))
    return s.kept * (n / left)
