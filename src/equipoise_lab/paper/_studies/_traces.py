# SPDX-License-Identifier: Apache-2.0
"""Along training: the three sides of eq. (1), the router's entropy, and the weights and variance of each estimator.

Two views. Each method's own training shows what it does to its model. But a method that keeps its router soft has small
weights for that reason alone, so for a comparison all methods are measured at the same models too: those that Sample,
the estimator without a capacity, passes through at temperature 1.

Legend: s seeds, c checkpoints, t temperatures.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from equipoise.estimators import PAPER_STRATEGIES, STRATEGIES
from equipoise_lab._style import GREY, LOOKS, Look, add_grid, legend_lines, look, new_figure, row, stack
from equipoise_lab.paper._recipe import Paper
from equipoise_lab.paper._results import Run
from equipoise_lab.paper._rules import Part, Study, decided, finite
from equipoise_lab.paper._studies._mixture import measure_spread, mixture_sides
from equipoise_lab.paper._task import draw_datasets
from equipoise_lab.paper._train import Trained, train

TEMPERATURES = (1.0, 10.0)
_CHECKPOINTS = 20
# The method whose final model at temperature 1 is shown with the data.
_SHOWN = "skip-iw"
_SIDES = (
    ("marginal_log_likelihood", "marginal log-likelihood", Look(colour="#5b9bd0", marker="s", dashes="--")),
    ("log_likelihood_argmax", "of the argmax expert", Look(colour="#cc6a1b", marker="^", dashes=":")),
    ("elbo", "ELBO, which is trained", Look(colour="#08306b", marker="o")),
)
_UNSEEN: dict[str, Any] = {"color": LOOKS["gm-iw"].colour, "linewidth": 0.8, "linestyle": (0, (1.0, 1.5))}


def checkpoints(steps: int, number: int = _CHECKPOINTS) -> list[int]:
    """Lists at most so many steps that are evenly spread over log(step), with 0 and the last among them.

    Example:
        >>> checkpoints(1000, 4)
        [0, 1, 10, 100, 1000]
    """
    return sorted({0} | {round(steps ** (i / (number - 1))) for i in range(number)})


def trace_runs(recipe: Paper, method: str) -> list[Run]:
    """Lists the runs of a method that are traced: REINFORCE, plain, for every seed and both temperatures."""
    setting: dict[str, Any] = {"loss": "reinforce", "variant": "plain", "method": method}
    return [run for t in TEMPERATURES for run in recipe.setting_runs(recipe.seeds, **setting, temperature=t)]


def path_of(trained: Trained, recipe: Paper) -> Float[Tensor, "t c s 6"]:
    """Takes the parameters along `trace_runs`, with the snapshots of `checkpoints`, out of what `train` returned."""
    position = {run: i for i, run in enumerate(trained.runs)}
    rows = torch.tensor([position[run] for run in trace_runs(recipe, trained.runs[0].method)])
    kept = torch.stack([trained.snapshots[step][rows] for step in checkpoints(recipe.steps)])
    return kept.unflatten(1, (len(TEMPERATURES), recipe.seeds)).transpose(0, 1)


def run(
    recipe: Paper, *, quick: bool = False, seed: int = 0, paths: Mapping[str, Float[Tensor, "t c s 6"]] | None = None
) -> dict[str, Any]:
    """Trains REINFORCE with every method at two temperatures, and looks inside at checkpoints.

    Methods that were trained already are not trained again: `paths` holds what `path_of` makes of them. Quick: fewer
    draws at the checkpoints. The seed is that of these draws.

    Returns:
        `sd` (of p(y|x, z), the data's), `seeds`, `draws` (at each checkpoint and seed). `training`, a record for each
        method and temperature along its own training, medians over seeds: `steps`, `log_likelihood_argmax`, `elbo`,
        `marginal_log_likelihood`, `router_entropy`, `mse`, `mse_expected`, and `ess`, `largest_weight`,
        `gradient_variance`, `gradient_error` (see `measure_spread`). `common`, the same of the last four for each
        method and temperature at the models of Sample's training at temperature 1: `ess`, `gradient_variance` and
        `gradient_error` are means over seeds, `largest_weight` and `possible_weight` medians, `p_at_largest` and
        `q_at_largest` belong to the largest of all seeds; `gradient_norm` is the root mean square norm of the exact
        gradient; `row_variance` is there for methods whose q is exact and that drop no row, the median over seeds.
        `model`: data and the model that Sample Skip IW ends with at temperature 1 on the first dataset.
    """
    steps, draws = checkpoints(recipe.steps), 64 if quick else 128
    generator = torch.Generator().manual_seed(seed)
    x, y = draw_datasets(recipe.data_seeds(recipe.seed_range), recipe.num_points, recipe.noise_sd)
    results = dict(paths or {})
    for method in {"sample", *recipe.methods} - results.keys():
        results[method] = path_of(train(trace_runs(recipe, method), recipe, snapshots=steps), recipe)
    at_one = TEMPERATURES.index(1.0)
    training: list[dict[str, Any]] = []
    common: list[dict[str, Any]] = []
    for method in recipe.methods:
        for temperature, models in zip(TEMPERATURES, results[method], strict=True):
            how: dict[str, Any] = {"method": method, "temperature": temperature, "draws": draws, "generator": generator}
            head: dict[str, Any] = {"method": method, "temperature": temperature, "steps": steps}
            own = _measure(models, x, y, how)
            training.append(head | _summarise_own(own, models, x, y, recipe.noise_sd))
            common.append(head | _summarise_common(_measure(results["sample"][at_one], x, y, how), method))
    study = {"quick": quick, "seed": seed, "seeds": recipe.seeds, "draws": draws, "sd": recipe.noise_sd}
    study |= {"training": training, "common": common}
    return study | ({"model": _model(results[_SHOWN][at_one][-1, 0], x[0], y[0])} if _SHOWN in results else {})


def _measure(
    models: Float[Tensor, "c s 6"], x: Tensor, y: Tensor, how: Mapping[str, Any]
) -> dict[str, Float[Tensor, "c s"]]:
    """Measures the estimator at each checkpoint."""
    found = [measure_spread(parameters, x, y, **how) for parameters in models]
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


def _summarise_own(
    spread: Mapping[str, Float[Tensor, "c s"]], models: Float[Tensor, "c s 6"], x: Tensor, y: Tensor, sd: float
) -> dict[str, list[float | None]]:
    """Medians over seeds of what the models say about their data, and of how the estimator behaves at them."""
    named = mixture_sides(models, x, y, sd)
    named["mse"] = named.pop("mse_argmax")
    named |= {name: spread[name] for name in ("ess", "largest_weight", "gradient_variance", "gradient_error")}
    return {name: _each(value, Tensor.median) for name, value in named.items()}


def _summarise_common(spread: Mapping[str, Float[Tensor, "c s"]], method: str) -> dict[str, list[float | None]]:
    medians = ["largest_weight", "possible_weight"]
    if STRATEGIES[method].unbiased and not STRATEGIES[method].skips:
        medians.append("row_variance")  # means something only there
    worst = spread["largest_weight"].argmax(1, keepdim=True)
    return {
        **{name: _each(spread[name], Tensor.median) for name in medians},
        **{name: _each(spread[name], Tensor.mean) for name in ("ess", "gradient_variance", "gradient_error")},
        "gradient_norm": _each(spread["exact"], lambda squares: squares.mean().sqrt()),
        **{name: _each(spread[name].gather(1, worst), Tensor.sum) for name in ("p_at_largest", "q_at_largest")},
    }


def _each(values: Float[Tensor, "c s"], over_seeds: Callable[[Tensor], Tensor]) -> list[float | None]:
    """Summarises each checkpoint; what JSON has no word for becomes None."""
    found = [float(over_seeds(row)) for row in values]
    return [value if math.isfinite(value) else None for value in found]


def _model(parameters: Float[Tensor, "6"], x: Tensor, y: Tensor) -> dict[str, Any]:
    """Describes one model with its data: p(z = 0 | x) = sigmoid(weight x + bias)."""
    weight, bias, slope_0, slope_1, intercept_0, intercept_1 = parameters.tolist()
    return {
        "x": x.tolist(),
        "y": y.tolist(),
        "experts": [[slope_0, intercept_0], [slope_1, intercept_1]],
        "router": [-weight, -bias],
        "label": f"{STRATEGIES[_SHOWN].label}, temperature 1",
        "mse": float(mixture_sides(parameters[None], x[None], y[None], 1.0)["mse_argmax"]),
    }


def judge(study: Study) -> list[Part]:
    """Claim 4: at the same routers, Gumbel-Matching IW has larger weights and more variance than Sample Skip IW."""
    one, skip, hot = (_trace(study, *where) for where in (("gm-iw", 1.0), ("skip-iw", 1.0), ("gm-iw", 10.0)))
    return [
        _compare(one, skip, "largest weight", 2.0, least=10.0),
        _compare(one, skip, "variance", 2.0),
        _compare(one, hot, "largest weight", 2.0),
        _compare(one, hot, "variance", 1.0),
        _compare(skip, one, "effective sample size", 1.0),
    ]


def _trace(study: Study, method: str, temperature: float) -> dict[str, Any]:
    """Summarises a trace: the largest weight of all checkpoints, and means of the rest."""
    record = _find(study["common"], method, temperature)
    weights, variances, sizes = (
        finite(value for value in record[key] if value is not None)
        for key in ("largest_weight", "gradient_variance", "ess")
    )
    return {
        "name": f"{PAPER_STRATEGIES[method].label} at temperature {temperature:g}",
        "largest weight": max(weights),
        "variance": statistics.fmean(variances),
        "effective sample size": statistics.fmean(sizes),
    }


def _compare(larger: Study, smaller: Study, word: str, times: float, *, least: float = 0.0) -> Part:
    """Judges a number to be larger than another, or at least so many times as large, and not below the least."""
    a, b = larger[word], smaller[word]
    holds = a >= least and (a > b if times == 1.0 else a >= times * b)
    figures = {f"{larger['name']} {word}": a, f"{smaller['name']} {word}": b}
    return decided(holds, f"{word}: {larger['name']} {a:.3g}, {smaller['name']} {b:.3g}", figures)


def draw_training(study: Study) -> Figure:
    """Draws the three sides of eq. (1) for each method at temperature 1, then the router's entropy at both."""
    figure = new_figure(7.6, 6.6)
    above, middle, below = stack(figure, 1.0, 1.0, 1.05)
    methods = [method for method in PAPER_STRATEGIES if _find(study["training"], method, 1.0)]
    panels = row(above, 3, sharex=True, sharey=True) + row(middle, 3, sharex=True, sharey=True)
    for axes, method in zip(panels, methods, strict=False):
        record = _find(study["training"], method, 1.0)
        for key, _, mark in _SIDES:
            _plot(axes, record, key, **mark.dotted(3))
        axes.set(title=PAPER_STRATEGIES[method].label, ylim=(-2.2, 1.2))
        _steps_axis(axes)
        # Before, all methods are where they started, far below.
        axes.set_xlim(left=8.0)
    for axes in panels[len(methods) :]:
        axes.set_axis_off()
    for axes in (panels[0], panels[3]):
        axes.set_ylabel("nats a datapoint")
    handles = legend_lines((name, mark) for _, name, mark in _SIDES)
    title = f"log-likelihoods at temperature 1, median of {study['seeds']} seeds"
    above.legend(handles=handles, loc="outside upper left", ncols=3, title=title, alignment="left")
    entropies = row(below, 2, sharey=True)
    for axes, temperature in zip(entropies, TEMPERATURES, strict=True):
        for method in methods:
            _plot(axes, _find(study["training"], method, temperature), "router_entropy", **look(method).dotted(3))
        axes.set(title=f"router's entropy, temperature {temperature:g}", xlabel="step")
        axes.set_ylim(bottom=0.0)
        _steps_axis(axes)
    entropies[0].set_ylabel("nats")
    below.legend(handles=legend_lines(), loc="outside right center", fontsize=8)
    return figure


def draw_weights(study: Study) -> Figure:
    """Draws effective sample size, largest weight and variance of every estimator at the same routers.

    Dotted: what the draws would have shown, had the rarest pairs been among them.
    """
    figure = new_figure(7.6, 6.6)
    weight, variance = f"largest weight in {study['draws']} draws", "variance of the\nrouter's gradient"
    quantities = (
        ("ess", "effective sample size / n", "", (0.0, 1.05)),
        ("largest_weight", weight, "possible_weight", (0.7, 3e6)),
        ("gradient_variance", variance, "row_variance", (3e-8, 0.1)),
    )
    for part, (key, title, unseen, limits) in zip(stack(figure, 1.0, 1.0, 1.0), quantities, strict=True):
        panels = row(part, 2, sharey=True)
        for axes, temperature in zip(panels, TEMPERATURES, strict=True):
            records = {method: _find(study["common"], method, temperature) for method in PAPER_STRATEGIES}
            for method, record in records.items():
                _plot(axes, record, key, **look(method).dotted(3))
            _steps_axis(axes)
            if key == "ess":
                axes.set_title(f"proposal at temperature {temperature:g}")
            else:
                axes.set_yscale("log")
            if key == "gradient_variance":
                # The squared norm of the exact gradient, below which a variance hardly matters.
                _plot(axes, records["sample"], "gradient_norm", power=2, color=GREY, linewidth=0.9, zorder=1)
                axes.set_xlabel("step of Sample's training")
            axes.set_ylim(limits)
            _plot(axes, records["gm-iw"], unseen, **_UNSEEN)
        panels[0].set_ylabel(title)
    norm = Line2D([], [], color=GREY, linewidth=0.9, label="exact gradient, squared norm")
    dotted = Line2D([], [], **_UNSEEN, label="Gumbel-Matching IW, drawn or not")
    figure.legend(handles=[*legend_lines(), norm, dotted], loc="outside upper center", ncols=3, fontsize=8)
    return figure


def _find(records: Sequence[Study], method: str, temperature: float) -> Study:
    """Finds the record of a method and temperature; empty where there is none."""
    return next((r for r in records if (r.get("method"), r.get("temperature")) == (method, temperature)), {})


def _plot(axes: Axes, record: Study, key: str, *, power: int = 1, **how: Any) -> None:
    """Draws a curve of a record that has it; step 0, which a logarithmic axis has no place for, as half a step."""
    if key in record:
        values = [float("nan") if value is None else value**power for value in record[key]]
        axes.plot([max(float(step), 0.5) for step in record["steps"]], values, **how)


def _steps_axis(axes: Axes) -> None:
    axes.set_xscale("log")
    add_grid(axes)
