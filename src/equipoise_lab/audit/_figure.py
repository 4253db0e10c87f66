# SPDX-License-Identifier: Apache-2.0
"""The figure of the audit: bias against standard deviation, one mark a strategy."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter

from equipoise.audit import CONFIDENCE, GROUPS, POWER, AuditResult, Finding, Verdict
from equipoise_lab._style import add_grid, new_figure, row, save, spread, style
from equipoise_lab.audit._recipe import Audit
from equipoise_lab.audit._report import NAME, describe

# Colour, marker and fill: any one of the three tells the verdicts apart, so grey print does too.
_LOOK: dict[Verdict, tuple[str, str, bool]] = {
    "biased": ("#8c2d04", "s", True),
    "undecided": ("#777777", "D", False),
    "unbiased": ("#0b5cad", "o", False),
}
_TICKS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
# The height of a name, as a fraction of that of the axes.
_LABEL_HEIGHT = 0.062


def save_figure(audit: Audit, outcomes: Sequence[AuditResult], folder: Path) -> list[Path]:
    """Draws bias against standard deviation of one estimate on logarithmic axes, for router and experts.

    A strategy whose bias was found is a filled square at the bias, with its confidence interval. One whose bias was not
    found is an open mark at the bias that would have been, with an arrow down: the bias is below that, or zero.

    Args:
        audit: the run.
        outcomes: one for each strategy.
        folder: where audit.svg and audit.png go.

    Returns:
        The files written.
    """
    with style():
        figure = new_figure(9.6, 4.6)
        panels = row(figure, len(GROUPS))
        for axes, group in zip(panels, GROUPS, strict=True):
            _draw_panel(axes, outcomes, group)
        panels[0].set_ylabel("bias / norm of the exact gradient")
        figure.suptitle(
            f"{describe(audit)}\n"
            "square: biased   circle: unbiased   diamond: undecided\n"
            f"filled: bias found, with {CONFIDENCE:.0%} interval   "
            f"arrow down: none found; one at the mark would have been, with probability {POWER:g}",
            x=0.01,
            horizontalalignment="left",
            fontsize=9,
        )
        return save(figure, folder, NAME)


def _draw_panel(axes: Axes, outcomes: Sequence[AuditResult], group: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    marks: list[tuple[float, float, str, Verdict]] = []
    # Baselines have a figure of their own; here they are shown if there is nothing else.
    for outcome in [o for o in outcomes if o.baseline == "none"] or outcomes:
        finding, verdict = outcome.findings[group], outcome.verdict
        y = _draw_mark(axes, finding, verdict)
        marks.append((finding.deviation, y, outcome.name, verdict))
    _frame(axes, [(x, y) for x, y, _, _ in marks])
    _label(axes, sorted(marks, key=lambda mark: mark[1]))
    axes.set_title(f"gradient of the {group}", fontweight="bold")
    axes.set_xlabel("standard deviation of one estimate / norm of the exact gradient")


def _draw_mark(axes: Axes, finding: Finding, verdict: Verdict) -> float:
    """Draws one strategy and returns the height of its mark."""
    colour, marker, filled = _LOOK[verdict]
    x, (lower, upper) = finding.deviation, finding.bias_interval
    # The verdict is about router and experts together; either alone may show no bias.
    shown = verdict == "biased" and lower > 0.0
    y = min(max(finding.bias, lower), upper) if shown else finding.detectable
    if shown:
        axes.plot([x, x], [lower, upper], color=colour, linewidth=1.4)
    else:
        axes.annotate(
            "", xy=(x, y / 2.2), xytext=(x, y), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.2}
        )
    face = colour if filled and shown else "white"
    axes.plot([x], [y], marker, markersize=7.5, color=colour, markerfacecolor=face, markeredgewidth=1.6, zorder=3)
    return y


def _frame(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Leaves room for the arrows below and the names at the right."""
    xs, ys = zip(*points, strict=True)
    span = max(max(xs) / min(xs), 2.0)
    axes.set_xlim(min(xs) / span**0.12, max(xs) * span**0.8)
    axes.set_ylim(min(ys) / 4.0, max(ys) * 2.5)
    axes.xaxis.set_major_locator(FixedLocator([digit * 10.0**power for power in range(-4, 5) for digit in _TICKS]))
    axes.xaxis.set_minor_locator(FixedLocator([]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value >= 1e-4 else f"{value:.0e}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    add_grid(axes)


def _label(axes: Axes, marks: Sequence[tuple[float, float, str, Verdict]]) -> None:
    """Writes the names in a column at the right, each at the height of its mark or close to it, with a hairline."""
    lowest, highest = (math.log10(bound) for bound in axes.get_ylim())
    heights = spread([math.log10(y) for _, y, _, _ in marks], _LABEL_HEIGHT * (highest - lowest))
    left, right = axes.get_xlim()
    column = right / (right / left) ** 0.28
    for (x, y, name, verdict), height in zip(marks, heights, strict=True):
        colour = _LOOK[verdict][0]
        axes.plot([x, column], [y, 10.0**height], color=colour, linewidth=0.5, zorder=1)
        axes.annotate(
            name,
            parse_math=False,  # a name may have a $
            xy=(column, 10.0**height),
            xytext=(3, 0),
            textcoords="offset points",
            color=colour,
            fontweight="bold" if verdict == "unbiased" else "normal",
            verticalalignment="center",
        )
