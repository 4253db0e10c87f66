# SPDX-License-Identifier: Apache-2.0
"""The figures of the studies: here those that need no training (overview, marginals, maximum entropy, solvers)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullFormatter

from equipoise_lab._style import (
    GREY,
    INK,
    SEQUENTIAL,
    Look,
    add_grid,
    name_ticks,
    new_figure,
    plot_known,
    row,
    save,
    stack,
    style,
    tick_seconds,
)
from equipoise_lab.paper._trace_figures import draw_elbo, draw_noise, draw_training, draw_weights

_MATCHING = Look(colour="#8c2d04", marker="^")
_GIBBS = Look(colour="#0b4f94", marker="o", filled=False, dashes="--")
_UNBALANCED = Look(colour=GREY, marker="x", dashes=":")
_OVER = "#b3400a"
# Dark to light, so that an order can be seen in grey.
_SHADES = ("#08306b", "#2b7bba", "#7fb8da", "#b5b5b5")
_MARKERS = ("o", "s", "^", "D")
_SOLVERS = (
    ("hungarian_ms", "Hungarian (scipy)", Look(colour="#cc6a1b", marker="P")),
    ("cycle_cancelling_ms", "cycle cancelling", Look(colour="#1f66ad", marker="s")),
    ("primal_dual_ms", "primal-dual", Look(colour="#08306b", marker="o", dashes="--", filled=False)),
)


def save_study_figures(studies: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draws every study that has a figure here and is given."""
    with style():
        drawn = [save(draw(studies[name]), folder, file) for name, draw, file in FIGURES if name in studies]
    return [path for paths in drawn for path in paths]


def draw_overview(study: Mapping[str, Any]) -> Figure:
    """Draws expectations and samples as matrices side by side, with the sum of each column below."""
    figure = new_figure(7.6, 3.4)
    panels = row(figure, 5)
    capacity, rows = study["capacity"], len(study["router"])
    _draw_matrix(panels[0], study["router"], "router\nprobabilities", capacity, percent=True)
    _draw_matrix(panels[1], study["sinkhorn"], "Sinkhorn\nexpectations", capacity, percent=True)
    for axes, name, title in (
        (panels[2], "independent", "independent\nsample"),
        (panels[3], "skip", "the same,\nrest skipped"),
        (panels[4], "balanced", "Gumbel-Matching\nsample"),
    ):
        kept = study["kept"] if name == "skip" else [True] * rows
        drawn = list(zip(study[name], kept, strict=True))
        matrix = [[float(expert == j and stays) for j in range(3)] for expert, stays in drawn]
        skipped = [(i, expert) for i, (expert, stays) in enumerate(drawn) if not stays]
        _draw_matrix(axes, matrix, title, capacity, skipped=skipped)
    panels[0].set_ylabel(f"{rows} datapoints")
    figure.supxlabel(
        f"Three experts of capacity {capacity}; below each column its sum, framed where it exceeds the capacity.\n"
        "Probabilities in percent. Crossed out: drawn, but skipped. The samples share their noise.",
        fontsize=8,
        color=GREY,
    )
    return figure


def _draw_matrix(
    axes: Axes,
    matrix: Sequence[Sequence[float]],
    title: str,
    capacity: int,
    *,
    percent: bool = False,
    skipped: Sequence[tuple[int, int]] = (),
) -> None:
    """Draws a cell for each pair, the darker the more, and the sum below each column, framed if beyond capacity."""
    shades, rows = mpl.colormaps[SEQUENTIAL], len(matrix)
    for i, values in enumerate(matrix):
        for j, value in enumerate(values):
            shade = shades(0.3 if (i, j) in skipped else 0.04 + 0.9 * value)
            axes.add_patch(Rectangle((j, i), 0.92, 0.88, facecolor=shade, linewidth=0))
            if percent:
                colour = "white" if value > 0.55 else INK
                text = f"{100 * value:.0f}"
                axes.text(j + 0.46, i + 0.46, text, fontsize=6.5, color=colour, ha="center", va="center")
    for i, j in skipped:
        for y in ((i + 0.14, i + 0.74), (i + 0.74, i + 0.14)):
            axes.plot([j + 0.28, j + 0.64], y, color=INK, linewidth=0.9)
    for j, total in enumerate(sum(column) for column in zip(*matrix, strict=True)):
        if total > capacity + 1e-6:
            axes.add_patch(Rectangle((j + 0.04, rows + 0.2), 0.84, 0.86, fill=False, edgecolor=_OVER, linewidth=1.2))
        text = f"{total:.1f}" if percent else f"{total:.0f}"
        axes.text(j + 0.46, rows + 0.64, text, ha="center", va="center", fontsize=8)
    axes.set(xlim=(-0.1, 3.02), ylim=(rows + 1.1, -0.1), aspect=0.62, xticks=[], yticks=[])
    axes.set_title(title, loc="center", fontsize=8.5)
    axes.spines[:].set_visible(False)


