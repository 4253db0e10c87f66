# SPDX-License-Identifier: Apache-2.0
"""The comparison on a terminal."""

from collections.abc import Sequence

from rich.table import Table

from equipoise_lab.compare._contenders import CONTENDERS
from equipoise_lab.compare._recipe import Comparison
from equipoise_lab.compare._summary import CONFIDENCE, Difference, Outcome

_FIELDS = {"balance_loss": "balance loss", "marginal_entropy": "bonus", "capacity_factor": "capacity"}


def result_tables(recipe: Comparison, outcomes: Sequence[Outcome], found: Sequence[Difference]) -> list[Table]:
    """Lists the test losses, then what ours win or lose against the others.

    Args:
        recipe: the comparison.
        outcomes: each contender in both evaluations.
        found: the paired differences.

    Returns:
        Two tables.
    """
    titles = {"unlimited": "no capacity", "limited": f"capacity {recipe.eval_capacity_factor:g}"}
    losses = Table(
        title=f"Test loss after {recipe.steps:,} steps, mean and standard deviation of {recipe.seeds} seeds; "
        "settings chosen on validation",
        title_justify="left",
    )
    for heading in ("", "evaluated with", "loss", "sd", "accuracy", "dropped", "setting"):
        losses.add_column(heading, justify="left" if heading in ("", "evaluated with", "setting") else "right")
    for o in outcomes:
        accuracy, dropped = (sum(values) / len(values) for values in (o.accuracy, o.dropped))
        label, numbers = CONTENDERS[o.contender].label, (f"{o.mean:.3f}", f"{o.spread:.3f}")
        shares = (f"{accuracy:.1%}", f"{dropped:.1%}")
        losses.add_row(label, titles[o.evaluation], *numbers, *shares, describe_setting(o))
    pairs = Table(title=f"Differences of the test loss, seeds paired, {CONFIDENCE:.0%} interval", title_justify="left")
    for heading in ("ours", "minus", "evaluated with", "difference", "interval", "beyond the spread"):
        pairs.add_column(heading, justify="right" if heading in ("difference", "interval") else "left")
    for d in found:
        names = (CONTENDERS[d.ours].label, CONTENDERS[d.other].label)
        interval = f"{d.low:+.3f} to {d.high:+.3f}"
        pairs.add_row(*names, titles[d.evaluation], f"{d.mean:+.3f}", interval, "better" if d.better else "no")
    return [losses, pairs]


def describe_setting(outcome: Outcome) -> str:
    """Says which of a contender's settings was chosen: the learning rate, and what it tunes besides.

    Returns:
        For example "rate 0.01, bonus 0.5".
    """
    name, setting = CONTENDERS[outcome.contender].own[0], outcome.setting
    return f"rate {setting.learning_rate:g}, {_FIELDS[name]} {getattr(setting, name):g}"
