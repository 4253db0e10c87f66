# SPDX-License-Identifier: Apache-2.0
"""The figure of the language-model comparison: the test loss of every seed, and the load of the experts."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from equipoise_lab._style import GREY, Look, add_grid, new_figure, row, save, style
from equipoise_lab.compare._protocol import draw_seeds, set_lines
from equipoise_lab.compare.lm._contenders import CONTENDERS
from equipoise_lab.compare.lm._summary import Outcome

NAME = "compare-lm"
_LOOKS = {
    "peer": Look(colour="#6b6b6b", marker="o", filled=False),
    "control": Look(colour="#1a1a1a", marker="D"),
    "ours": Look(colour="#0b4f94", marker="s"),
}


def save_figure(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Draws two panels with a line for each contender, the least loss on top: test losses, and load violations."""
    ranked = sorted(outcomes, key=lambda outcome: outcome.mean, reverse=True)
    with style():
        figure = new_figure(9.6, 0.3 * len(ranked) + 1.5)
        losses, loads = row(figure, 2, width_ratios=(1.6, 1.0), sharey=True)
        for place, outcome in enumerate(ranked):
            _draw_losses(losses, place, outcome)
            _draw_loads(loads, place, outcome)
        for axes in (loads, losses):
            set_lines(axes, [CONTENDERS[outcome.contender].label for outcome in ranked])
            add_grid(axes, "x")
        for tick, outcome in zip(losses.get_yticklabels(), ranked, strict=True):
            tick.set_color(_LOOKS[CONTENDERS[outcome.contender].kind].colour)
        losses.margins(x=0.08)
        _title(losses, "test loss", "a mark for each seed, a bar and the number at the mean")
        losses.set_xlabel("nats a byte; less is better")
        _title(loads, "unevenness of the load", "0 is balanced; filled in training, open in evaluation")
        loads.set_xlabel("largest load over mean load, minus 1")
        loads.set_xlim(left=-0.05)
        return save(figure, folder, NAME)


def _title(axes: Axes, title: str, explanation: str) -> None:
    """Writes a title in bold, and below it what the marks mean."""
    axes.set_title(f"{title}\n", fontweight="bold")
    axes.text(0.0, 1.012, explanation, transform=axes.transAxes, fontsize=7.5, color=GREY, va="bottom")


def _draw_losses(axes: Axes, place: int, outcome: Outcome) -> None:
    look = _LOOKS[CONTENDERS[outcome.contender].kind]
    draw_seeds(axes, place, outcome, look, 3.6)
    how: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7.5, "color": look.colour}
    axes.annotate(f"{outcome.mean:.3f}", (max(outcome.loss), place), (7, 0), **how)


def _draw_loads(axes: Axes, place: int, outcome: Outcome) -> None:
    kind = CONTENDERS[outcome.contender]
    if kind.router is None:
        return
    colour = _LOOKS[kind.kind].colour
    training, evaluated = statistics.fmean(outcome.violation), statistics.fmean(outcome.eval_violation)
    axes.plot([training, evaluated], [place, place], color=colour, linewidth=0.7, alpha=0.5, zorder=1)
    axes.plot([evaluated], [place], marker="o", color=colour, markerfacecolor="white", markersize=4.6, linestyle="")
    axes.plot([training], [place], marker="o", color=colour, markersize=4.6, linestyle="")
