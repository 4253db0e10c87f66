# SPDX-License-Identifier: Apache-2.0
"""Training the ELBO against training the marginal likelihood (eq. 1), both in closed form.

The paper trains E_z[log p(y|x, z)] rather than log E_z[p(y|x, z)], and says that this helps to avoid stochastic choices
of the expert (App. A). With two experts both are sums of two terms, so nothing need be sampled, and the objective is
all that differs between runs. The density p(y|x, z) is Gaussian with a fixed standard deviation. For the ELBO that only
scales the gradient, which Adam undoes; for the marginal likelihood it says how soft the posterior over experts is.

Legend: r runs, n rows (datapoints), k = 2 columns (experts).
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise_lab.paper._recipe import Paper, quick_recipe
from equipoise_lab.paper._studies._mixture import mixture_sides
from equipoise_lab.paper._task import draw_datasets, draw_parameters

OBJECTIVES = ("elbo", "marginal")
# The noise of the data, and the width at which the log-likelihood is minus the squared error, up to a constant.
SDS = (0.1, math.sqrt(0.5))
_CURVE_POINTS = 60


def run(recipe: Paper | None = None, *, quick: bool = False, seed: int = 0) -> dict[str, Any]:
    """Trains both objectives from the same starts, on the data of the experiment.

    Args:
        recipe: the task, the number of seeds and steps, the learning rate; None is the paper's.
        quick: the recipe in small, where none is given.
        seed: kept in the record; nothing is sampled.

    Returns:
        `runs`, a record for each objective, `sd` and seed: `objective` ("elbo" or "marginal"), `router_entropy` at the
        end (mean over datapoints, in nats), `mse_argmax`, `mse_expected`, `log_likelihood_argmax`, `elbo` and
        `marginal_log_likelihood`. `curves`, for each objective and sd: `steps` and the router's entropy there, the
        median over seeds (`router_entropy`) and its quartiles (`low`, `high`). `models`, for the figure: `p`, the
        probability of expert 1 on the grid `x`, of each seed's final router.
    """
    recipe = (quick_recipe() if quick else Paper()) if recipe is None else recipe
    seeds = recipe.seeds
    grid = list(itertools.product(OBJECTIVES, SDS, recipe.seed_range))
    sd = torch.tensor([width for _, width, _ in grid])
    marginal = torch.tensor([objective == "marginal" for objective, _, _ in grid])
    starts = torch.stack([draw_parameters(number, recipe.initialisation) for _, _, number in grid])
    chosen = recipe.data_seeds([number for _, _, number in grid])
    x, y = draw_datasets(chosen, recipe.num_points, recipe.noise_sd)
    parameters, path = train(starts, x, y, sd, marginal, steps=recipe.steps, learning_rate=recipe.learning_rate)
    entropy = {step: mixture_sides(theta, x, y, sd).entropy for step, theta in path.items()}
    return {
        "quick": quick,
        "seed": seed,
        "steps": recipe.steps,
        "seeds": seeds,
        "runs": _records(grid, parameters, x, y, sd),
        "curves": _curves(entropy, seeds),
        "models": _models(parameters, seeds),
    }


def train(
    parameters: Float[Tensor, "r 6"],
    x: Float[Tensor, "#r n"],
    y: Float[Tensor, "#r n"],
    sd: Float[Tensor, " r"],
    marginal: Bool[Tensor, " r"],
    *,
    steps: int,
    learning_rate: float,
) -> tuple[Float[Tensor, "r 6"], dict[int, Float[Tensor, "r 6"]]]:
    """Maximises the exact objective of each run, the marginal log-likelihood or the ELBO, with Adam, all runs at once.

    Returns:
        The parameters at the end, and before some steps on the way, evenly spread over log(step).
    """
    theta = parameters.clone().requires_grad_()
    optimiser = torch.optim.Adam([theta], lr=learning_rate, maximize=True)
    kept = {round(steps ** (i / (_CURVE_POINTS - 1))) for i in range(_CURVE_POINTS)}
    path: dict[int, Tensor] = {}
    for step in range(1, steps + 1):
        if step in kept:
            path[step] = theta.detach().clone()
        theta.grad = gradient(theta.detach(), x, y, sd, marginal)
        optimiser.step()
    return theta.detach(), path


def gradient(
    parameters: Float[Tensor, "r 6"],
    x: Float[Tensor, "#r n"],
    y: Float[Tensor, "#r n"],
    sd: Float[Tensor, " r"],
    marginal: Bool[Tensor, " r"],
) -> Float[Tensor, "r 6"]:
    """Computes the gradient of the mean ELBO, or of the mean marginal log-likelihood, in closed form.

    With a the router's logit, p_1 = sigmoid(a), l_j the log-density under expert j and r_1 = sigmoid(a + l_1 - l_0) the
    posterior probability of expert 1,

        d ELBO / d a = p_0 p_1 (l_1 - l_0),    d ELBO / d f_j = p_j (y - f_j) / sd^2,
        d log p(y|x) / d a = r_1 - p_1,        d log p(y|x) / d f_j = r_j (y - f_j) / sd^2.
    """
    precision = sd[:, None].square().reciprocal()
    a = torch.addcmul(parameters[:, 1:2], parameters[:, 0:1], x)
    residual = [y - torch.addcmul(parameters[:, 4 + j, None], parameters[:, 2 + j, None], x) for j in (0, 1)]
    difference = 0.5 * precision * (residual[0].square() - residual[1].square())
    p, posterior = a.sigmoid(), (a + difference).sigmoid()
    by_logit = torch.where(marginal[:, None], posterior - p, p * (1.0 - p) * difference)
    share = torch.where(marginal[:, None], posterior, p)
    by_expert = [precision * (1.0 - share) * residual[0], precision * share * residual[1]]
    slopes = [(by * x).mean(-1) for by in (by_logit, *by_expert)]
    constants = [by.mean(-1) for by in (by_logit, *by_expert)]
    return torch.stack([slopes[0], constants[0], slopes[1], slopes[2], constants[1], constants[2]], -1)


def _records(
    grid: Sequence[tuple[str, float, int]], parameters: Tensor, x: Tensor, y: Tensor, sd: Tensor
) -> list[dict[str, Any]]:
    found = mixture_sides(parameters, x, y, sd)
    return [
        {
            "objective": objective,
            "sd": width,
            "seed": number,
            "router_entropy": float(found.entropy[i]),
            "mse_argmax": float(found.mse_argmax[i]),
            "mse_expected": float(found.mse_expected[i]),
            "log_likelihood_argmax": float(found.argmax[i]),
            "elbo": float(found.elbo[i]),
            "marginal_log_likelihood": float(found.marginal[i]),
        }
        for i, (objective, width, number) in enumerate(grid)
    ]


def _curves(curve: dict[int, Tensor], seeds: int) -> list[dict[str, Any]]:
    """Summarises the entropies over seeds, in the order of the grid."""
    entropy = torch.stack(list(curve.values())).unflatten(1, (len(OBJECTIVES), len(SDS), seeds))
    low, middle, high = entropy.quantile(torch.tensor([0.25, 0.5, 0.75]), dim=-1)
    return [
        {
            "objective": objective,
            "sd": width,
            "steps": list(curve),
            "router_entropy": middle[:, o, s].tolist(),
            "low": low[:, o, s].tolist(),
            "high": high[:, o, s].tolist(),
        }
        for (o, objective), (s, width) in itertools.product(enumerate(OBJECTIVES), enumerate(SDS))
    ]


def _models(parameters: Tensor, seeds: int) -> list[dict[str, Any]]:
    """Evaluates the final routers on a grid, turned so that expert 1 is the one of large x."""
    x = torch.linspace(0.4, 0.6, 101)  # around the jump at 0.5
    turned = parameters[:, 0].sign()[:, None] * (parameters[:, 0:1] * x + parameters[:, 1:2])
    p = turned.sigmoid().unflatten(0, (len(OBJECTIVES), len(SDS), seeds))
    return [
        {"objective": objective, "sd": width, "x": x.tolist(), "p": p[o, s].tolist()}
        for (o, objective), (s, width) in itertools.product(enumerate(OBJECTIVES), enumerate(SDS))
    ]
