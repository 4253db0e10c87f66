# SPDX-License-Identifier: Apache-2.0
"""The result figures: final error against temperature (figure 2, appendix E), and solved runs against the dataset."""

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullFormatter

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab._style import GREY, INK, add_grid, legend_lines, look, new_figure, save, style, write_note
from equipoise_lab.paper._results import LOSSES, THRESHOLD, VARIANTS, Baseline, Result, select, select_main
from equipoise_lab.paper._solved import PANEL_NAMES, draw_tables, panel_tables, sweep_tables
from equipoise_lab.paper._task import draw_data, minority_share

# Errors outside are drawn at the edge. 0.01 is the noise of the data, 0.2 about what a constant gets.
_FLOOR, _CEILING = 0.006, 2.0
# Strategies at one temperature stand side by side, each by this factor.
_DODGE = 1.075
_TICKS = (0.01, 0.1, 1.0, 10.0, 100.0)
_DASHES = (0, (4.0, 3.0))
_GATING = "Gating, balance loss 0.01"
# In the figure of shares, datasets are put together in groups of this many, sorted by share.
_GROUP = 10
_NAMES: dict[Baseline, str] = {"ema": "moving average", "none": "no baseline"}


def draw_result_figures(
    out: Path, results: Sequence[Result], recipe: Mapping[str, Any], *, model: Mapping[str, Any] | None = None
) -> list[Path]:
    """Draws `main`, `appendix`, `solved`, `sweeps` and `minority` into `figures` of a folder, as far as they were run.

    The first panel of the paper's figure 2 shows data and a learned model: `x`, `y`, `experts` (slope and intercept of
    each), `router` (weight and bias of p(z = 0 | x)), `label`, `mse`.
    """
    folder, main = out / "figures", select_main(results)
    note = quick_note(recipe)
    paths: list[Path] = []
    with style():
        if main:
            paths += save(_draw_main(results, model, note), folder, "main")
            paths += save(_draw_appendix(main, note), folder, "appendix")
        for name, tables in (("solved", panel_tables(results)), ("sweeps", sweep_tables(results))):
            paths += save(draw_tables(tables, 8.6, note), folder, name) if tables else []
        if recipe.get("dataset") == "per-seed":
            points = solved_by_share(results, recipe["num_points"], recipe["noise_sd"])
            paths += save(_draw_minority(points, note), folder, "minority") if points else []
    return paths


def quick_note(recipe: Mapping[str, Any]) -> str:
    """Says on a figure that it does not show the paper's experiment in full; empty if it does.

    Example:
        >>> quick_note({"quick": True, "steps": 500})
        'quick run (500 steps): not the experiment in full'
    """
    return f"quick run ({recipe['steps']:,} steps): not the experiment in full" if recipe.get("quick") else ""


def _draw_main(results: Sequence[Result], model: Mapping[str, Any] | None, note: str) -> Figure:
    """Figure 2: the data with a learned model, and gating; below, REINFORCE with the moving average and without."""
    figure = new_figure(7.2, 7.4)
    first, *panels = figure.subplots(2, 2).flat
    if model:
        _draw_model(first, model)
    else:
        first.set_axis_off()
    shown: list[tuple[str, Baseline, str]] = [
        ("gating", "ema", _GATING),
        *(("reinforce", b, f"REINFORCE, {name}") for b, name in _NAMES.items()),
    ]
    for axes, (loss, baseline, title) in zip(panels, shown, strict=True):
        _draw_panel(axes, select(select_main(results, baseline=baseline), loss=loss, variant="plain"), title)
    for axes in panels[:2]:
        axes.set_ylabel("final mean squared error")
    _finish(figure, note)
    return figure


def _draw_appendix(main: Sequence[Result], note: str) -> Figure:
    """The appendix's figure: REINFORCE above, gating below; plain, Sinkhorn first, no importance weights."""
    figure = new_figure(10.8, 6.9)
    grid = figure.subplots(2, 3, sharex=True, sharey=True)
    for row, loss in zip(grid, LOSSES, strict=True):
        for axes, variant in zip(row, VARIANTS, strict=True):
            title = _GATING if (loss, variant) == ("gating", "plain") else PANEL_NAMES[loss, variant]
            _draw_panel(axes, select(main, loss=loss, variant=variant), title)
            axes.label_outer()
        row[0].set_ylabel("final mean squared error")
    _finish(figure, note)
    return figure


