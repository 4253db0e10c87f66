# SPDX-License-Identifier: Apache-2.0
"""The figure of the assignment benchmark: time against rows, one line a solver."""

import math
from pathlib import Path

from matplotlib.axes import Axes

from equipoise_lab._style import add_grid, new_figure, save, spread, style, tick_seconds
from equipoise_lab._tables import name_threads
from equipoise_lab.bench._benchmark import Records
from equipoise_lab.bench._grid import grid_key
from equipoise_lab.bench._recipe import AssignBench
from equipoise_lab.bench._solvers import SOLVERS, Solver

_EXPERTS = 64
# The height of a name, as a fraction of that of the axes.
_LABEL_HEIGHT = 0.052
# Dark to light within the roles, so that lines stay apart in grey; markers tell them apart without any colour.
_LOOK = {
    "argmax": ("#555555", ""),
    "primal-dual": ("#0b3c6f", "o"),
    "cycle-cancelling": ("#1f66ad", "s"),
    "auction": ("#5b9bd0", "D"),
    "pot": ("#8c2d04", "^"),
    "ortools": ("#cc6a1b", "v"),
    "scipy": ("#d08a3a", "P"),
}


def save_assign_figure(bench: AssignBench, records: Records, folder: Path) -> list[Path]:
    """Draws time against n at k = 64 on logarithmic axes: exact solid, inexact dashed, torch.argmax dotted."""
    with style():
        figure = new_figure(7.2, 4.6)
        axes = figure.add_subplot()
        starts: list[tuple[float, float, Solver]] = []
        for solver in SOLVERS:
            points = _curve(bench, records, solver)
            if points:
                _draw(axes, solver, points)
                starts.append((*points[0], solver))
        _finish(axes, bench)
        _label_starts(axes, sorted(starts, key=lambda start: start[1]))
        return save(figure, folder, "bench-assign")


def _curve(bench: AssignBench, records: Records, solver: Solver) -> list[tuple[float, float]]:
    """The points (n, seconds) of a solver, in order of n."""
    points: list[tuple[float, float]] = []
    for size in sorted(size for size in bench.sizes if size[1] == _EXPERTS):
        record = records.get(grid_key(size, solver.name))
        if record is not None and record.status == "measured" and record.seconds is not None:
            points.append((float(size[0]), record.seconds))
    return points


def _draw(axes: Axes, solver: Solver, points: list[tuple[float, float]]) -> None:
    colour, marker = _LOOK[solver.name]
    dashes = ":" if solver.role == "floor" else "-" if solver.exact else "--"
    axes.plot(
        [n for n, _ in points],
        [seconds for _, seconds in points],
        linestyle=dashes,
        color=colour,
        marker=marker or None,
        markersize=4.5,
        linewidth=2.2 if solver.name == "primal-dual" else 1.5,
        zorder=3 if solver.role == "ours" else 2,
    )


def _label_starts(axes: Axes, starts: list[tuple[float, float, Solver]]) -> None:
    """Writes each solver's name left of its line, apart from its neighbours, with a hairline to the line."""
    lowest, highest = (math.log10(bound) for bound in axes.get_ylim())
    heights = spread([math.log10(seconds) for _, seconds, _ in starts], _LABEL_HEIGHT * (highest - lowest))
    for (n, seconds, solver), height in zip(starts, heights, strict=True):
        colour = _LOOK[solver.name][0]
        axes.plot([n / 1.35, n / 1.06], [10.0**height, seconds], color=colour, linewidth=0.6)
        axes.annotate(
            solver.title,
            xy=(n / 1.42, 10.0**height),
            color=colour,
            fontweight="bold" if solver.name == "primal-dual" else "normal",
            horizontalalignment="right",
            verticalalignment="center",
        )


def _finish(axes: Axes, bench: AssignBench) -> None:
    sizes = sorted(n for n, k in bench.sizes if k == _EXPERTS)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
    axes.yaxis.set_major_formatter(lambda seconds, _: tick_seconds(seconds))
    axes.minorticks_off()
    # Room for the names at the left.
    axes.set_xlim(sizes[0] / max(sizes[-1] / sizes[0], 2.0) ** 0.52, sizes[-1] * 1.15)
    add_grid(axes)
    axes.set_xlabel(f"rows n, {_EXPERTS} experts of capacity n / {_EXPERTS}")
    axes.set_ylabel("time of one call")
    axes.set_title(
        f"Balanced assignment, {bench.family} scores in float32, {name_threads(bench.threads)}\n"
        "solid: exact   dashed: inexact   dotted: no balancing",
    )