def draw_marginals(study: Mapping[str, Any]) -> Figure:
    """Draws Sinkhorn's entries against those of Gumbel-Matching and Gibbs, then the error against n."""
    figure = new_figure(7.6, 5.6)
    above, below = stack(figure, 1.0, 1.05)
    scatters = row(above, len(study["points"]), sharey=True)
    for axes, size in zip(scatters, study["points"], strict=True):
        axes.plot([0.0, 1.0], [0.0, 1.0], color=GREY, linewidth=0.8, zorder=1)
        x, matching, gibbs = zip(*size["entries"], strict=True)
        axes.plot(x, gibbs, **_GIBBS.points(), label="Gibbs")
        axes.plot(x, matching, **_MATCHING.points(), label="Gumbel-Matching")
        axes.set(aspect="equal", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xlabel="Sinkhorn's expectation")
        axes.set_title(f"n = {size['n']}, k = {size['k']}")
        add_grid(axes)
    scatters[0].set_ylabel("marginal probability")
    scatters[0].legend(loc="upper left", fontsize=8, handletextpad=0.2)
    experts = sorted({size["k"] for size in study["sizes"]})
    panels = row(below, len(experts), sharey=True)
    for axes, k in zip(panels, experts, strict=True):
        _draw_errors(axes, [size for size in study["sizes"] if size["k"] == k], k)
    panels[0].set_ylabel("mean absolute difference")
    panels[-1].legend(loc="lower left", fontsize=7.5)
    spread = ", ".join(f"{sd:g}" for sd in study["sds"])
    below.supxlabel(
        f"datapoints n; logits of standard deviation {spread}; bars: standard error over matrices", fontsize=8.5
    )
    return figure


