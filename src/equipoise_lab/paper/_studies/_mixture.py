# SPDX-License-Identifier: Apache-2.0
"""The toy model in closed form (a router, two linear experts, eq. 1), and how its gradient's estimates spread.

The spread is that of many draws of the estimator that trains the models.

Legend: d draws, r runs or models (any number of batch dimensions), n rows (datapoints), k = 2 columns (experts).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.estimators import get_strategy, reinforce
from equipoise_lab.paper._task import Models, Rows, lines, router

# The router's own parameters come first.
ROUTER = slice(0, 2)


def mixture_sides(
    parameters: Models, x: Rows, y: Rows, sd: float | Float[Tensor, "*#r"]
) -> dict[str, Float[Tensor, "*r"]]:
    """Computes the three sides of eq. (1) for the models of the toy task, with experts of a standard deviation.

    It holds that elbo <= marginal_log_likelihood, with equality where the router is sure.

    Returns:
        What each mixture says about its data, averaged over datapoints; with gradient if the parameters have it.
        `log_likelihood_argmax`: of the most probable expert, log p(y | x, z*), the left side; `elbo`:
        E_z[log p(y | x, z)], what is trained; `marginal_log_likelihood`: log E_z[p(y | x, z)], the right side;
        `router_entropy`: of the router's choice, in nats; `mse_argmax`: mean squared error of the most probable expert;
        `mse_expected`: the same in expectation over the router.
    """
    a, *predictions = lines(parameters, x)
    log_p, squares = router(a), (y.unsqueeze(-1) - torch.stack(predictions, -1)).square()
    width = torch.as_tensor(sd, dtype=squares.dtype)
    spread = width[..., None, None] if width.ndim else width
    log_density = -0.5 * squares / spread.square() - spread.log() - 0.5 * math.log(2.0 * math.pi)
    p, best = log_p.exp(), log_p.argmax(-1, keepdim=True)
    return {
        "log_likelihood_argmax": log_density.gather(-1, best).squeeze(-1).mean(-1),
        "elbo": (p * log_density).sum(-1).mean(-1),
        "marginal_log_likelihood": (log_p + log_density).logsumexp(-1).mean(-1),
        "router_entropy": -(p * log_p).sum(-1).mean(-1),
        "mse_argmax": squares.gather(-1, best).squeeze(-1).mean(-1),
        "mse_expected": (p * squares).sum(-1).mean(-1),
    }


def measure_spread(
    parameters: Models, x: Rows, y: Rows, *, method: str, temperature: float, draws: int, generator: torch.Generator
) -> dict[str, Float[Tensor, "*r"]]:
    """Draws the REINFORCE estimate many times at fixed models, and compares it with the exact gradient.

    The baseline is the expected loss of each model: what the moving average of training would settle at.

    Returns:
        How the estimator behaves at each model. `ess`: effective sample size (sum w)^2 / sum w^2 over the n rows of a
        batch, as a fraction of n, mean over draws. `largest_weight`: of any row and draw, with the router's probability
        of the expert that this row drew, `p_at_largest`, and the proposal's, as it was used for the weight,
        `q_at_largest`. `possible_weight`: the largest p/q of any pair, drawn or not: what a rare draw would bring.
        `gradient_variance`: of the router's gradient, summed over its components. `row_variance`: the same for rows
        that vary on their own, (1/n^2) sum_i Var(term i), with every pair weighed by its probability, drawn or not. It
        sees the huge weights that are too rare to turn up in the draws. What it says is right where q is the
        probability that was really used and no row is dropped. `gradient_error`: mean squared distance of the router's
        gradient from the exact one, variance and squared bias. `exact`: squared norm of the router's exact gradient.
    """
    strategy = get_strategy(method)
    exact, baseline = exact_gradient(parameters, x, y)
    theta = parameters.expand(draws, *parameters.shape).clone().requires_grad_()
    a, first, second = lines(theta, x)
    log_p = router(a)
    noise = strategy.draw_noise(log_p.shape, generator=generator)
    s, weight = strategy.draw(log_p.detach(), noise, temperature=temperature)
    prediction = torch.where(s.z == 1, second, first)
    loss = reinforce(log_p, s, (y - prediction).square(), baseline=baseline.expand(draws, -1), weight=weight)
    (gradient,) = torch.autograd.grad(loss.sum(), theta)
    estimates = gradient[..., ROUTER].double()
    # The row of the largest weight of each model, over all draws, and the probabilities there.
    by_model, p, q = (
        each.transpose(0, 1).flatten(1) for each in (weight, s.at_z(log_p.detach()).exp(), s.at_z(s.log_q).exp())
    )
    largest, where = by_model.max(-1, keepdim=True)
    sizes = weight.sum(-1).square() / weight.square().sum(-1).clamp_min(1e-30) / weight.shape[-1]
    return {
        "ess": sizes.mean(0),
        "largest_weight": largest.squeeze(1),
        "possible_weight": (log_p.detach() - s.log_q).exp().amax((0, 2, 3)),
        "p_at_largest": p.gather(1, where).squeeze(1),
        "q_at_largest": q.gather(1, where).squeeze(1),
        "gradient_variance": estimates.var(0).sum(-1),
        "row_variance": _row_variance(parameters, x, y, baseline, s.log_q),
        "gradient_error": (estimates - exact[:, ROUTER]).square().sum(-1).mean(0),
        "exact": exact[:, ROUTER].square().sum(-1),
    }


def _row_variance(
    parameters: Models, x: Rows, y: Rows, baseline: Float[Tensor, " r"], log_q: Float[Tensor, "d r n 2"]
) -> Float[Tensor, " r"]:
    """Computes (1/n^2) sum_i Var(w_i (f_i - b) grad log p(z_i)) for the router, over what each row could have drawn.

    Given the other rows' noise, row i draws j with probability q_ij, and its term has the second moment
    sum_j q_ij (p_ij / q_ij)^2 (...)^2; the mean over draws is over that noise. The term's expectation is known: it is
    that of the exact gradient.
    """
    a, *predictions = lines(parameters, x)
    log_p = router(a).double()
    p = log_p.exp()
    f = torch.stack([y - prediction for prediction in predictions], -1).double().square()
    # d log p(z) / da is -p_1 for z = 0 and p_0 for z = 1; a = w x + b has the gradient (x, 1).
    term = (f - baseline[:, None, None]) * torch.stack([-p[..., 1], p[..., 0]], -1)
    ratio = (log_p - log_q.double()).exp().mean(0)
    variance = (p * ratio * term.square()).sum(-1) - (p * term).sum(-1).square()
    return (variance * (1.0 + x.double().square())).sum(-1) / p.shape[1] ** 2


def exact_gradient(parameters: Models, x: Rows, y: Rows) -> tuple[Models, Float[Tensor, " r"]]:
    """Computes the gradient of the expected squared error under the router, and that error itself, of each model."""
    theta = parameters.clone().requires_grad_()
    expected = mixture_sides(theta, x, y, 1.0)["mse_expected"]
    (gradient,) = torch.autograd.grad(expected.sum(), theta)
    return gradient, expected.detach()
