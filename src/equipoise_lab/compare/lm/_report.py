# SPDX-License-Identifier: Apache-2.0
"""What came out: chosen settings, test figures, paired differences, goals set before the runs, tables and figure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from equipoise_lab._style import GREY, Look, add_grid, new_figure, row, save, style
from equipoise_lab._tables import new_table
from equipoise_lab.compare._protocol import (
    PairedDifference,
    SeedLosses,
    difference_table,
    draw_seeds,
    paired,
    set_lines,
)
from equipoise_lab.compare.lm._recipe import CONTENDERS, LanguageModels, Setting
from equipoise_lab.compare.lm._train import Trained

NAME = "compare-lm"
_BALANCED, _RECIPE, _CONTROL = "gm-iw-mix-prior", "skip-iw-prior", "switch-prior"
_PAIRS = (
    *(("default", other) for other in ("dense", "switch")),
    *(("skip-iw", other) for other in ("dense", "switch", "switch-certain")),
    ("skip-iw-gates", "skip-iw"),
    ("gm-iw-mix", "switch"),
    *((_RECIPE, other) for other in ("switch", "hash", "dense", "prior", _CONTROL)),
    *((_BALANCED, other) for other in ("switch", "hash", "dense", "prior", _CONTROL)),
    ("sample-prior", _CONTROL),
    ("priced", "switch"),
    ("priced-2", "topk-2"),
)
# Goals: by how many nats a byte the first may be behind the second; None: it should be better.
_GOALS = {
    ("default", "dense"): None,
    ("skip-iw", "switch"): None,
    **{(_RECIPE, other): None for other in ("switch", "hash", "dense")},
    (_RECIPE, _CONTROL): 0.01,
    (_BALANCED, _CONTROL): 0.02,
    ("priced", "switch"): 0.01,
    ("priced-2", "topk-2"): 0.01,
}
_LOOKS = {
    "peer": Look(colour="#6b6b6b", marker="o", filled=False),
    "control": Look(colour="#1a1a1a", marker="D"),
    "ours": Look(colour="#0b4f94", marker="s"),
}
_NAMES = {"capacity_factor": "capacity", "strength": "prior", "rate": "bias rate", "id_length": "tokens of an id"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(SeedLosses):
    """A contender at the setting that did best on the validation split; losses in nats a byte, one for each seed."""

    limited_loss: tuple[float, ...]  # the test loss within a capacity of `LIMIT` times an even share, the rest dropped
    violation: tuple[float, ...]  # of the load in training, within the capacity: largest load over mean load, minus 1
    eval_violation: tuple[float, ...]  # that in evaluation, without a capacity
    dropped: tuple[float, ...]  # the fraction of tokens that no expert processed in training
    step_time: float  # processor time of a training step, in seconds; the least of all seeds

    @property
    def limited_mean(self) -> float:
        """The mean test loss over seeds within a capacity."""
        return statistics.fmean(self.limited_loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference(PairedDifference):
    """The test loss of one contender minus that of another, without a capacity or within one."""

    limited: bool


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal that was set before the runs, and whether it was reached."""

    text: str  # what should hold
    holds: bool  # whether it does
    found: str  # the figures


def choose_settings(recipe: LanguageModels, trained: Sequence[Trained]) -> dict[str, Setting]:
    """Chooses the setting of least mean validation loss for every contender."""

    def mean(name: str, setting: Setting) -> float:
        runs = [t for t in trained if (t.run.contender, t.run.setting) == (name, setting)]
        return statistics.fmean(t.validation for t in runs)

    return {name: min(CONTENDERS[name].settings(), key=lambda s: mean(name, s)) for name in recipe.contenders}


def summarise(recipe: LanguageModels, trained: Sequence[Trained]) -> list[Outcome]:
    """Collects the final runs, contenders in the order of the recipe."""
    by_seed = sorted(trained, key=lambda t: t.run.seed)
    return [_outcome([t for t in by_seed if t.run.contender == name]) for name in recipe.contenders]


def _outcome(models: Sequence[Trained]) -> Outcome:
    points = zip(*(t.curve for t in models), strict=True)
    return Outcome(
        contender=models[0].run.contender,
        setting=models[0].run.setting,
        loss=tuple(math.nan if t.test is None else t.test for t in models),
        limited_loss=tuple(math.nan if t.limited_test is None else t.limited_test for t in models),
        curve=tuple((point[0][0], statistics.fmean(loss for _, loss in point)) for point in points),
        violation=tuple(t.training.violation for t in models),
        eval_violation=tuple(t.evaluation.violation for t in models),
        dropped=tuple(t.training.dropped for t in models),
        step_time=min(t.step_time for t in models),
    )