def _draw_errors(axes: Axes, sizes: Sequence[Mapping[str, Any]], k: int) -> None:
    n = [size["n"] for size in sizes]
    lines = (
        ("unbalanced_vs_gumbel_matching", "router's p, Gumbel-Matching", _UNBALANCED),
        ("sinkhorn_vs_gibbs", "Sinkhorn, Gibbs", _GIBBS),
        ("sinkhorn_vs_gumbel_matching", "Sinkhorn, Gumbel-Matching", _MATCHING),
    )
    for key, name, mark in lines:
        error = [size[f"{key}_se"] for size in sizes]
        axes.errorbar(n, [size[key] for size in sizes], yerr=error, label=name, **mark.line, elinewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(n, [str(size) for size in n])
    axes.set_xlim(min(n) / 1.5, max(n) * 1.5)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(f"k = {k} experts")
    add_grid(axes)


def draw_maximum_entropy(study: Mapping[str, Any]) -> Figure:
    """Draws u against p^(1/tau) entry by entry, then tau and the quality of the fit against n."""
    figure = new_figure(7.6, 5.4)
    above, below = stack(figure, 1.05, 1.0)
    sharpnesses = sorted({problem["sharpness"] for problem in study["problems"]})
    looks = {
        sharpness: Look(colour=colour, marker=marker)
        for sharpness, colour, marker in zip(sharpnesses, _SHADES[::-1], _MARKERS, strict=False)
    }
    shapes = sorted({(point["n"], point["k"]) for point in study["points"]})
    panels = row(above, len(shapes))
    for axes, shape in zip(panels, shapes, strict=True):
        _draw_powers(axes, [point for point in study["points"] if (point["n"], point["k"]) == shape], looks)
    panels[0].set_ylabel(r"$u_{ij}$, in the fitted scale")
    left, right = row(below, 2)
    for sharpness in sharpnesses:
        median = sorted((m for m in study["median"] if m["sharpness"] == sharpness), key=lambda m: (m["n"], m["k"]))
        n = [m["n"] * (1.0 + 0.02 * (m["k"] - 4)) for m in median]
        mark = looks[sharpness].points(5.0)
        left.plot(n, [m["tau"] for m in median], **mark, label=f"{sharpness:g}")
        right.plot(n, [max(1.0 - m["r_squared"], 1e-6) for m in median], **mark)
    grid = [2.8 * 1.02**step for step in range(92)]
    left.plot(grid, [n / (n - 1.0) for n in grid], color=INK, linewidth=1.0, zorder=1, label="n / (n - 1)")
    left.set_ylabel(r"fitted $\tau$")
    left.legend(title="sd of the logits", fontsize=7.5, title_fontsize=7.5)
    right.set(yscale="log", ylabel=r"unexplained variation, $1 - R^2$")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        name_ticks(axes, sorted({m["n"] for m in study["median"]}))
        axes.set_xlabel("datapoints n (k = 2 to n, slightly apart)")
        add_grid(axes)
    return figure


def _draw_powers(axes: Axes, points: Sequence[Mapping[str, Any]], looks: Mapping[float, Look]) -> None:
    every = [value for point in points for entry in point["entries"] for value in entry]
    span = [min(every) / 1.5, max(every) * 1.5]
    axes.plot(span, span, color=GREY, linewidth=0.8, zorder=1)
    for point in points:
        x, y = zip(*point["entries"], strict=True)
        axes.plot(x, y, **looks[point["sharpness"]].points(3.6))
    axes.set(xscale="log", yscale="log")
    axes.minorticks_off()
    axes.set(xlabel=r"$p_{ij}^{1/\tau}$", title=f"n = {points[0]['n']}, k = {points[0]['k']}")
    add_grid(axes)


def draw_solver_time(study: Mapping[str, Any]) -> Figure:
    """Draws the time of each solver against n, one panel for each k, then the number of improvements."""
    sizes = [size for size in study["sizes"] if size["n"] > size["k"]]
    by_experts = {k: [size for size in sizes if size["k"] == k] for k in sorted({size["k"] for size in sizes})}
    figure = new_figure(7.6, 5.0)
    above, below = stack(figure, 1.0, 0.85)
    panels = row(above, len(by_experts), sharey=True)
    for axes, (k, chosen) in zip(panels, by_experts.items(), strict=True):
        for key, name, mark in _SOLVERS:
            points = ((size["n"], None if size[key] is None else 1e-3 * size[key]) for size in chosen)
            plot_known(axes, points, **mark.line, label=name)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda seconds, _: tick_seconds(seconds))
        axes.set_title(f"k = {k} experts")
        _rows_axis(axes, sorted({size["n"] for size in chosen})[::2])
    panels[0].set_ylabel("time of one call")
    panels[0].legend(loc="upper left", fontsize=7.5)
    axes = below.subplots()
    for (k, chosen), colour, marker in zip(by_experts.items(), _SHADES[::-1], _MARKERS, strict=False):
        line = Look(colour=colour, marker=marker).line
        axes.plot([size["n"] for size in chosen], [size["improvements"] for size in chosen], **line, label=f"k = {k}")
    axes.legend(fontsize=8)
    axes.set(ylabel="cycles cancelled", xlabel="datapoints n")
    axes.set_title("improvements after the auction's start, one datapoint an edge as in the paper")
    _rows_axis(axes, sorted({size["n"] for size in sizes}))
    return figure


def _rows_axis(axes: Axes, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    name_ticks(axes, ticks, ",")
    add_grid(axes)


FIGURES: tuple[tuple[str, Callable[[Mapping[str, Any]], Figure], str], ...] = (
    ("overview", draw_overview, "overview"),
    ("marginals", draw_marginals, "study-marginals"),
    ("maximum_entropy", draw_maximum_entropy, "study-maximum-entropy"),
    ("solver_time", draw_solver_time, "study-solver-time"),
    ("traces", draw_training, "study-training"),
    ("traces", draw_weights, "study-weights"),
    ("elbo", draw_elbo, "study-elbo"),
    ("noise", draw_noise, "study-noise"),
)
"""The study that each figure shows, what draws it, and the name of its files."""
