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
import statistics
from typing import Any

import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import Tensor

from equipoise_lab._style import Look, add_grid, legend_lines, new_figure, row
from equipoise_lab.paper._recipe import Paper
from equipoise_lab.paper._rules import NOT_RUN, Part, Study, above, all_hold, decided, mean_interval
from equipoise_lab.paper._studies._mixture import mixture_sides
from equipoise_lab.paper._studies._traces import checkpoints
from equipoise_lab.paper._task import Models, Rows, draw_datasets, draw_parameters

# The noise of the data, and the width at which the log-likelihood is minus the squared error, up to a constant.
SDS = (0.1, math.sqrt(0.5))
_OBJECTIVES = {
    "elbo": ("ELBO", Look(colour="#08306b", marker="o")),
    "marginal": ("marginal likelihood", Look(colour="#cc6a1b", marker="^", dashes="--", filled=False)),
}
GROUPS = tuple(itertools.product(_OBJECTIVES, SDS))
_CURVE_POINTS = 60


def run(recipe: Paper, *, quick: bool = False, seed: int = 0) -> dict[str, Any]:
    """Trains both objectives from the same starts, on the data of the experiment; nothing is sampled.

    Returns:
        `runs`, a record for each objective, `sd` and seed: `objective` ("elbo" or "marginal"), `router_entropy` at the
        end (mean over datapoints, in nats), `mse_argmax`, `mse_expected`, `log_likelihood_argmax`, `elbo` and
        `marginal_log_likelihood`. `curves`, for each objective and sd: `steps` and the router's entropy there, the
        median over seeds (`router_entropy`) and its quartiles (`low`, `high`). `models`, for the figure: `p`, the
        probability of expert 1 on the grid `x`, of each seed's final router.
    """
    seeds = list(recipe.seed_range) * len(GROUPS)
    sd = torch.tensor([width for _, width in GROUPS]).repeat_interleave(recipe.seeds)
    marginal = torch.tensor([objective == "marginal" for objective, _ in GROUPS]).repeat_interleave(recipe.seeds)
    x, y = draw_datasets(recipe.data_seeds(seeds), recipe.num_points, recipe.noise_sd)
    theta = torch.stack([draw_parameters(number, recipe.initialisation) for number in seeds]).requires_grad_()
    optimiser = torch.optim.Adam([theta], lr=recipe.learning_rate, maximize=True)
    kept, entropies = checkpoints(recipe.steps, _CURVE_POINTS)[1:], list[Tensor]()
    for step in range(1, recipe.steps + 1):
        if step in kept:
            entropies.append(mixture_sides(theta.detach(), x, y, sd)["router_entropy"])
        theta.grad = gradient(theta.detach(), x, y, sd, marginal)
        optimiser.step()
    final = theta.detach()
    sides = {name: value.tolist() for name, value in mixture_sides(final, x, y, sd).items()}
    low, middle, high = (
        torch.stack(entropies).unflatten(1, (len(GROUPS), -1)).quantile(torch.tensor([0.25, 0.5, 0.75]), dim=-1)
    )
    # The final routers around the jump at 0.5, turned so that expert 1 is the one of large x.
    grid = torch.linspace(0.4, 0.6, 101)
    p = (final[:, 0].sign()[:, None] * (final[:, 0:1] * grid + final[:, 1:2])).sigmoid().unflatten(0, (len(GROUPS), -1))
    heads = [{"objective": objective, "sd": width} for objective, width in GROUPS]
    return {
        "quick": quick,
        "seed": seed,
        "steps": recipe.steps,
        "seeds": recipe.seeds,
        "runs": [
            heads[i // recipe.seeds] | {"seed": number} | {name: values[i] for name, values in sides.items()}
            for i, number in enumerate(seeds)
        ],
        "curves": [
            head
            | {"steps": kept, "router_entropy": middle[:, g].tolist()}
            | {"low": low[:, g].tolist(), "high": high[:, g].tolist()}
            for g, head in enumerate(heads)
        ],
        "models": [head | {"x": grid.tolist(), "p": p[g].tolist()} for g, head in enumerate(heads)],
    }


def gradient(parameters: Models, x: Rows, y: Rows, sd: Float[Tensor, " r"], marginal: Bool[Tensor, " r"]) -> Models:
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


def judge(study: Study) -> list[Part]:
    """Claim 15: the router ends deterministic under the ELBO, and less so under the marginal likelihood."""
    runs: list[Study] = study["runs"]
    medians: dict[float, float] = {}
    gaps: dict[float, tuple[float, tuple[float, float]]] = {}
    for sd in sorted({float(r["sd"]) for r in runs}):
        elbo, marginal = (
            {r["seed"]: r["router_entropy"] for r in runs if r["objective"] == objective and r["sd"] == sd}
            for objective in _OBJECTIVES
        )
        seeds = sorted(elbo.keys() & marginal.keys())
        if len(seeds) > 1:
            medians[sd] = statistics.median(elbo.values())
            gaps[sd] = mean_interval([marginal[seed] - elbo[seed] for seed in seeds])
    if not gaps:
        return [NOT_RUN] * 2
    one = ", ".join(f"{median:.3g} at sd {sd:.3g}" for sd, median in medians.items())
    two = ", ".join(f"{m:+.3g} ({low:+.3g} to {high:+.3g}) at sd {sd:.3g}" for sd, (m, (low, high)) in gaps.items())
    figures = {f"entropy elbo sd {sd:.3g}": median for sd, median in medians.items()}
    further = {f"entropy marginal - elbo sd {sd:.3g}": mean for sd, (mean, _) in gaps.items()}
    verdict = all_hold(above(interval, 0.0) for _, interval in gaps.values())
    deterministic = decided(max(medians.values()) <= 0.05, one, figures)
    return [deterministic, Part(measured=two, verdict=verdict, figures=further)]


def draw(study: Study) -> Figure:
    """Draws the router's entropy along training of both objectives, and the routers that they end with."""
    figure = new_figure(7.6, 3.4)
    sds = sorted({curve["sd"] for curve in study["curves"]})
    panels = row(figure, 2 * len(sds))
    for i, sd in enumerate(sds):
        left, right = panels[2 * i], panels[2 * i + 1]
        for curve, model in zip(study["curves"], study["models"], strict=True):
            if curve["sd"] != sd:
                continue
            name, mark = _OBJECTIVES[curve["objective"]]
            left.fill_between(curve["steps"], curve["low"], curve["high"], color=mark.colour, alpha=0.18, linewidth=0)
            left.plot(curve["steps"], curve["router_entropy"], **mark.dotted(8), label=name)
            for p in model["p"]:
                right.plot(model["x"], p, color=mark.colour, linestyle=mark.dashes, linewidth=0.8, alpha=0.8)
        title = f"experts' sd {sd:.2g}:\nrouter's entropy (nats)"
        left.set(xscale="log", yscale="log", title=title, xlabel="step")
        left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        left.yaxis.set_minor_formatter(NullFormatter())
        right.set(title="routers at the end:\np of expert 1", xlabel="x", xlim=(0.44, 0.56), xticks=[0.45, 0.5, 0.55])
        for axes in (left, right):
            add_grid(axes)
    lines = legend_lines((f"trained on the {name}", mark) for name, mark in _OBJECTIVES.values())
    figure.legend(handles=lines, loc="outside upper left", ncols=2)
    return figure
