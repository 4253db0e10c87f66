# SPDX-License-Identifier: Apache-2.0
"""The toy model in closed form (a router, two linear experts, eq. 1), and how its gradient's estimates spread.

The spread is that of many draws of the estimator that trains the models.

Legend: d draws, r runs or models (any number of batch dimensions), n rows (datapoints), k = 2 columns (experts).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.estimators import get_strategy, reinforce
from equipoise_lab.paper._task import lines, router


@dataclass(frozen=True, slots=True)
class Sides:
    """What a mixture says about its data, averaged over datapoints; with gradient if the parameters have it."""

    # Log-likelihood of the most probable expert, log p(y | x, z*): the left side of eq. (1).
    argmax: Float[Tensor, "*r"]
    elbo: Float[Tensor, "*r"]  # E_z[log p(y | x, z)], what is trained
    marginal: Float[Tensor, "*r"]  # log E_z[p(y | x, z)], the right side
    entropy: Float[Tensor, "*r"]  # of the router's choice, in nats
    mse_argmax: Float[Tensor, "*r"]  # mean squared error of the most probable expert
    mse_expected: Float[Tensor, "*r"]  # the same in expectation over the router


def sides(log_p: Float[Tensor, "*r n k"], squares: Float[Tensor, "*r n k"], sd: float | Float[Tensor, "*#r"]) -> Sides:
    """Computes the three sides of eq. (1) for Gaussian experts of a fixed standard deviation, given squared errors.

    It holds that elbo <= marginal, with equality where the router is sure.

    Example:
        >>> log_p = torch.tensor([[0.5, 0.5]]).log()
        >>> found = sides(log_p, torch.tensor([[0.0, 2.0]]), sd=1.0)
        >>> round(float(found.marginal - found.elbo), 4), round(float(found.entropy), 4)
        (0.1201, 0.6931)
    """
    width = torch.as_tensor(sd, dtype=squares.dtype)
    spread = width[..., None, None] if width.ndim else width
    log_density = -0.5 * squares / spread.square() - spread.log() - 0.5 * math.log(2.0 * math.pi)
    p = log_p.exp()
    best = log_p.argmax(-1, keepdim=True)
    return Sides(
        argmax=log_density.gather(-1, best).squeeze(-1).mean(-1),
        elbo=(p * log_density).sum(-1).mean(-1),
        marginal=(log_p + log_density).logsumexp(-1).mean(-1),
        entropy=-(p * log_p).sum(-1).mean(-1),
        mse_argmax=squares.gather(-1, best).squeeze(-1).mean(-1),
        mse_expected=(p * squares).sum(-1).mean(-1),
    )


def mixture_sides(
    parameters: Float[Tensor, "r 6"],
    x: Float[Tensor, "#r n"],
    y: Float[Tensor, "#r n"],
    sd: float | Float[Tensor, "#r"],
) -> Sides:
    """Computes `sides` for the models of the toy task."""
    a, *predictions = lines(parameters, x)
    predictions = torch.stack(predictions, -1)
    return sides(router(a), (y.unsqueeze(-1) - predictions).square(), sd)


# The router's own parameters come first.
ROUTER = slice(0, 2)


@dataclass(frozen=True, slots=True)
class Spread:
    """How an estimator behaves at each of r models."""

    # Effective sample size (sum w)^2 / sum w^2 over the n rows of a batch, as a fraction of n; mean over draws.
    ess: Float[Tensor, " r"]
    largest_weight: Float[Tensor, " r"]  # the largest weight of any row and draw
    possible_weight: Float[Tensor, " r"]  # the largest p/q of any pair, drawn or not: what a rare draw would bring
    p_at_largest: Float[Tensor, " r"]  # the router's probability of the expert that this row drew
    q_at_largest: Float[Tensor, " r"]  # the proposal's, as it was used for the weight
    variance: Float[Tensor, " r"]  # of the router's gradient, summed over its components
    # The same for rows that vary on their own, (1/n^2) sum_i Var(term i), with every pair weighed by its probability,
    # drawn or not. It sees the huge weights that are too rare to turn up in the draws. What it says is right where q is
    # the probability that was really used and no row is dropped.
    row_variance: Float[Tensor, " r"]
    # Mean squared distance of the router's gradient from the exact one: variance and squared bias.
    error: Float[Tensor, " r"]
    exact: Float[Tensor, " r"]  # squared norm of the exact gradient of the router


def measure_spread(
    parameters: Float[Tensor, "r 6"],
    x: Float[Tensor, "#r n"],
    y: Float[Tensor, "#r n"],
    *,
    method: str,
    temperature: float,
    draws: int,
    generator: torch.Generator,
) -> Spread:
    """Draws the REINFORCE estimate many times at fixed models, and compares it with the exact gradient.

    The baseline is the expected loss of each model: what the moving average of training would settle at.
    """
    strategy = get_strategy(method)
    exact, baseline = exact_gradient(parameters, x, y)
    x, y = tile(x, draws), tile(y, draws)
    shape = [draws, *parameters.shape]
    theta = parameters.expand(shape).flatten(0, 1).clone().requires_grad_()
    a, first, second = lines(theta, x)
    log_p = router(a)
    s, weight = strategy.draw(
        log_p.detach(), strategy.draw_noise(log_p.shape, generator=generator), temperature=temperature
    )
    prediction = torch.where(s.z == 1, second, first)
    loss = reinforce(log_p, s, (y - prediction).square(), baseline=baseline.repeat(draws), weight=weight)
    (gradient,) = torch.autograd.grad(loss.sum(), theta)
    estimates = gradient.reshape(shape)[..., ROUTER].double()
    # The row of the largest weight of each model, over all draws.
    by_model = weight.reshape(draws, len(parameters), -1).transpose(0, 1).flatten(1)
    largest, where = by_model.max(-1)
    probability = [
        s.at_z(log).exp().reshape(draws, len(parameters), -1).transpose(0, 1).flatten(1).gather(1, where[:, None])
        for log in (log_p.detach(), s.log_q)
    ]
    sizes = weight.sum(-1).square() / weight.square().sum(-1).clamp_min(1e-30) / weight.shape[-1]
    return Spread(
        ess=sizes.reshape(draws, -1).mean(0),
        largest_weight=largest,
        possible_weight=(log_p.detach() - s.log_q).exp().reshape(draws, len(parameters), -1).amax((0, 2)),
        p_at_largest=probability[0].squeeze(1),
        q_at_largest=probability[1].squeeze(1),
        variance=estimates.var(0).sum(-1),
        row_variance=_row_variance(parameters, x[: len(parameters)], y[: len(parameters)], baseline, s.log_q),
        error=(estimates - exact[:, ROUTER]).square().sum(-1).mean(0),
        exact=exact[:, ROUTER].square().sum(-1),
    )


def _row_variance(
    parameters: Float[Tensor, "r 6"],
    x: Float[Tensor, "#r n"],
    y: Float[Tensor, "#r n"],
    baseline: Float[Tensor, " r"],
    log_q: Float[Tensor, "dr n 2"],
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
    ratio = (log_p - log_q.double().unflatten(0, (-1, len(parameters)))).exp().mean(0)
    variance = (p * ratio * term.square()).sum(-1) - (p * term).sum(-1).square()
    return (variance * (1.0 + x.double().square())).sum(-1) / p.shape[1] ** 2


def tile(x: Float[Tensor, "#r n"], times: int) -> Float[Tensor, "_ n"]:
    """Repeats the data of each model; data that all models share stay as they are."""
    return x if len(x) == 1 else x.repeat(times, 1)


def exact_gradient(
    parameters: Float[Tensor, "r 6"], x: Float[Tensor, "#r n"], y: Float[Tensor, "#r n"]
) -> tuple[Float[Tensor, "r 6"], Float[Tensor, " r"]]:
    """Computes the gradient of the expected squared error under the router, and that error itself.

    Returns:
        The gradient and the expected error, for each model.
    """
    theta = parameters.clone().requires_grad_()
    expected = mixture_sides(theta, x, y, 1.0).mse_expected
    (gradient,) = torch.autograd.grad(expected.sum(), theta)
    return gradient, expected.detach()
