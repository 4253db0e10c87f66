# SPDX-License-Identifier: Apache-2.0
"""What claims are judged with: solved fractions by setting, and grades for statements about them.

A setting (loss, variant, strategy, temperature, weight of the balance loss, learning rate) is *solved* when at least 8
of 10 seeds are, and *fails* when at most 2 of 10 are. A statement gets a grade: 1 where it holds, 0.5 where it holds in
part, 0 where it does not, None where a result that it needs is missing. All limits were fixed before any result of
the command was seen.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from equipoise_lab.paper._recipe import METHODS, TEMPERATURES
from equipoise_lab.paper._results import MAIN_BALANCE_WEIGHT, MAIN_LEARNING_RATE, Loss, Result, Variant

SOLVES, FAILS = 0.8, 0.2
"""The least fraction of solved seeds for a setting to be solved, and the most for it to fail."""

VERY_LOW = tuple(t for t in TEMPERATURES if t <= 0.1)
LOW = tuple(t for t in TEMPERATURES if t < 1.0)
FROM_ONE = tuple(t for t in TEMPERATURES if t >= 1.0)
HIGH = tuple(t for t in TEMPERATURES if t >= 10.0)

INDEPENDENT = ("sample", "skip-iw", "skip")
MATCHING = ("gm-iw", "gm-sh", "gm")

Grade = float | None
Key = tuple[str, str, str, float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One statement of a claim, with what was found.

    Attributes:
        rule: the statement, with its limits.
        measured: what was found, in words and figures.
        grade: 1, 0.5 or 0, or None where results are missing.
        core: whether the claim is refuted when the statement does not hold.
        figures: what was measured, by name.
    """

    rule: str
    measured: str
    grade: Grade
    core: bool = True
    figures: dict[str, float] = field(default_factory=dict[str, float])


Study = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How a claim is judged.

    Attributes:
        number: of the claim, 1 to 16.
        title: the paper's sentence, in our words.
        study: the one that decides it, as its JSON file has it; None: the training runs do.
        judge: grades the statements of the claim, given `Outcomes` or the study.
    """

    number: int
    title: str
    study: str | None
    judge: Callable[[Any], list[Part]]


def claim(number: int, title: str, *, study: str | None = None) -> Callable[[Callable[[Any], list[Part]]], Rule]:
    """Makes the function behind it the rule of a claim; see `Rule`."""
    return lambda judge: Rule(number=number, title=title, study=study, judge=judge)


class Outcomes:
    """The fraction of solved seeds of every setting that was run.

    Args:
        results: the runs.
    """

    def __init__(self, results: Iterable[Result]) -> None:
        counts: dict[Key, list[int]] = {}
        for r in results:
            tally = counts.setdefault(
                (r.loss, r.variant, r.method, r.temperature, r.balance_weight, r.learning_rate), [0, 0]
            )
            tally[0] += r.solved
            tally[1] += 1
        self._fractions = {_key(*key): solved / runs for key, (solved, runs) in counts.items()}

    def fractions(
        self,
        loss: Loss,
        variant: Variant,
        methods: Sequence[str] = METHODS,
        temperatures: Sequence[float] = TEMPERATURES,
        *,
        balance_weight: float | None = None,
        learning_rate: float = MAIN_LEARNING_RATE,
    ) -> dict[str, float | None]:
        """Looks up settings, method by method.

        Args:
            loss: "reinforce" or "gating".
            variant: "plain", "sinkhorn" or "no-iw".
            methods: names of strategies.
            temperatures: of the proposal.
            balance_weight: None is the one of the paper's panels.
            learning_rate: of Adam.

        Returns:
            The fraction of solved seeds by the name of the setting; None where it was not run.
        """
        weight = MAIN_BALANCE_WEIGHT[loss] if balance_weight is None else balance_weight
        swept = "" if balance_weight is None else f" balance {weight:g}"
        swept += "" if learning_rate == MAIN_LEARNING_RATE else f" rate {learning_rate:g}"
        return {
            f"{loss} {variant} {m} {t:g}{swept}": self._fractions.get(_key(loss, variant, m, t, weight, learning_rate))
            for m in methods
            for t in temperatures
        }


def _key(loss: str, variant: str, method: str, *numbers: float) -> Key:
    """Rounds numbers: temperatures may have been through float32."""
    temperature, weight, rate = (float(f"{number:.5g}") for number in numbers)
    return (loss, variant, method, temperature, weight, rate)


def known(values: Iterable[float | None]) -> list[float] | None:
    """Returns the values, or None where one is missing or there are none.

    Example:
        >>> known([0.5, 1.0]), known([0.5, None]), known([])
        ([0.5, 1.0], None, None)
    """
    found = list(values)
    complete = [value for value in found if value is not None]
    return complete if found and len(complete) == len(found) else None


def grade_all_solved(fractions: Iterable[float | None]) -> Grade:
    """Grades "every setting is solved"; in part when half of all their runs are.

    Example:
        >>> grade_all_solved([0.8, 1.0]), grade_all_solved([0.7, 1.0]), grade_all_solved([0.0, 0.7])
        (1.0, 0.5, 0.0)
    """
    found = known(fractions)
    if found is None:
        return None
    return grade(all(f >= SOLVES for f in found), sum(found) / len(found) >= 0.5)


def grade_one_solved(fractions: Iterable[float | None]) -> Grade:
    """Grades "some setting is solved"; in part when some setting does not fail.

    Example:
        >>> grade_one_solved([0.0, 0.9]), grade_one_solved([0.0, 0.5]), grade_one_solved([0.2])
        (1.0, 0.5, 0.0)
    """
    found = known(fractions)
    return None if found is None else grade(max(found) >= SOLVES, max(found) > FAILS)


def grade_all_failed(fractions: Iterable[float | None]) -> Grade:
    """Grades "every setting fails"; in part when no more than one in ten is solved.

    Example:
        >>> grade_all_failed([0.0, 0.2]), grade_all_failed([0.0, 0.7]), grade_all_failed([0.0, 0.9])
        (1.0, 0.5, 0.0)
    """
    found = known(fractions)
    if found is None:
        return None
    return grade(all(f <= FAILS for f in found), sum(f >= SOLVES for f in found) <= 0.1 * len(found))


def grade(holds: bool, in_part: bool) -> float:
    """Turns two answers into a grade."""
    return 1.0 if holds else 0.5 if in_part else 0.0


def solved_part(rule: str, fractions: dict[str, float | None], given: Grade, *, core: bool = True) -> Part:
    """Makes a part about settings: how many are solved, how many fail, and the whole fraction.

    Returns:
        The part, with the fractions as figures.
    """
    figures = {name: value for name, value in fractions.items() if value is not None}
    return Part(rule=rule, measured=_describe(fractions), grade=given, core=core, figures=figures)


def _describe(fractions: dict[str, float | None]) -> str:
    found = known(fractions.values())
    if found is None:
        missing = sum(value is None for value in fractions.values())
        return f"{missing} of {len(fractions)} settings not run"
    if len(found) == 1:
        return f"{found[0]:.0%} of runs solved"
    solved, failed = sum(f >= SOLVES for f in found), sum(f <= FAILS for f in found)
    mean = sum(found) / len(found)
    return f"{mean:.0%} of runs solved; of {len(found)} settings {solved} solved, {failed} fail"
