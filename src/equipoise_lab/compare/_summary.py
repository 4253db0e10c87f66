# SPDX-License-Identifier: Apache-2.0
"""What came out: settings chosen on the validation split, their test figures, and paired differences.

The test split is read here for the first time, for the chosen settings alone.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from equipoise_lab.compare._contenders import CONTENDERS, Setting
from equipoise_lab.compare._recipe import EVALUATIONS, Comparison
from equipoise_lab.compare._task import Task
from equipoise_lab.compare._train import Evaluation, Trained, build_layer, evaluate

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A contender in one of the two evaluations, at the setting that did best there on the validation split.

    Attributes:
        contender: its name.
        evaluation: "unlimited" or "limited", one of `EVALUATIONS`.
        setting: the chosen one.
        validation: its mean loss there, that of the others being no smaller.
        curve: the course of that loss, averaged over seeds; pairs of step and loss.
        loss: on the test split, one for each seed.
        accuracy: on the test split, one for each seed.
        dropped: the fraction of the test split that no expert processed, one for each seed.
    """

    contender: str
    evaluation: str
    setting: Setting
    validation: float
    curve: tuple[tuple[int, float], ...]
    loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    dropped: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean test loss over seeds."""
        return statistics.fmean(self.loss)

    @property
    def spread(self) -> float:
        """The standard deviation of the test loss between seeds."""
        return statistics.stdev(self.loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The test loss of one of ours minus that of another contender, paired by seed.

    Attributes:
        ours: a contender's name.
        other: a contender's name.
        evaluation: one of `EVALUATIONS`.
        mean: below 0 where ours is better.
        low: of the confidence interval, Student's t over the seeds.
        high: of it.
        spread: the larger of the two standard deviations between seeds.
    """

    ours: str
    other: str
    evaluation: str
    mean: float
    low: float
    high: float
    spread: float

    @property
    def better(self) -> bool:
        """Whether ours is better by more than the spread between seeds, and the interval leaves 0 out."""
        return self.mean < -self.spread and self.high < 0


def summarise(recipe: Comparison, trained: Sequence[Trained], task: Task) -> list[Outcome]:
    """Chooses settings on the validation split, then evaluates those on the test split.

    Returns:
        Contenders in the order of the recipe, each in both evaluations.
    """
    by_setting: dict[str, dict[Setting, list[Trained]]] = {}
    for model in sorted(trained, key=lambda model: model.run.seed):
        by_setting.setdefault(model.run.contender, {}).setdefault(model.run.setting, []).append(model)
    found: list[Outcome] = []
    for name in recipe.contenders:
        for index in range(len(EVALUATIONS)):
            settings = sorted(by_setting[name].items())
            chosen = min(settings, key=lambda setting: _mean_validation(setting[1], index))
            found.append(_outcome(recipe, task, chosen[1], index))
    return found


def _mean_validation(models: Sequence[Trained], evaluation: int) -> float:
    """The mean loss at the end; infinite where a run diverged, so that it is never the least."""
    loss = statistics.fmean(float(model.validation[-1, evaluation]) for model in models)
    return loss if math.isfinite(loss) else math.inf


def _outcome(recipe: Comparison, task: Task, models: Sequence[Trained], index: int) -> Outcome:
    tests: list[Evaluation] = []
    for model in models:
        layer = build_layer(model.run, recipe, task)
        layer.load_state_dict(model.parameters, strict=False)  # what a layer keeps besides is of no use in evaluation
        tests.append(evaluate(layer, task.test, task, recipe.evaluations()[index]))
    curve = torch.stack([model.validation[:, index] for model in models]).mean(0).tolist()
    return Outcome(
        contender=models[0].run.contender,
        evaluation=EVALUATIONS[index],
        setting=models[0].run.setting,
        validation=_mean_validation(models, index),
        curve=tuple(zip(models[0].steps, curve, strict=True)),
        loss=tuple(test.loss for test in tests),
        accuracy=tuple(test.accuracy for test in tests),
        dropped=tuple(test.dropped for test in tests),
    )


def differences(outcomes: Sequence[Outcome]) -> list[Difference]:
    """Compares each of ours with every contender that is not, seed by seed.

    Returns:
        The differences of the test loss, in both evaluations.
    """
    ours = [outcome for outcome in outcomes if CONTENDERS[outcome.contender].ours]
    others = [outcome for outcome in outcomes if not CONTENDERS[outcome.contender].ours]
    return [_difference(a, b) for a in ours for b in others if a.evaluation == b.evaluation]


def _difference(ours: Outcome, other: Outcome) -> Difference:
    pairs = torch.tensor(ours.loss, dtype=torch.float64) - torch.tensor(other.loss, dtype=torch.float64)
    mean, n = float(pairs.mean()), len(pairs)
    half = student_t(n - 1, CONFIDENCE) * float(pairs.std()) / math.sqrt(n)
    return Difference(
        ours=ours.contender,
        other=other.contender,
        evaluation=ours.evaluation,
        mean=mean,
        low=mean - half,
        high=mean + half,
        spread=max(ours.spread, other.spread),
    )


def student_t(degrees: int, confidence: float) -> float:
    """Finds t with P(|T| <= t) = confidence for Student's distribution, by bisection.

    Args:
        degrees: of freedom, at least 1.
        confidence: between 0 and 1.

    Returns:
        The half-width of an interval, in standard errors.

    Example:
        >>> round(student_t(4, 0.95), 4)
        2.7764
    """
    low, high = 0.0, 1.0
    while _within(high, degrees) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """P(|T| <= t), a finite sum for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for i in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
