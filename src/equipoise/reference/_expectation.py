# SPDX-License-Identifier: Apache-2.0
"""The objective E_{z ~ p}[(1/n) sum_i f(x_i, z_i)] and its gradient, exactly, in two ways.

Every estimator in the library estimates this gradient (eq. 2). The closed form uses that the expectation of a sum needs
only the marginals; the enumeration does not, and so checks the step.

Legend: n rows (datapoints), k columns (experts).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.reference._checks import check_one_problem
from equipoise.reference._distribution import independent_distribution
from equipoise.reference._enumeration import assignment_values


def exact_expectation(log_p: Float[Tensor, "n k"], losses: Float[Tensor, "n k"]) -> Float[Tensor, ""]:
    """Computes E_{z ~ p}[(1/n) sum_i f(x_i, z_i)] as (1/n) sum_ij p_ij f_ij.

    Args:
        log_p: the router's log-probabilities; each row's exponentials sum to 1.
        losses: f(x_i, j) for every row and expert.

    Returns:
        The expectation; its backward reaches whatever `log_p` (the router) and `losses` (the experts) came from.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> log_p = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).double().log()
        >>> round(reference.exact_expectation(log_p, torch.tensor([[0.0, 1.0], [0.0, 2.0]])).item(), 12)
        1.0
    """
    check_one_problem("log_p", log_p)
    check_one_problem("losses", losses)
    return (log_p.double().exp() * losses.double()).sum(1).mean()


def enumerated_expectation(log_p: Float[Tensor, "n k"], losses: Float[Tensor, "n k"]) -> Float[Tensor, ""]:
    """Computes the same as `exact_expectation`, as sum_z prod_i p(z_i) times (1/n) sum_i f(x_i, z_i).

    Args:
        log_p: the router's log-probabilities; each row's exponentials sum to 1.
        losses: f(x_i, j) for every row and expert.

    Returns:
        The expectation; its backward reaches whatever `log_p` and `losses` came from.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> log_p = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).double().log()
        >>> round(reference.enumerated_expectation(log_p, torch.tensor([[0.0, 1.0], [0.0, 2.0]])).item(), 12)
        1.0
    """
    check_one_problem("losses", losses)
    joint = independent_distribution(log_p)
    return joint.expectation(assignment_values(losses.double(), joint.z) / len(losses))


def exact_logit_gradient(logits: Float[Tensor, "n k"], losses: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Computes the gradient of the objective with respect to the router's logits, without autograd.

    With p_i = softmax(a_i), d/da_ij E = (1/n) p_ij (f_ij - sum_j' p_ij' f_ij').

    Args:
        logits: a, the router's logits.
        losses: f(x_i, j) for every row and expert.

    Returns:
        The gradient, one entry for each logit.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> reference.exact_logit_gradient(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])).tolist()
        [[-0.25, 0.25]]
    """
    check_one_problem("logits", logits)
    check_one_problem("losses", losses)
    p = logits.detach().double().softmax(1)
    f = losses.detach().double()
    return p * (f - (p * f).sum(1, keepdim=True)) / len(p)


def exact_gradient(
    log_p: Float[Tensor, "n k"], losses: Float[Tensor, "n k"], parameters: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Computes the gradient of the objective with respect to any parameters of router and experts.

    Args:
        log_p: the router's log-probabilities, a differentiable function of its parameters.
        losses: f(x_i, j) for every row and expert, a differentiable function of the experts' parameters.
        parameters: the tensors to differentiate by, of either.

    Returns:
        One gradient a parameter; zero for a parameter that neither depends on.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> logits, scale = torch.zeros(1, 2, requires_grad=True), torch.ones((), requires_grad=True)
        >>> losses = scale * torch.tensor([[0.0, 1.0]])
        >>> router, expert = reference.exact_gradient(logits.log_softmax(1), losses, [logits, scale])
        >>> router.tolist(), expert.item()
        ([[-0.25, 0.25]], 0.5)
    """
    objective = exact_expectation(log_p, losses)
    return torch.autograd.grad(objective, list(parameters), allow_unused=True, materialize_grads=True)
