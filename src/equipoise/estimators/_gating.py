# SPDX-License-Identifier: Apache-2.0
"""Differentiable gating: the router learns through the scale of its expert's output.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_shape
from equipoise.estimators._checks import check_one_round
from equipoise.estimators._log_p_checks import check_log_p
from equipoise.estimators._reinforce import active_rows, check_rows, checked_weight, mean_over_rows, only
from equipoise.estimators._weighted import weighted_mean
from equipoise.sampling import Sample


def gate(log_p: Float[Tensor, "*batch n k"], s: Sample) -> Float[Tensor, "*batch n"]:
    """Computes the factor that multiplies each row's expert output: p(z_i), at temperature 1, with gradient.

    The prediction is `gate(log_p, s)[..., None] * expert_z(x)` (section 3.1 of the paper). Use it at test time too,
    with a sample drawn at temperature 0, which takes the expert of largest probability.

    Args:
        log_p: the router's log-probabilities, `log_softmax(logits)` at temperature 1, with gradient.
        s: the sample.

    Returns:
        Probabilities; 0 for masked rows. A row that was dropped has the gate of the expert it drew.

    Example:
        >>> import equipoise.sampling as sampling
        >>> log_p = torch.tensor([[0.25, 0.75]]).log()
        >>> gate(log_p, sampling.sample_independent(log_p, torch.zeros(1, 2), temperature=0.0))
        tensor([0.7500])
    """
    check_one_round("gate", len(s.rounds))
    check_shape("log_p", log_p, s.log_q.shape, "that of the logits that were sampled")
    check_log_p(log_p, s.mask)
    p_z = s.at_z(log_p).exp()
    return p_z if s.mask is None else torch.where(s.mask, p_z, 0.0)


def gated_loss(
    log_p: Float[Tensor, "*batch n k"],
    s: Sample,
    losses: Float[Tensor, "*batch n"],
    *,
    weight: Float[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch"]:
    r"""Averages the losses of gated predictions, with weights for how the experts were sampled.

    .. math::
        \frac{1}{n} \sum_i w_i f_i, \qquad f_i = f\left(p(z_i | x_i) \cdot \text{expert}_{z_i}(x_i)\right).

    Approximates: the gradient of E[(1/n) sum_i f_i] under the router, but not the part through z ~ p.
    With: the gradient of the weighted mean, through the gates and the experts. Weights are detached.
    Requires: `losses` that carry gradient through `gate`. In practice also a balance loss (section 3.1).
    Unbiased when: never for the router; for the experts, when the weights are (see `importance_weight`).

    Args:
        log_p: the router's log-probabilities, `log_softmax(logits)` at temperature 1.
        s: the sample. Perturbing log p with Gumbel noise scaled by tau is sampling at temperature tau.
        losses: f_i, with gradient.
        weight: w; None is `importance_weight(log_p, s)`.

    Returns:
        [...], one number for each problem.

    Example:
        >>> import equipoise.sampling as sampling
        >>> log_p = torch.tensor([[0.5, 0.5]]).log()
        >>> s = sampling.sample_independent(log_p, torch.tensor([[1.0, 0.0]]))
        >>> gated_loss(log_p, s, (gate(log_p, s) * 3.0 - 1.0) ** 2)
        tensor(0.2500)
    """
    check_rows(log_p, s, losses, weight)
    weight = checked_weight(log_p, s, weight)
    found = weighted_mean(s, losses, weight)
    return mean_over_rows(only(active_rows(s, weight), weight * losses), s) if found is None else found
