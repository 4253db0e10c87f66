# SPDX-License-Identifier: Apache-2.0
"""A figure of the audit: variance against cost, the paper's strategies in grey, what came after them in colour."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter

from equipoise.audit import GROUPS, AuditResult
from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab._style import add_grid, new_figure, row, save, spread, style
from equipoise_lab.audit._recipe import Audit
from equipoise_lab.audit._report import describe

NAME = "audit-cost"
_GREY = "#8a8a8a"
# One hue for each way of sampling; baselines have that of the strategy they are used with.
_HUES = (("gm", "#8c2d04"), ("skip", "#0b5cad"), ("sample", "#1b7837"))
_OTHER = "#6a3d9a"
_LABEL_HEIGHT = 0.034


@dataclass(frozen=True, slots=True)
class _Mark:
    """One estimate: microseconds, variance in units of the squared norm of the gradient, and how it is drawn."""

    x: float
    y: float
    name: str
    colour: str
    filled: bool


def save_cost_figure(audit: Audit, outcomes: Sequence[AuditResult], folder: Path) -> list[Path]:
    """Draws the variance of one estimate against the time it takes, on logarithmic axes, for router and experts.

    Args:
        audit: the run.
        outcomes: one for each strategy and baseline.
        folder: where audit-cost.svg and audit-cost.png go.

    Returns:
        The files written.
    """
    with style():
        figure = new_figure(10.6, 7.0)
        panels = row(figure, len(GROUPS))
        for axes, group in zip(panels, GROUPS, strict=True):
            _draw_panel(axes, _marks(outcomes, group))
            axes.set_title(f"gradient of the {group}", fontweight="bold")
            axes.set_xlabel("time of one estimate without the experts' own, microseconds")
        panels[0].set_ylabel("variance of one estimate / squared norm of the exact gradient")
        figure.suptitle(
            f"Variance against cost: {describe(audit)}\n"
            "grey: the paper's strategies   colour: mixtures, averages, baselines and critics   "
            "filled: unbiased   open: biased or undecided\n"
            "down and left is better   dotted: equal variance in equal time, by averaging   "
            "baselines do not change the experts' gradient",
            x=0.01,
            horizontalalignment="left",
            fontsize=9,
        )
        return save(figure, folder, NAME)


def _marks(outcomes: Sequence[AuditResult], group: str) -> list[_Mark]:
    """The marks of a panel, lowest first; the experts' gradient differs only where draws are averaged."""
    shown = [o for o in outcomes if group == "router" or o.baseline in ("none", "draws")]
    if not shown:
        shown = list(outcomes)
    marks = [
        _Mark(
            x=1e6 * outcome.step_seconds,
            y=max(outcome.findings[group].deviation ** 2, 1e-12),
            name=outcome.name,
            colour=_colour(outcome),
            filled=outcome.verdict == "unbiased",
        )
        for outcome in shown
    ]
    return sorted(marks, key=lambda mark: mark.y)


def _colour(outcome: AuditResult) -> str:
    if outcome.baseline == "none" and outcome.strategy.name in PAPER_STRATEGIES:
        return _GREY
    return next((hue for start, hue in _HUES if outcome.strategy.name.startswith(start)), _OTHER)


def _draw_panel(axes: Axes, marks: Sequence[_Mark]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for mark in marks:
        face = mark.colour if mark.filled else "white"
        axes.plot(
            [mark.x],
            [mark.y],
            "o",
            markersize=7,
            color=mark.colour,
            markerfacecolor=face,
            markeredgewidth=1.5,
            zorder=3,
        )
    xs, ys = [mark.x for mark in marks], [mark.y for mark in marks]
    span, height = max(max(xs) / min(xs), 3.0), max(max(ys) / min(ys), 3.0)
    left, column = min(xs) / span**0.1, max(xs) * span**0.15
    axes.set_xlim(left, column * (column / left) ** 0.75)
    axes.set_ylim(min(ys) / height**0.08, max(ys) * height**0.08)
    for axis, most in ((axes.xaxis, column), (axes.yaxis, math.inf)):
        ticks = [d * 10.0**power for power in range(-6, 7) for d in (1.0, 2.0, 5.0)]
        axis.set_major_locator(FixedLocator([tick for tick in ticks if tick < most]))
        axis.set_minor_locator(FixedLocator([]))
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    for power in range(-12, 13):  # variance times time is what averaging estimates keeps
        product = 4.0**power * xs[0] * ys[0]
        axes.plot([left, column], [product / left, product / column], ":", color="#c8c8c8", linewidth=0.8, zorder=0)
    add_grid(axes)
    _label(axes, marks, column)


def _label(axes: Axes, marks: Sequence[_Mark], column: float) -> None:
    """Writes the names in a column at the right, each as near the height of its mark as there is room, with a line."""
    lowest, highest = (math.log10(bound) for bound in axes.get_ylim())
    least = _LABEL_HEIGHT * (highest - lowest)
    heights = spread([math.log10(mark.y) for mark in marks], least)
    for i, (mark, height) in enumerate(zip(marks, heights, strict=True)):
        # Within the axes, with room for the names below and above.
        low, high = lowest + (i + 0.5) * least, highest - (len(marks) - i - 0.5) * least
        y = 10.0 ** min(max(height, low), high)
        axes.plot([mark.x, column], [mark.y, y], color=mark.colour, linewidth=0.5, alpha=0.7, zorder=1)
        axes.annotate(
            mark.name,
            parse_math=False,  # a name may have a $
            xy=(column, y),
            xytext=(3, 0),
            textcoords="offset points",
            color="#555555" if mark.colour == _GREY else mark.colour,
            fontsize=7.5,
            verticalalignment="center",
        )