def _finish(figure: Figure, note: str) -> None:
    """Puts one legend under all panels, and the note above."""
    others = [
        Line2D([], [], color=INK, linestyle=_DASHES, linewidth=1.0, label=f"solved below {THRESHOLD:g}"),
        Line2D([], [], color=GREY, linestyle="", marker=".", markersize=4.0, label="one seed (lines: median)"),
    ]
    figure.legend(handles=[*legend_lines(), *others], loc="outside lower center", ncols=3, fontsize=8.5)
    write_note(figure, note)


def _draw_panel(axes: Axes, runs: Sequence[Result], title: str) -> None:
    axes.set(xscale="log", yscale="log", ylim=(_FLOOR, _CEILING))
    axes.set_title(title, fontweight="bold")
    axes.axhline(THRESHOLD, color=INK, linestyle=_DASHES, linewidth=1.0, zorder=1)
    for place, name in enumerate(PAPER_STRATEGIES):
        shift = _DODGE ** (place - (len(PAPER_STRATEGIES) - 1) / 2)
        _draw_method(axes, select(runs, method=name), name, shift)
    diverged = sum(not math.isfinite(run.mse) for run in runs)
    above = sum(math.isfinite(run.mse) and run.mse > _CEILING for run in runs)
    counts = ((diverged, "diverged"), (above, f"above {_CEILING:g}"))
    if counted := ", ".join(f"{count} {what}" for count, what in counts if count):
        box = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
        where: dict[str, Any] = {"xycoords": "axes fraction", "ha": "right", "va": "top", "bbox": box, "zorder": 4}
        axes.annotate(f"at the top edge: {counted}", (0.985, 0.95), fontsize=7.5, color=GREY, **where)
    _set_ticks(axes, sorted({run.temperature for run in runs}))
    add_grid(axes)


def _draw_method(axes: Axes, runs: Sequence[Result], name: str, shift: float) -> None:
    """Draws a line through the medians over seeds, and a dot for every run."""
    if not runs:
        return
    errors: dict[float, list[float]] = {}
    for run in runs:
        errors.setdefault(run.temperature * shift, []).append(_drawn(run.mse))
    shown, xs = look(name), sorted(errors)
    dots = [(x, error) for x in xs for error in errors[x]]
    # Runs that are drawn at an edge are drawn whole.
    axes.plot(*zip(*dots, strict=True), ".", color=shown.colour, markersize=3.0, alpha=0.4, zorder=2, clip_on=False)
    medians = [_median(errors[x]) for x in xs]
    axes.plot(xs, medians, **shown.line, linewidth=1.3, markersize=4.4, zorder=3, clip_on=False)


def _drawn(mse: float) -> float:
    """Where a run is drawn: inside the frame, at the top edge if it diverged."""
    return _CEILING if not math.isfinite(mse) else min(max(mse, _FLOOR), _CEILING)


def _median(errors: Sequence[float]) -> float:
    """The median; at the top edge if either of two middle values is: the edge stands for any number above it.

    Example:
        >>> _median([0.01, 0.01, 2.0, 2.0]), _median([0.01, 0.03])
        (2.0, 0.02)
    """
    return _CEILING if statistics.median_high(errors) >= _CEILING else statistics.median(errors)


