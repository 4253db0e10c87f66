# SPDX-License-Identifier: Apache-2.0
"""What claims are judged with: solved fractions with 95% intervals, and verdicts on statements about them.

A setting (loss, variant, strategy, temperature, weight of the balance loss, learning rate) is *solved* when most of its
runs are, and *fails* when most are not: the limit is one half. Verdicts compare the limit with the interval, never with
the fraction itself: a statement holds, does not hold, or is undecided, and then says how many seeds would decide it.
"""

import math
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from equipoise_lab.paper._recipe import METHODS, TEMPERATURES
from equipoise_lab.paper._results import MAIN_BALANCE_WEIGHT, MAIN_BASELINE, MAIN_LEARNING_RATE, Baseline, Result

HALF = 0.5
"""The fraction of runs above which a setting is solved, and below which it fails."""

MARGIN = 0.1
"""Two strategies match if one solves at most this much less of the runs; else it falls short."""

NORMAL = 1.96
_MANY = 10_000

Verdict = Literal["holds", "does not hold", "undecided", "not judged"]
Interval = tuple[float, float]
Study = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One statement of a claim, with what was found."""

    rule: str  # the statement, with its limits
    measured: str  # what was found, in words and figures
    verdict: Verdict  # "not judged" where results are missing
    core: bool = True  # whether the claim depends on it
    figures: dict[str, float] = field(default_factory=dict[str, float])  # what was measured, by name
    seeds: int | None = None  # where it is undecided: about how many would decide it, if fractions stay what they are
    baseline: Baseline | None = None  # of the runs, where the claim is judged for both baselines


def wilson(solved: int, runs: int) -> Interval:
    """Computes Wilson's 95% interval for a fraction.

    Example:
        >>> tuple(round(end, 3) for end in wilson(38, 40))
        (0.835, 0.986)

    References:
        Wilson, Probable inference, the law of succession, and statistical inference (1927).
    """
    square = NORMAL**2
    middle = (solved + square / 2) / (runs + square)
    half = NORMAL / (runs + square) * math.sqrt(solved * (runs - solved) / runs + square / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: Sequence[float]) -> tuple[float, Interval]:
    """Computes a mean over seeds and its 95% interval, the mean plus and minus 1.96 standard errors.

    Example:
        >>> mean_interval([0.5, 0.5])
        (0.5, (0.5, 0.5))
    """
    mean = statistics.fmean(values)
    half = NORMAL * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return mean, (mean - half, mean + half)


def above(interval: Interval, limit: float) -> Verdict:
    """Judges "more than the limit" by an interval; "at most" is the opposite."""
    return "holds" if interval[0] > limit else "does not hold" if interval[1] < limit else "undecided"


def opposite(verdict: Verdict) -> Verdict:
    """Judges the negation of a statement."""
    swapped: dict[Verdict, Verdict] = {"holds": "does not hold", "does not hold": "holds"}
    return swapped.get(verdict, verdict)


def all_hold(verdicts: Iterable[Verdict]) -> Verdict:
    """Judges "every one of these holds".

    Example:
        >>> all_hold(["holds", "undecided"]), all_hold(["undecided", "does not hold"]), all_hold([])
        ('undecided', 'does not hold', 'not judged')
    """
    found = list(verdicts)
    for decisive in ("not judged", "does not hold", "undecided"):
        if decisive in found:
            return decisive
    return "holds" if found else "not judged"


def one_holds(verdicts: Iterable[Verdict]) -> Verdict:
    """Judges "at least one of these holds"."""
    return opposite(all_hold(opposite(verdict) for verdict in verdicts))


def seeds_needed(fraction: float, limit: float = HALF) -> int:
    """Estimates how many seeds it takes until the interval of a fraction leaves out a limit.

    Example:
        >>> seeds_needed(0.6), seeds_needed(0.5)
        (93, 10000)
    """
    distance = abs(fraction - limit)
    if distance < 1e-3:
        return _MANY
    return min(_MANY, math.ceil(NORMAL**2 * max(fraction * (1 - fraction), 0.01) / distance**2))


@dataclass(frozen=True, slots=True)
class Setting:
    """Seeds of a setting that were solved, of those that were run."""

    name: str
    by_seed: Mapping[int, bool]

    @property
    def fraction(self) -> float:
        """The fraction of seeds that were solved."""
        return sum(self.by_seed.values()) / len(self.by_seed)

    @property
    def verdict(self) -> Verdict:
        """Whether it is solved."""
        if not self.by_seed:
            return "not judged"
        return above(wilson(sum(self.by_seed.values()), len(self.by_seed)), HALF)


class Outcomes:
    """The solved seeds of every setting that was run.

    Args:
        results: the runs.
        baseline: with which REINFORCE was trained in what is looked up.
    """

    def __init__(self, results: Iterable[Result], baseline: Baseline = "ema") -> None:
        self.baseline: Baseline = baseline
        self._found: dict[tuple[Any, ...], dict[int, bool]] = {}
        for r in results:
            numbers = _rounded(r.temperature, r.balance_weight, r.learning_rate)
            self._found.setdefault((r.loss, r.baseline, r.variant, r.method, *numbers), {})[r.seed] = r.solved

    def at(self, where: str) -> list[Setting]:
        """Looks up the settings that `claims.toml` names: loss, variant, methods, temperatures, weights."""
        losses, variant, methods, temperatures, *weights = where.split()
        return [
            setting
            for loss in losses.split(",")
            for weight in (map(float, weights[0].split(",")) if weights else (None,))
            for setting in self.settings(
                loss,
                variant,
                METHODS if methods == "*" else methods.split(","),
                _temperatures(temperatures),
                balance_weight=weight,
            )
        ]

    def settings(
        self,
        loss: str,
        variant: str,
        methods: Sequence[str],
        temperatures: Sequence[float],
        *,
        balance_weight: float | None = None,
        learning_rate: float = MAIN_LEARNING_RATE,
    ) -> list[Setting]:
        """Looks up settings, method by method; None is the weight of the paper's panels.

        Returns:
            The settings; without seeds where they were not run.
        """
        weight = MAIN_BALANCE_WEIGHT[loss] if balance_weight is None else balance_weight
        swept = "" if balance_weight is None else f" balance {weight:g}"
        swept += "" if learning_rate == MAIN_LEARNING_RATE else f" rate {learning_rate:g}"
        baseline = self.baseline if loss == "reinforce" else MAIN_BASELINE["gating"]
        return [
            Setting(
                f"{loss} {variant} {m} {t:g}{swept}",
                self._found.get((loss, baseline, variant, m, *_rounded(t, weight, learning_rate)), {}),
            )
            for m in methods
            for t in temperatures
        ]


def _temperatures(text: str) -> list[float]:
    """Reads temperatures: all ("*"), those of the experiment that compare with a number ("<1"), or a list ("1,10")."""
    for sign, holds in (("<=", operator.le), (">=", operator.ge), ("<", operator.lt)):
        if text.startswith(sign):
            return [t for t in TEMPERATURES if holds(t, float(text.removeprefix(sign)))]
    return list(TEMPERATURES) if text == "*" else [float(number) for number in text.split(",")]


def _rounded(*numbers: float) -> tuple[float, ...]:
    """Rounds numbers: temperatures may have been through float32."""
    return tuple(float(f"{number:.5g}") for number in numbers)


def solved_part(rule: str, settings: Sequence[Setting], how: str, *, core: bool = True) -> Part:
    """Makes a part about settings that are "all solved", "one solved" or "all failed"."""
    verdicts: list[Verdict] = [setting.verdict for setting in settings]
    if "not judged" in verdicts:
        missing = verdicts.count("not judged")
        measured = f"{missing} of {len(settings)} settings not run"
        return Part(rule=rule, measured=measured, verdict="not judged", core=core)
    by_kind: dict[str, Verdict] = {
        "all solved": all_hold(verdicts),
        "one solved": one_holds(verdicts),
        "all failed": all_hold(opposite(v) for v in verdicts),
    }
    verdict = by_kind[how]
    open_ones = [seeds_needed(s.fraction) for s, v in zip(settings, verdicts, strict=True) if v == "undecided"]
    # "One solved" is decided as soon as one setting is.
    needed = (min if how == "one solved" else max)(open_ones) if verdict == "undecided" else None
    figures = {setting.name: setting.fraction for setting in settings}
    return Part(rule=rule, measured=_describe(settings), verdict=verdict, core=core, figures=figures, seeds=needed)


def _describe(settings: Sequence[Setting]) -> str:
    solved, runs = sum(sum(s.by_seed.values()) for s in settings), sum(len(s.by_seed) for s in settings)
    low, high = wilson(solved, runs)
    if len(settings) == 1:
        return f"{solved} of {runs} runs solved ({low:.0%} to {high:.0%})"
    verdicts = [setting.verdict for setting in settings]
    least, most = min(s.fraction for s in settings), max(s.fraction for s in settings)
    counted = f"{verdicts.count('holds')} solved, {verdicts.count('does not hold')} fail"
    undecided = verdicts.count("undecided")
    counted += f", {undecided} undecided" if undecided else ""
    counted = f"of {len(settings)} settings {counted}"
    return f"{solved / runs:.0%} of runs solved, {least:.0%} to {most:.0%} by setting; {counted}"


def difference_part(
    rule: str,
    ours: Sequence[Setting],
    theirs: Sequence[Setting],
    names: tuple[str, str],
    *,
    at_most: bool = False,
    limit: float = MARGIN,
    core: bool = True,
) -> Part:
    """Makes a part about how much more of the runs some settings solve than others, on the same seeds.

    The difference is that of a seed's solved fractions over the settings; its interval is over seeds. The statement is
    that it is more than the limit, or `at_most` that.
    """
    pair = [_by_seed(settings) for settings in (ours, theirs)]
    seeds = sorted(pair[0].keys() & pair[1].keys())
    if not seeds:
        return Part(rule=rule, measured="not all settings run", verdict="not judged", core=core)
    differences = [pair[0][seed] - pair[1][seed] for seed in seeds]
    mean, (low, high) = mean_interval(differences)
    verdict = opposite(above((low, high), limit)) if at_most else above((low, high), limit)
    shares = [statistics.fmean(each[seed] for seed in seeds) for each in pair]
    measured = (
        f"{names[0]} {shares[0]:.0%} of runs, {names[1]} {shares[1]:.0%}: a difference of {mean:+.2f} "
        f"({low:+.2f} to {high:+.2f})"
    )
    needed = None
    if verdict == "undecided":
        ratio = (high - mean) / max(abs(mean - limit), 1e-3)
        needed = min(_MANY, math.ceil(len(seeds) * ratio**2)) if math.isfinite(ratio) else _MANY
    figures = {f"{names[0]} - {names[1]}": round(mean, 6)}
    return Part(rule=rule, measured=measured, verdict=verdict, core=core, figures=figures, seeds=needed)


def _by_seed(settings: Sequence[Setting]) -> dict[int, float]:
    """The solved fraction of each seed that every setting has; nothing where a setting was not run."""
    if not settings:
        return {}
    shared = set.intersection(*(set(setting.by_seed) for setting in settings))
    return {seed: statistics.fmean(setting.by_seed[seed] for setting in settings) for seed in shared}
