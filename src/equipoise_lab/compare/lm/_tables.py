# SPDX-License-Identifier: Apache-2.0
"""The language-model comparison on a terminal, and as Markdown for the docs."""

import statistics
from collections.abc import Sequence

from rich.table import Table

from equipoise_lab._tables import new_table
from equipoise_lab.compare._protocol import difference_table
from equipoise_lab.compare.lm._contenders import CONTENDERS
from equipoise_lab.compare.lm._recipe import LanguageModels
from equipoise_lab.compare.lm._summary import Difference, Goal, Outcome

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
