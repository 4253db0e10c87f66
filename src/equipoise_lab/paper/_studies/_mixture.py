# SPDX-License-Identifier: Apache-2.0
"""The toy model in closed form: two linear experts, a router, and the three sides of eq. (1).

Legend: r runs (any number of batch dimensions), n rows (datapoints), k = 2 columns (experts).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

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
