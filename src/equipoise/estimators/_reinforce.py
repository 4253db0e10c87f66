# SPDX-License-Identifier: Apache-2.0
"""The score-function estimator, for router and experts at once.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise._core import check_critic, check_floating, check_shape, reads_values
from equipoise.estimators._checks import check_baseline, check_constant, check_not_the_losses, check_one_round
from equipoise.estimators._log_p_checks import checked_log_p
from equipoise.estimators._weighted import weighted_mean
from equipoise.estimators._weights import importance_weight
from equipoise.sampling import Sample


def reinforce(
    log_p: Float[Tensor, "*batch n k"],
    s: Sample,
    losses: Float[Tensor, "*batch n"],
    *,
    baseline: float | int | Float[Tensor, "..."] = 0.0,
    weight: Float[Tensor, "*batch n"] | None = None,
    critic: Float[Tensor, "*batch n k"] | None = None,
) -> Float[Tensor, "*batch"]:
    r"""Builds a scalar whose backward pass is the gradient estimate for the router and the experts.

    .. math::
        \nabla = \frac{1}{n} \sum_i w_i \left[ (f_i - b) \nabla \log p(z_i | x_i) + \nabla f_i \right],
        \qquad \text{value} = \frac{1}{n} \sum_i w_i f_i.

    With a critic c, a prediction of f for every pair, the value of c at z_i is subtracted too, and the exact
    expectation of c is added back, over all experts and all rows, dropped ones included:

    .. math::
        \nabla = \frac{1}{n} \sum_i \left\{ w_i \left[ (f_i - b - c_{i z_i}) \nabla \log p(z_i | x_i) +
        \nabla f_i \right] + \nabla \sum_j p_{ij} c_{ij} \right\}, \qquad c \text{ detached}.

    The score-function term adds gradient and no value, so you can log the result as it is. Weights, the baseline, and
    the loss inside the score-function term are detached. Rows that were dropped or are masked contribute nothing,
    whatever their losses hold.

    Approximates: the gradient of E[(1/n) sum_i f(x_i, z_i)] under the router.
    With: the formula above, which is eq. (2), (3) or (6) of the paper, depending on the sample and its weights.
    Requires: `losses[i]` depends on no other row's expert; f need not be differentiable in anything.
    Unbiased when: the weights are (see `importance_weight`) and b for row i does not depend on z_i. Under skip and
    Gumbel-Matching the other rows' experts depend on z_i, so a baseline that depends on the rest of the batch is
    biased there; statistics of past batches are always allowed. The same holds for row i of the critic, which may
    differ by expert but may not depend on which one was drawn: predict first, fit afterwards.

    Not detected: a baseline that was computed from the losses of this batch, such as `losses.mean()`. A tensor has no
    record of what it was computed from, so only the losses themselves are recognised and refused. Under a capacity such
    a baseline is **biased**, without a warning. `leave_one_out_baseline`, which takes the sample, refuses there;
    `equipoise audit --baseline leave-one-out` measures the bias.

    Args:
        log_p: the router's log-probabilities, `log_softmax(logits)` at temperature 1, with gradient.
        s: the sample. If a row has several experts, log p is that of all of them, and `weight` must be given.
        losses: f(x_i, z_i), with or without gradient. For a loss that rows share, expand it.
        baseline: b: a number, one for each problem [...] or one for each row [..., n]; not a mean over this batch, see
            above.
        weight: w; None is `importance_weight(log_p, s)`.
        critic: c, finite, for example from a `RegressionCritic`; None: no critic. If you pass a baseline too, it should
            predict what the critic leaves of the losses: 0 for a good critic.

    Returns:
        [...], one number for each problem: sum or average it and call backward.

    Example:
        >>> import equipoise.sampling as sampling
        >>> logits = torch.tensor([[0.0, 0.0]], requires_grad=True)
        >>> log_p = torch.log_softmax(logits, -1)
        >>> s = sampling.sample_independent(log_p, torch.tensor([[1.0, 0.0]]))
        >>> loss = reinforce(log_p, s, losses=torch.tensor([3.0]), baseline=1.0)
        >>> loss.backward()
        >>> loss, logits.grad
        (tensor(3., grad_fn=...), tensor([[ 1., -1.]]))

    References:
        Williams, Simple statistical gradient-following algorithms for connectionist reinforcement learning (1992).
        Kool, Maddison, Mnih, Unbiased gradient estimation with balanced assignments for mixtures of experts (2021),
        appendix B.
    """
    check_rows(log_p, s, losses, weight)
    if critic is not None:
        check_one_round("critic", len(s.rounds))
        check_critic(critic, log_p.shape)
    weight = checked_weight(log_p, s, weight)
    with torch.no_grad():
        advantage = losses - _per_row(baseline, losses)
        if critic is not None:
            advantage = advantage - s.at_z(critic)
    log_prob = s.log_prob(log_p)
    found = weighted_mean(s, losses, weight, log_prob, advantage)
    if found is not None:
        return found if critic is None else found + mean_over_rows(expected_critic(log_p, critic, s.mask), s)
    active = active_rows(s, weight)
    with torch.no_grad():
        score = only(active, weight * advantage)
    terms = only(active, weight * losses) + score_function(log_prob, score, active)
    if critic is not None:
        terms = terms + expected_critic(log_p, critic, s.mask)
    return mean_over_rows(terms, s)


def score_function(
    log_prob: Float[Tensor, "*batch n"],
    coefficient: Float[Tensor, "*batch n"],
    active: Bool[Tensor, "*batch n"] | None,
) -> Float[Tensor, "*batch n"]:
    """Computes a term of value 0 whose gradient is coefficient_i times that of log p(z_i).

    Args:
        log_prob: log p of what each row drew, with gradient; it may be -inf where a row has no term.
        coefficient: what multiplies its gradient, detached: weight times advantage.
        active: rows that have a term; None for all of them.

    Returns:
        A term for each row.

    Example:
        >>> log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
        >>> term = score_function(log_prob, torch.tensor([3.0, 0.5]), None)
        >>> term.sum().backward()
        >>> term.tolist(), log_prob.grad
        ([0.0, 0.0], tensor([3.0000, 0.5000]))
    """
    log_prob = only(active, log_prob)
    return coefficient * (log_prob - log_prob.detach())


def expected_critic(
    log_p: Float[Tensor, "*batch n k"], critic: Float[Tensor, "*batch n k"], counted: Bool[Tensor, "*batch n"] | None
) -> Float[Tensor, "*batch n"]:
    """Computes a term of value 0 whose gradient is that of the expected critic, sum_j p_ij c_ij.

    Args:
        log_p: the router's log-probabilities, with gradient.
        critic: c; detached here.
        counted: rows that have a term; the others may hold anything. None for all of them.

    Returns:
        A term for each row.

    Example:
        >>> logits = torch.zeros(1, 2, requires_grad=True)
        >>> term = expected_critic(torch.log_softmax(logits, -1), torch.tensor([[0.0, 4.0]]), None)
        >>> term.sum().backward()
        >>> term.item(), logits.grad
        (0.0, tensor([[-1.,  1.]]))
    """
    critic = critic.detach()
    if counted is not None:
        log_p, critic = (torch.where(counted.unsqueeze(-1), x, 0.0) for x in (log_p, critic))
    expected = (log_p.exp() * critic).sum(-1)
    return expected - expected.detach()


def checked_weight(
    log_p: Float[Tensor, "*batch n k"], s: Sample, weight: Float[Tensor, "*batch n"] | None
) -> Float[Tensor, "*batch n"]:
    """Returns the weights, detached: importance weights if none are given. Requires rows of log_p that sum to 1."""
    return importance_weight(log_p, s) if weight is None else checked_log_p(log_p, s.mask, weight.detach())


def active_rows(s: Sample, weight: Float[Tensor, "*batch n"]) -> Bool[Tensor, "*batch n"] | None:
    """Finds the rows that have a term: not dropped, and of a weight other than 0; None if all have one.

    A row without a term may hold garbage for a loss, and -inf for log p, so it has to be cut out, not multiplied by 0.
    """
    active = s.kept & (weight != 0)
    # On the CPU a look at the values is free, and cutting nothing out takes a third of the time of the estimate.
    return None if reads_values(active) and bool(active.all()) else active


def only(active: Bool[Tensor, "*batch n"] | None, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Puts 0 where rows have no term."""
    return x if active is None else torch.where(active, x, 0.0)


