# SPDX-License-Identifier: Apache-2.0
"""The language-model comparison on a terminal, and its figure: test losses of every seed, and loads of the experts."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from equipoise_lab._style import GREY, Look, add_grid, new_figure, row, save, style
from equipoise_lab._tables import new_table
from equipoise_lab.compare._protocol import difference_table, draw_seeds, set_lines
from equipoise_lab.compare.lm._recipe import CONTENDERS, LanguageModels
from equipoise_lab.compare.lm._summary import Difference, Goal, Outcome

NAME = "compare-lm"
_LOOKS = {
    "peer": Look(colour="#6b6b6b", marker="o", filled=False),
    "control": Look(colour="#1a1a1a", marker="D"),
    "ours": Look(colour="#0b4f94", marker="s"),
}
_NAMES = {"capacity_factor": "capacity", "strength": "prior", "rate": "bias rate", "id_length": "tokens of an id"}
HEADINGS = ("test loss", "sd", "within capacity", "MaxVio", "MaxVio, evaluation", "dropped", "ms a step")
"""Of the columns between a contender's name and its setting."""


def outcome_cells(outcome: Outcome) -> tuple[str, ...]:
    """Writes the figures of a contender, in the order of `HEADINGS`."""
    if CONTENDERS[outcome.contender].router is None:
        loads = ("-", "-", "-")
    else:
        violation, evaluated, dropped = (
            statistics.fmean(values) for values in (outcome.violation, outcome.eval_violation, outcome.dropped)
        )
        loads = (f"{violation:.2f}", f"{evaluated:.2f}", f"{dropped:.1%}")
    losses = (f"{outcome.mean:.3f}", f"{outcome.spread:.3f}", f"{outcome.limited_mean:.3f}")
    return (*losses, *loads, f"{1e3 * outcome.step_time:.1f}")


def describe_setting(outcome: Outcome) -> str:
    """Says which of a contender's settings was chosen, for example "learning rate 0.003, prior 6"."""
    setting = outcome.setting.describe()
    return ", ".join(f"{_NAMES.get(name, name.replace('_', ' '))} {value:g}" for name, value in setting.items())


def model_tables(
    recipe: LanguageModels, outcomes: Sequence[Outcome], found: Sequence[Difference], goals: Sequence[Goal]
) -> list[Table]:
    """Lists test losses with what the routers did, paired differences, and the goals."""
    title = f"Test loss in nats a byte after {recipe.steps:,} steps, mean and sd of {recipe.seeds} seeds"
    losses = new_table(title, ["contender"], HEADINGS, title_justify="left")
    losses.add_column("setting")
    for outcome in outcomes:
        label = CONTENDERS[outcome.contender].label
        losses.add_row(label, *outcome_cells(outcome), describe_setting(outcome))
    labels = [(CONTENDERS[d.ours].label, CONTENDERS[d.other].label) for d in found]
    rows = [(*names, "1.25" if d.limited else "none", d) for names, d in zip(labels, found, strict=True)]
    verdicts = new_table("Goals", ["goal", "holds", "found"], title_justify="left")
    for goal in goals:
        verdicts.add_row(goal.text, "yes" if goal.holds else "no", goal.found)
    return [losses, difference_table(rows, condition="capacity"), verdicts]


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