def _set_ticks(axes: Axes, temperatures: Sequence[float]) -> None:
    if temperatures:
        axes.set_xlim(min(temperatures) / 1.6, max(temperatures) * 1.6)
    axes.set_xlabel("temperature")
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_minor_locator(FixedLocator(temperatures))
    axes.yaxis.set_major_locator(FixedLocator([0.01, 0.1, 1.0]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())


def _draw_model(axes: Axes, model: Mapping[str, Any]) -> None:
    """Draws the data, both experts, and where the router switches."""
    weight, bias = model["router"]
    points = [(x, y, weight * x + bias > 0.0) for x, y in zip(model["x"], model["y"], strict=True)]
    for chosen, colour, marker in ((True, "#0b4f94", "o"), (False, "#cc6a1b", "^")):
        xs, ys = [x for x, _, z in points if z == chosen], [y for _, y, z in points if z == chosen]
        face = colour if chosen else "white"
        axes.plot(xs, ys, marker, color=colour, markersize=3.6, alpha=0.75, markerfacecolor=face)
    for (slope, intercept), colour, dashes in zip(model["experts"], ("#0b4f94", "#cc6a1b"), ("-", "--"), strict=True):
        axes.plot([-1.0, 1.0], [intercept - slope, intercept + slope], dashes, color=colour, linewidth=1.6)
    if weight and abs(bias / weight) <= 1.0:
        axes.axvline(-bias / weight, color=INK, linewidth=1.0, linestyle=":")
        axes.annotate("router", (-bias / weight, -1.42), (-3, 0), textcoords="offset points", ha="right", fontsize=8)
    axes.set(ylim=(-1.5, 1.5), xlabel="x", ylabel="y")
    axes.set_title("Data and learned model", fontweight="bold")
    text = "\n".join([*textwrap.wrap(model["label"], 24), f"MSE {model['mse']:.4f}"])
    axes.annotate(text, (0.03, 0.97), xycoords="axes fraction", va="top", fontsize=8, color=GREY)


def solved_by_share(
    results: Sequence[Result], num_points: int, noise_sd: float
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Lists (share of the minority side, solved fraction of the temperatures >= 1) of each seed, in this order.

    Each expert may take half of the points. The solution sends the points with x >= 0.5, a quarter of them on average,
    to one expert. The smaller that side is in a dataset, the more capacity and data disagree. By baseline and method.
    """
    shares = {seed: minority_share(draw_data(seed, num_points, noise_sd)[0]) for seed in {run.seed for run in results}}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for baseline in _NAMES:
        runs = select(select_main(results, baseline=baseline), loss="reinforce", variant="plain")
        for method in PAPER_STRATEGIES:
            solved: dict[int, list[bool]] = {}
            for run in (r for r in runs if r.method == method and r.temperature >= 1.0):
                solved.setdefault(run.seed, []).append(run.solved)
            if solved:
                found[baseline, method] = sorted((shares[s], statistics.fmean(each)) for s, each in solved.items())
    return found


def _draw_minority(points: Mapping[tuple[str, str], Sequence[tuple[float, float]]], note: str) -> Figure:
    methods = [method for method in PAPER_STRATEGIES if any(m == method for _, m in points)]
    figure = new_figure(7.2, 2.4 * -(-len(methods) // 2) + 0.5)
    grid = list(figure.subplots(-(-len(methods) // 2), 2, sharex=True, sharey=True, squeeze=False).flat)
    for axes, method in zip(grid, methods, strict=False):
        _draw_shares(axes, points, method)
    for axes in grid[len(methods) :]:
        axes.set_axis_off()
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, fontsize=8.5)
    figure.supylabel("solved, of the temperatures >= 1", fontsize=9, color=INK)
    figure.supxlabel("share of the points with x >= 0.5 in the dataset (capacity: 0.5)", fontsize=9, color=INK)
    write_note(figure, note)
    return figure


def _draw_shares(axes: Axes, points: Mapping[tuple[str, str], Sequence[tuple[float, float]]], method: str) -> None:
    """Draws a faint dot for each dataset, and a line through the means of groups of them."""
    for baseline, name in _NAMES.items():
        pairs = points.get((baseline, method), ())
        if not pairs:
            continue
        dashed, colour = baseline == "none", look(method).colour
        xs, ys = [x for x, _ in pairs], [y + (0.012 if dashed else -0.012) for _, y in pairs]
        face = "white" if dashed else colour
        axes.plot(xs, ys, "o", color=colour, markersize=3.2, markerfacecolor=face, alpha=0.45)
        groups = [pairs[i : i + _GROUP] for i in range(0, len(pairs), _GROUP)]
        middle = [tuple(map(statistics.fmean, zip(*group, strict=True))) for group in groups]
        dashes = "--" if dashed else "-"
        axes.plot(*zip(*middle, strict=True), color=colour, linestyle=dashes, linewidth=1.8, label=name)
    axes.set_ylim(-0.06, 1.06)
    axes.set_title(PAPER_STRATEGIES[method].label, fontweight="bold")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    add_grid(axes)
