# SPDX-License-Identifier: Apache-2.0
"""Along training: the three sides of eq. (1), the router's entropy, and the weights and variance of each estimator.

Two views. Each method's own training shows what it does to its model. But a method that keeps its router soft has small
weights for that reason alone, so for a comparison all methods are measured at the same models too: those that Sample,
the estimator without a capacity, passes through at temperature 1.

Legend: s seeds, c checkpoints, t temperatures.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.estimators import STRATEGIES
from equipoise_lab.paper._recipe import Paper
from equipoise_lab.paper._results import Baseline, Run
from equipoise_lab.paper._studies._mixture import measure_spread, mixture_sides, tile
from equipoise_lab.paper._task import draw_datasets
from equipoise_lab.paper._train import Trained, train

TEMPERATURES = (1.0, 10.0)
_CHECKPOINTS = 20
# The method whose final model at temperature 1 is shown with the data.
_SHOWN = "skip-iw"


def checkpoints(steps: int, number: int = _CHECKPOINTS) -> list[int]:
    """Lists at most so many steps that are evenly spread over log(step), with 0 and the last among them.

    Example:
        >>> checkpoints(1000, 4)
        [0, 1, 10, 100, 1000]
    """
    return sorted({0} | {round(steps ** (i / (number - 1))) for i in range(number)})


def trace_runs(recipe: Paper, method: str) -> list[Run]:
    """Lists the runs of a method that are traced: REINFORCE, plain, for every seed and both temperatures."""
    return [
        Run(
            variant="plain",
            method=method,
            loss="reinforce",
            balance_weight=0.0,
            temperature=temperature,
            learning_rate=recipe.learning_rate,
            baseline=cast(Baseline, recipe.baselines[0]),
            seed=seed,
        )
        for temperature in TEMPERATURES
        for seed in recipe.seed_range
    ]


def path_of(trained: Trained, recipe: Paper) -> Float[Tensor, "t c s 6"]:
    """Takes the parameters along `trace_runs`, with the snapshots of `checkpoints`, out of what `train` returned."""
    position = {run: i for i, run in enumerate(trained.runs)}
    rows = torch.tensor([position[run] for run in trace_runs(recipe, trained.runs[0].method)])
    kept = torch.stack([trained.snapshots[step][rows] for step in checkpoints(recipe.steps)])
    return kept.unflatten(1, (len(TEMPERATURES), recipe.seeds)).transpose(0, 1)


def run(
    recipe: Paper,
    *,
    quick: bool = False,
    seed: int = 0,
    paths: Mapping[str, Float[Tensor, "t c s 6"]] | None = None,
) -> dict[str, Any]:
    """Trains REINFORCE with every method at two temperatures, and looks inside at checkpoints.

    Args:
        recipe: the experiment.
        quick: fewer draws.
        seed: of the draws at the checkpoints.
        paths: from `path_of`, for methods that were trained already; the others are trained here.

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
    known = {} if paths is None else paths
    results: dict[str, Float[Tensor, "t c s 6"]] = {
        method: known[method]
        if method in known
        else path_of(train(trace_runs(recipe, method), recipe, snapshots=steps), recipe)
        for method in dict.fromkeys(("sample", *recipe.methods))
    }
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
    sides = mixture_sides(models.flatten(0, 1), tile(x, len(models)), tile(y, len(models)), sd)
    named = {name: value.unflatten(0, models.shape[:2]) for name, value in sides.items()}
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
