# SPDX-License-Identifier: Apache-2.0
"""The figure that explains the verdicts: what a run solves against how far its dataset is from the capacity.

Each expert may take half of the points. The solution sends the points with x >= 0.5, a quarter of them on average, to
one expert and the rest to the other. The smaller that side is in a dataset, the more capacity and data disagree.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab._style import GREY, INK, add_grid, look, new_figure, save
from equipoise_lab.paper._results import BASELINES, Result, select, select_main
from equipoise_lab.paper._task import draw_data, minority_share

# Datasets are put together in groups of this many, sorted by share.
_GROUP = 10
_NAMES = {"ema": "moving average", "none": "no baseline"}


def draw_minority_figure(folder: Path, results: Sequence[Result], recipe: Mapping[str, Any], note: str) -> list[Path]:
    """Draws the solved fraction of the first panel at temperatures >= 1 against the share of the minority side.

    Args:
        folder: where to.
        results: the runs, with a dataset for each seed.
        recipe: `num_points` and `noise_sd` are read.
        note: said above.

    Returns:
        The files written: SVG and PNG of `minority`; nothing where no such run is among the results.
    """
    points = solved_by_share(results, recipe["num_points"], recipe["noise_sd"])
    return save(_draw(points, note), folder, "minority") if points else []


def solved_by_share(
    results: Sequence[Result], num_points: int, noise_sd: float
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Lists (share of the minority side, solved fraction of the temperatures >= 1), a pair for each seed.

    Returns:
        The pairs by baseline and method, in the order of the shares.
    """
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    shares: dict[int, float] = {}
    for baseline in BASELINES:
        runs = select(select_main(results, baseline=baseline), loss="reinforce", variant="plain")
        for method in PAPER_STRATEGIES:
            solved: dict[int, list[bool]] = {}
            for run in (r for r in runs if r.method == method and r.temperature >= 1.0):
                solved.setdefault(run.seed, []).append(run.solved)
            for seed in solved.keys() - shares.keys():
                shares[seed] = minority_share(draw_data(seed, num_points, noise_sd)[0])
            if solved:
                found[baseline, method] = sorted((shares[s], statistics.fmean(each)) for s, each in solved.items())
    return found


def _draw(points: Mapping[tuple[str, str], Sequence[tuple[float, float]]], note: str) -> Figure:
    methods = [method for method in PAPER_STRATEGIES if any(m == method for _, m in points)]
    figure = new_figure(7.2, 2.4 * -(-len(methods) // 2) + 0.5)
    grid = list(figure.subplots(-(-len(methods) // 2), 2, sharex=True, sharey=True, squeeze=False).flat)
    for axes, method in zip(grid, methods, strict=False):
        _draw_method(axes, points, method)
    for axes in grid[len(methods) :]:
        axes.set_axis_off()
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, fontsize=8.5)
    figure.supylabel("solved, of the temperatures >= 1", fontsize=9, color=INK)
    figure.supxlabel("share of the points with x >= 0.5 in the dataset (capacity: 0.5)", fontsize=9, color=INK)
    if note:
        figure.suptitle(note, fontsize=9, color=GREY, x=0.995, horizontalalignment="right")
    return figure


def _draw_method(axes: Axes, points: Mapping[tuple[str, str], Sequence[tuple[float, float]]], method: str) -> None:
    """Draws a faint dot for each dataset, and a line through the means of groups of them."""
    for baseline, name in _NAMES.items():
        pairs = points.get((baseline, method), ())
        if not pairs:
            continue
        dashed, colour = baseline == "none", look(method).colour
        shift = 0.012 if dashed else -0.012
        axes.plot(
            [x for x, _ in pairs],
            [y + shift for _, y in pairs],
            "o",
            color=colour,
            markersize=3.2,
            markerfacecolor="white" if dashed else colour,
            alpha=0.45,
        )
        groups = [pairs[i : i + _GROUP] for i in range(0, len(pairs), _GROUP)]
        middle = [tuple(map(statistics.fmean, zip(*group, strict=True))) for group in groups]
        line: dict[str, Any] = {"linestyle": "--" if dashed else "-", "linewidth": 1.8, "label": name}
        axes.plot(*zip(*middle, strict=True), color=colour, **line)
    axes.set_ylim(-0.06, 1.06)
    axes.set_title(PAPER_STRATEGIES[method].label, fontweight="bold")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    add_grid(axes)