def check_rows(log_p: Tensor, s: Sample, losses: Tensor, weight: Tensor | None) -> None:
    """Checks that log_p, losses and weights belong to the sample."""
    check_shape("log_p", log_p, s.log_q.shape, "that of the logits that were sampled")
    check_shape("losses", losses, s.z.shape, "one loss a row, f(x_i, z_i)")
    check_floating("losses", losses)
    if weight is not None:
        check_shape("weight", weight, s.z.shape, "one weight a row")


def _per_row(baseline: float | int | Tensor, losses: Tensor) -> float | Tensor:
    """Brings the baseline to something that broadcasts over [..., n]."""
    if not isinstance(baseline, Tensor):
        check_constant(baseline)
        return float(baseline)
    check_baseline(baseline, losses.shape)
    check_not_the_losses(baseline, losses)
    baseline = baseline.detach()
    return baseline if baseline.ndim in (0, losses.ndim) else baseline.unsqueeze(-1)


def mean_over_rows(terms: Float[Tensor, "*batch n"], s: Sample) -> Float[Tensor, "*batch"]:
    """Divides the sum over rows by the number of rows that are not masked, dropped ones included."""
    if s.mask is None:
        return terms.sum(-1) / max(terms.shape[-1], 1)
    return terms.sum(-1) / s.mask.sum(-1).clamp_min(1)
