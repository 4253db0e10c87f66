# SPDX-License-Identifier: Apache-2.0
"""What came out: settings chosen on the validation split, test figures, paired differences, and the goals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from equipoise_lab.compare._protocol import CONFIDENCE as CONFIDENCE
from equipoise_lab.compare._protocol import PairedDifference, SeedLosses, paired
from equipoise_lab.compare.lm._recipe import CONTENDERS, LanguageModels, Setting
from equipoise_lab.compare.lm._train import Trained


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A goal that was set before the runs, and whether it was reached."""

    text: str  # what should hold
    holds: bool  # whether it does
    found: str  # the figures


def choose_settings(recipe: LanguageModels, trained: Sequence[Trained]) -> dict[str, Setting]:
    """Chooses the setting of least mean validation loss for every contender."""
    chosen: dict[str, Setting] = {}
    for name in recipe.contenders:
        settings = CONTENDERS[name].settings()
        means = [
            statistics.fmean(t.validation for t in trained if t.run.contender == name and t.run.setting == setting)
            for setting in settings
        ]
        chosen[name] = settings[means.index(min(means))]
    return chosen


def summarise(recipe: LanguageModels, trained: Sequence[Trained]) -> list[Outcome]:
    """Collects the final runs, contenders in the order of the recipe."""
    return [_outcome([t for t in trained if t.run.contender == name]) for name in recipe.contenders]


def _outcome(models: Sequence[Trained]) -> Outcome:
    models = sorted(models, key=lambda t: t.run.seed)
    steps = [step for step, _ in models[0].curve]
    losses = [statistics.fmean(values) for values in zip(*([v for _, v in t.curve] for t in models), strict=True)]
    return Outcome(
        contender=models[0].run.contender,
        setting=models[0].run.setting,
        loss=tuple(math.nan if t.test is None else t.test for t in models),
        limited_loss=tuple(math.nan if t.limited_test is None else t.limited_test for t in models),
        curve=tuple(zip(steps, losses, strict=True)),
        violation=tuple(t.training.violation for t in models),
        eval_violation=tuple(t.evaluation.violation for t in models),
        dropped=tuple(t.training.dropped for t in models),
        step_time=min(t.step_time for t in models),
    )


def difference(ours: Outcome, other: Outcome, *, limited: bool = False) -> Difference:
    """Compares two contenders seed by seed, without a capacity or within one."""
    a, b = (outcome.limited_loss if limited else outcome.loss for outcome in (ours, other))
    return Difference(ours=ours.contender, other=other.contender, limited=limited, **paired(a, b))


_BALANCED, _RECIPE, _CONTROL = "gm-iw-mix-prior", "skip-iw-prior", "switch-prior"
_PAIRS = (
    *((_RECIPE, other) for other in ("switch", "hash", "dense", "prior", _CONTROL)),
    *((_BALANCED, other) for other in ("switch", "hash", "dense", "prior", _CONTROL)),
    ("sample-prior", _CONTROL),
    ("priced", "switch"),
    ("priced-2", "topk-2"),
)


def differences(outcomes: Sequence[Outcome]) -> list[Difference]:
    """Compares the pairs of the goals and the docs, as far as both were run: without a capacity, then within."""
    by_name = {outcome.contender: outcome for outcome in outcomes}
    pairs = [(by_name[a], by_name[b]) for a, b in _PAIRS if a in by_name and b in by_name]
    return [difference(a, b, limited=limited) for limited in (False, True) for a, b in pairs]


def judge(outcomes: Sequence[Outcome], found: Sequence[Difference]) -> list[Goal]:
    """Judges the goals by rule, without a capacity; those whose contenders were not all run are left out."""
    by_name = {outcome.contender: outcome for outcome in outcomes}
    pairs = {(d.ours, d.other): d for d in found if not d.limited}
    goals: list[Goal] = []
    for other in ("switch", "hash", "dense"):
        if (d := pairs.get((_RECIPE, other))) is not None:
            text = f"the recipe is better than {_label(other)} beyond the spread of the seeds"
            goals.append(Goal(text=text, holds=d.better, found=_describe(d)))
    goals += _close(pairs, _RECIPE, _CONTROL, 0.01)
    if _RECIPE in by_name and _CONTROL in by_name:
        loads = {name: statistics.fmean(by_name[name].violation) for name in (_RECIPE, _CONTROL)}
        text = "with a lower load violation in training than Switch with the prior"
        numbers = f"{loads[_RECIPE]:.2f} against {loads[_CONTROL]:.2f}"
        goals.append(Goal(text=text, holds=loads[_RECIPE] < loads[_CONTROL], found=numbers))
    goals += _close(pairs, _BALANCED, _CONTROL, 0.02)
    goals += _close(pairs, "priced", "switch", 0.01)
    goals += _close(pairs, "priced-2", "topk-2", 0.01)
    return goals


def _close(pairs: Mapping[tuple[str, str], Difference], ours: str, other: str, most: float) -> list[Goal]:
    d = pairs.get((ours, other))
    if d is None:
        return []
    text = f"{_label(ours)} is at most {most:g} nats a byte behind {_label(other)}"
    return [Goal(text=text, holds=d.mean <= most, found=_describe(d))]


def _label(name: str) -> str:
    return CONTENDERS[name].label


def _describe(d: Difference) -> str:
    return f"{d.mean:+.3f} (95% interval {d.interval})"
