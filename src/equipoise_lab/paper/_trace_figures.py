# SPDX-License-Identifier: Apache-2.0
"""The figures of the studies that look inside training: curves, weights, ELBO against likelihood, kinds of noise."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab._style import GREY, LOOKS, Look, add_grid, legend_lines, look, name_ticks, new_figure, row, stack

_SIDES = (
    ("marginal_log_likelihood", "marginal log-likelihood", Look(colour="#5b9bd0", marker="s", dashes="--")),
    ("log_likelihood_argmax", "of the argmax expert", Look(colour="#cc6a1b", marker="^", dashes=":")),
    ("elbo", "ELBO, which is trained", Look(colour="#08306b", marker="o")),
)
_UNSEEN: dict[str, Any] = {"color": LOOKS["gm-iw"].colour, "linewidth": 0.8, "linestyle": (0, (1.0, 1.5))}
_OBJECTIVES = {
    "elbo": ("ELBO", Look(colour="#08306b", marker="o")),
    "marginal": ("marginal likelihood", Look(colour="#cc6a1b", marker="^", dashes="--", filled=False)),
}
_KINDS = {
    "gumbel": ("Gumbel", Look(colour="#08306b", marker="o")),
    "gaussian": ("Gaussian", Look(colour="#5b9bd0", marker="s", dashes="--", filled=False)),
    "jitter": ("input jitter", Look(colour="#cc6a1b", marker="^", dashes=":")),
}
_SETTINGS = {
    ("gm-iw", True): "balanced assignment, importance weights",
    ("sample", False): "argmax of each row, no weights",
}


def draw_training(study: Mapping[str, Any]) -> Figure:
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
    above.legend(
        handles=legend_lines((name, mark) for _, name, mark in _SIDES),
        loc="outside upper left",
        ncols=3,
        title=f"log-likelihoods at temperature 1, median of {study['seeds']} seeds",
        alignment="left",
    )
    entropies = row(below, 2, sharey=True)
    for axes, temperature in zip(entropies, (1.0, 10.0), strict=True):
        for method in methods:
            _plot(axes, _find(study["training"], method, temperature), "router_entropy", **look(method).dotted(3))
        axes.set(title=f"router's entropy, temperature {temperature:g}", xlabel="step")
        axes.set_ylim(bottom=0.0)
        _steps_axis(axes)
    entropies[0].set_ylabel("nats")
    below.legend(handles=legend_lines(), loc="outside right center", fontsize=8)
    return figure


def draw_weights(study: Mapping[str, Any]) -> Figure:
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
        for axes, temperature in zip(panels, (1.0, 10.0), strict=True):
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


def draw_elbo(study: Mapping[str, Any]) -> Figure:
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
        left.set(xscale="log", yscale="log")
        left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        left.yaxis.set_minor_formatter(NullFormatter())
        left.set(title=f"experts' sd {sd:.2g}:\nrouter's entropy (nats)", xlabel="step")
        right.set(title="routers at the end:\np of expert 1", xlabel="x", xlim=(0.44, 0.56))
        right.set_xticks([0.45, 0.5, 0.55])
        for axes in (left, right):
            add_grid(axes)
    lines = legend_lines((f"trained on the {name}", mark) for name, mark in _OBJECTIVES.values())
    figure.legend(handles=lines, loc="outside upper left", ncols=2)
    return figure


def draw_noise(study: Mapping[str, Any]) -> Figure:
    """Draws how many seeds solve the task under each kind of noise, over its scale."""
    figure = new_figure(7.6, 2.9)
    panels = row(figure, len(_SETTINGS), sharey=True)
    for axes, ((method, importance), title) in zip(panels, _SETTINGS.items(), strict=True):
        for kind, (name, mark) in _KINDS.items():
            where = (method, importance, kind)
            chosen = [run for run in study["runs"] if (run["method"], run["importance"], run["kind"]) == where]
            solved = [run["solved"] / run["seeds"] for run in chosen]
            axes.plot([run["scale"] for run in chosen], solved, **mark.line, label=name)
        axes.set(xscale="log", ylim=(-0.05, 1.05))
        name_ticks(axes, sorted({run["scale"] for run in study["runs"]}))
        axes.set(title=title, xlabel="scale of the noise")
        add_grid(axes)
    panels[0].set_ylabel("seeds that solve the task")
    panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.legend(
        handles=legend_lines(_KINDS.values()),
        loc="outside upper left",
        ncols=3,
        title=f"gating with balance loss {study['balance_weight']:g}",
        alignment="left",
    )
    return figure


def _find(records: Sequence[Mapping[str, Any]], method: str, temperature: float) -> Mapping[str, Any]:
    """Finds the record of a method and temperature; empty where there is none."""
    return next((r for r in records if (r["method"], r["temperature"]) == (method, temperature)), {})


def _plot(axes: Axes, record: Mapping[str, Any], key: str, *, power: int = 1, **how: Any) -> None:
    """Draws a curve of a record that has it; step 0, which a logarithmic axis has no place for, as half a step."""
    if key in record:
        values = [float("nan") if value is None else value**power for value in record[key]]
        axes.plot([max(float(step), 0.5) for step in record["steps"]], values, **how)


def _steps_axis(axes: Axes) -> None:
    axes.set_xscale("log")
    add_grid(axes)
