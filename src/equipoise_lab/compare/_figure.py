# SPDX-License-Identifier: Apache-2.0
"""The figure of the comparison: the course of the validation loss, and the test loss of every seed."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from equipoise_lab._style import GREY, Look, add_grid, new_figure, row, save, stack, style
from equipoise_lab.compare._contenders import CONTENDERS
from equipoise_lab.compare._recipe import EVALUATIONS, Comparison
from equipoise_lab.compare._summary import Outcome

NAME = "compare"
_LOOKS = {
    "switch": Look(colour="#5a5a5a", marker="X", dashes=":"),
    "base": Look(colour="#8a8a8a", marker="D", dashes="--", filled=False),
    "skip-iw": Look(colour="#5b9bd0", marker="s", dashes=(0, (5.0, 1.5, 1.0, 1.5)), filled=False),
    "skip-iw-recipe": Look(colour="#0b4f94", marker="s"),
    "gm-iw-mix-recipe": Look(colour="#8c2d04", marker="^"),
    "exact": Look(colour="#222222", marker="o", filled=False),
}
_TICKS = (0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)


def save_figure(recipe: Comparison, outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Draws two rows, one for each evaluation: the validation loss over steps, and the test loss of every seed."""
    titles = {
        "unlimited": "evaluated without a capacity",
        "limited": f"evaluated with capacity {recipe.eval_capacity_factor:g}",
    }
    with style():
        figure = new_figure(9.6, 6.6)
        parts = stack(figure, *(1.0 for _ in EVALUATIONS))
        for part, evaluation in zip(parts, EVALUATIONS, strict=True):
            own = [outcome for outcome in outcomes if outcome.evaluation == evaluation]
            courses, ends = row(part, 2, width_ratios=(1.0, 1.15))
            _draw_courses(courses, own)
            _draw_ends(ends, own)
            courses.set_title(f"validation loss, {titles[evaluation]}; marks as on the right")
            ends.set_title("test loss at the end; a mark for each seed, a line at their mean")
        return save(figure, folder, NAME)


def _draw_courses(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        steps, losses = zip(*outcome.curve, strict=True)
        axes.plot(steps, losses, **_LOOKS[outcome.contender].dotted(max(len(steps) // 5, 1)))
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy")
    axes.set_yscale("log")
    _plain_ticks(axes, "y", [loss for outcome in outcomes for _, loss in outcome.curve])
    add_grid(axes)


def _draw_ends(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """One line for each contender, the first on top, its mean and spread behind its name."""
    for place, outcome in enumerate(reversed(outcomes)):
        look = _LOOKS[outcome.contender]
        axes.plot(outcome.loss, [place] * len(outcome.loss), **look.points(5.0))
        axes.plot([outcome.mean] * 2, [place - 0.3, place + 0.3], color=look.colour, linewidth=1.6)
    labels = [
        f"{CONTENDERS[outcome.contender].label}\n{outcome.mean:.3f} (sd {outcome.spread:.3f})"
        for outcome in reversed(outcomes)
    ]
    axes.set_yticks(range(len(outcomes)), labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, len(outcomes) - 0.4)
    axes.set_xscale("log")
    axes.set_xlabel("cross-entropy")
    _plain_ticks(axes, "x", [loss for outcome in outcomes for loss in outcome.loss])
    add_grid(axes, "x")
    axes.spines["left"].set_color(GREY)


def _plain_ticks(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Writes numbers in place of powers of ten, those within reach of the values."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    least, most = 0.8 * min(values), 1.25 * max(values)
    axis.set_ticks([tick for tick in _TICKS if least <= tick <= most])
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