def difference(ours: Outcome, other: Outcome, *, limited: bool = False) -> Difference:
    """Compares two contenders seed by seed, without a capacity or within one."""
    a, b = (outcome.limited_loss if limited else outcome.loss for outcome in (ours, other))
    return Difference(ours=ours.contender, other=other.contender, limited=limited, **paired(a, b))


def differences(outcomes: Sequence[Outcome]) -> list[Difference]:
    """Compares the pairs of the goals and the docs, as far as both were run: without a capacity, then within."""
    by_name = {outcome.contender: outcome for outcome in outcomes}
    pairs = [(by_name[a], by_name[b]) for a, b in _PAIRS if a in by_name and b in by_name]
    return [difference(a, b, limited=limited) for limited in (False, True) for a, b in pairs]


def judge(outcomes: Sequence[Outcome], found: Sequence[Difference]) -> list[Goal]:
    """Judges the goals by rule, without a capacity; those whose contenders were not all run are left out."""
    pairs = {(d.ours, d.other): d for d in found if not d.limited}
    goals: list[Goal] = []
    for pair, most in _GOALS.items():
        if pair not in pairs:
            continue
        d, (ours, other) = pairs[pair], (CONTENDERS[name].label for name in pair)
        numbers = f"{d.mean:+.3f} (95% interval {d.interval})"
        if most is None:
            goals.append(Goal(f"{ours} is better than {other} beyond the spread of the seeds", d.better, numbers))
        else:
            goals.append(Goal(f"{ours} is at most {most:g} nats a byte behind {other}", d.mean <= most, numbers))
        if pair == (_RECIPE, _CONTROL):
            loads = {o.contender: statistics.fmean(o.violation) for o in outcomes}
            recipe, control = (loads[name] for name in pair)
            text = "with a lower load violation in training than Switch with the prior"
            goals.append(Goal(text, recipe < control, f"{recipe:.2f} against {control:.2f}"))
    return goals


def model_tables(
    recipe: LanguageModels, outcomes: Sequence[Outcome], found: Sequence[Difference], goals: Sequence[Goal]
) -> list[Table]:
    """Lists test losses with what the routers did, paired differences, and the goals."""
    title = f"Test loss in nats a byte after {recipe.steps:,} steps, mean and sd of {recipe.seeds} seeds"
    headings = ("test loss", "sd", "within capacity", "MaxVio", "MaxVio, evaluation", "dropped", "ms a step")
    losses = new_table(title, ["contender"], headings, title_justify="left")
    losses.add_column("setting")
    for o in outcomes:
        violation, evaluated, dropped = map(statistics.fmean, (o.violation, o.eval_violation, o.dropped))
        loads = (f"{violation:.2f}", f"{evaluated:.2f}", f"{dropped:.1%}")
        losses.add_row(
            CONTENDERS[o.contender].label,
            *(f"{loss:.3f}" for loss in (o.mean, o.spread, o.limited_mean)),
            *(("-", "-", "-") if CONTENDERS[o.contender].router is None else loads),
            f"{1e3 * o.step_time:.1f}",
            ", ".join(f"{_NAMES.get(n, n.replace('_', ' '))} {value:g}" for n, value in o.setting.describe().items()),
        )
    rows = [(CONTENDERS[d.ours].label, CONTENDERS[d.other].label, "1.25" if d.limited else "none", d) for d in found]
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
            look = _LOOKS[CONTENDERS[outcome.contender].kind]
            draw_seeds(losses, place, outcome, look, 3.6)
            how: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7.5, "color": look.colour}
            losses.annotate(f"{outcome.mean:.3f}", (max(outcome.loss), place), (7, 0), **how)
            if CONTENDERS[outcome.contender].router is not None:
                training, evaluated = statistics.fmean(outcome.violation), statistics.fmean(outcome.eval_violation)
                mark: dict[str, Any] = {"marker": "o", "color": look.colour, "markersize": 4.6, "linestyle": ""}
                loads.plot([training, evaluated], [place] * 2, color=look.colour, linewidth=0.7, alpha=0.5, zorder=1)
                loads.plot([evaluated], [place], markerfacecolor="white", **mark)
                loads.plot([training], [place], **mark)
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
