# SPDX-License-Identifier: Apache-2.0
"""What came out: settings chosen on the validation split, their test figures, paired differences, tables and figure.

The test split is read here for the first time, for the chosen settings alone.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axis import Axis
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from rich.table import Table

from equipoise_lab._style import Look, add_grid, new_figure, row, save, stack, style
from equipoise_lab._tables import new_table
from equipoise_lab.compare._protocol import (
    PairedDifference,
    SeedLosses,
    difference_table,
    draw_seeds,
    paired,
    set_lines,
)
from equipoise_lab.compare._recipe import CONTENDERS, Comparison
from equipoise_lab.compare._task import Task
from equipoise_lab.compare._train import Evaluation, Trained, build_layer, evaluate

NAME = "compare"
_FIELDS = {"balance_loss": "balance loss", "marginal_entropy": "bonus", "capacity_factor": "capacity"}
_LOOKS = {
    "switch": Look(colour="#5a5a5a", marker="X", dashes=":"),
    "base": Look(colour="#8a8a8a", marker="D", dashes="--", filled=False),
    "skip-iw": Look(colour="#5b9bd0", marker="s", dashes=(0, (5.0, 1.5, 1.0, 1.5)), filled=False),
    "skip-iw-recipe": Look(colour="#0b4f94", marker="s"),
    "gm-iw-mix-recipe": Look(colour="#8c2d04", marker="^"),
    "exact": Look(colour="#222222", marker="o", filled=False),
}
_TICKS = (0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(SeedLosses):
    """A contender in one of the two evaluations, at the setting that did best there on the validation split."""

    evaluation: str  # one of `Comparison.evaluations`
    validation: float  # the mean loss there, that of the other settings being no smaller
    accuracy: tuple[float, ...]  # on the test split, one for each seed
    dropped: tuple[float, ...]  # the fraction of the test split that no expert processed, one for each seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference(PairedDifference):
    """The test loss of one of ours minus that of another contender, in one of the evaluations."""

    evaluation: str


def summarise(recipe: Comparison, trained: Sequence[Trained], task: Task) -> list[Outcome]:
    """Chooses settings on the validation split, then evaluates those on the test split.

    Returns:
        Contenders in the order of the recipe, each in both evaluations.
    """
    found: list[Outcome] = []
    for name in recipe.contenders:
        settings = CONTENDERS[name].settings(recipe.learning_rates)
        own = [model for model in trained if model.run.contender == name]
        tried = [[model for model in own if model.run.setting == setting] for setting in settings]
        for index, (evaluation, factor) in enumerate(recipe.evaluations().items()):
            chosen = min(tried, key=lambda models: mean_validation(models, index))
            tests = [_test(model, recipe, task, factor) for model in chosen]
            curve = torch.stack([model.validation[:, index] for model in chosen]).mean(0).tolist()
            outcome = Outcome(
                contender=name,
                setting=chosen[0].run.setting,
                loss=tuple(test.loss for test in tests),
                curve=tuple(zip(chosen[0].steps, curve, strict=True)),
                evaluation=evaluation,
                validation=mean_validation(chosen, index),
                accuracy=tuple(test.accuracy for test in tests),
                dropped=tuple(test.dropped for test in tests),
            )
            found.append(outcome)
    return found


def _test(model: Trained, recipe: Comparison, task: Task, factor: float | None) -> Evaluation:
    layer = build_layer(model.run, recipe, task)
    layer.load_state_dict(model.parameters, strict=False)  # what a layer keeps besides is of no use in evaluation
    return evaluate(layer, task.test, task, factor)


def mean_validation(models: Sequence[Trained], evaluation: int) -> float:
    """The mean loss at the end; infinite where a run diverged, so that it is never the least."""
    loss = statistics.fmean(float(model.validation[-1, evaluation]) for model in models)
    return loss if math.isfinite(loss) else math.inf


def differences(outcomes: Sequence[Outcome]) -> list[Difference]:
    """Compares each of ours with every contender that is not, seed by seed, in both evaluations."""
    return [
        Difference(ours=a.contender, other=b.contender, evaluation=a.evaluation, **paired(a.loss, b.loss))
        for a, b in itertools.product(outcomes, outcomes)
        if CONTENDERS[a.contender].ours and not CONTENDERS[b.contender].ours and a.evaluation == b.evaluation
    ]


def result_tables(recipe: Comparison, outcomes: Sequence[Outcome], found: Sequence[Difference]) -> list[Table]:
    """Lists the test losses, then what ours win or lose against the others."""
    where = {"unlimited": "no capacity", "limited": f"capacity {recipe.eval_capacity_factor:g}"}
    title = f"Test loss after {recipe.steps:,} steps, mean and standard deviation of {recipe.seeds} seeds; "
    headings = ("loss", "sd", "accuracy", "dropped")
    losses = new_table(f"{title}settings chosen on validation", ["", "evaluated with"], headings, title_justify="left")
    losses.add_column("setting")
    for o in outcomes:
        label, numbers = CONTENDERS[o.contender].label, (f"{o.mean:.3f}", f"{o.spread:.3f}")
        shares = [f"{statistics.fmean(values):.1%}" for values in (o.accuracy, o.dropped)]
        own = CONTENDERS[o.contender].own[0]
        setting = f"rate {o.setting.learning_rate:g}, {_FIELDS[own]} {getattr(o.setting, own):g}"
        losses.add_row(label, where[o.evaluation], *numbers, *shares, setting)
    rows = [(CONTENDERS[d.ours].label, CONTENDERS[d.other].label, where[d.evaluation], d) for d in found]
    return [losses, difference_table(rows, condition="evaluated with")]


def save_figure(recipe: Comparison, outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Draws two rows, one for each evaluation: the validation loss over steps, and the test loss of every seed.

    On the right each contender has a line, the first on top, with its mean and spread behind its name.
    """
    where = {"unlimited": "without a capacity", "limited": f"with capacity {recipe.eval_capacity_factor:g}"}
    with style():
        figure = new_figure(9.6, 6.6)
        for part, (evaluation, words) in zip(stack(figure, 1.0, 1.0), where.items(), strict=True):
            courses, ends = row(part, 2, width_ratios=(1.0, 1.15))
            own = [outcome for outcome in outcomes if outcome.evaluation == evaluation]
            for outcome in own:
                steps, losses = zip(*outcome.curve, strict=True)
                courses.plot(steps, losses, **_LOOKS[outcome.contender].dotted(max(len(steps) // 5, 1)))
            for place, outcome in enumerate(own[::-1]):
                draw_seeds(ends, place, outcome, _LOOKS[outcome.contender], 5.0)
            set_lines(ends, [f"{CONTENDERS[o.contender].label}\n{o.mean:.3f} (sd {o.spread:.3f})" for o in own[::-1]])
            courses.set(xlabel="step", ylabel="cross-entropy", yscale="log")
            ends.set(xlabel="cross-entropy", xscale="log")
            _plain_ticks(courses.yaxis, [loss for outcome in own for _, loss in outcome.curve])
            _plain_ticks(ends.xaxis, [loss for outcome in own for loss in outcome.loss])
            add_grid(courses)
            add_grid(ends, "x")
            courses.set_title(f"validation loss, evaluated {words}; marks as on the right")
            ends.set_title("test loss at the end; a mark for each seed, a line at their mean")
        return save(figure, folder, NAME)


def _plain_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Writes numbers in place of powers of ten, those within reach of the values."""
    least, most = 0.8 * min(values), 1.25 * max(values)
    axis.set_ticks([tick for tick in _TICKS if least <= tick <= most])
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
