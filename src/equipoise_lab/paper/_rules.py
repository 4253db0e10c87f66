# SPDX-License-Identifier: Apache-2.0
"""What claims are judged with: solved fractions with 95% intervals, and verdicts on statements about them.

A setting (loss, variant, strategy, temperature, weight of the balance loss, learning rate) is *solved* when most of its
runs are, and *fails* when most are not: the limit is one half. Verdicts compare the limit with the interval, never with
the fraction itself: a statement holds, does not hold, or is undecided, and then says how many seeds would decide it.
"""

import itertools
import math
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab.paper._recipe import LEARNING_RATES, METHODS, TEMPERATURES
from equipoise_lab.paper._results import MAIN_BALANCE_WEIGHT, MAIN_BASELINE, MAIN_LEARNING_RATE, Baseline, Result

HALF = 0.5
"""The fraction of runs above which a setting is solved, and below which it fails."""

MARGIN = 0.1
"""Two strategies match if one solves at most this much less of the runs; else it falls short."""

_NORMAL = 1.96
_MANY = 10_000
_VARIANTS = {"plain": "without Sinkhorn", "sinkhorn": "with Sinkhorn first"}

Verdict = Literal["holds", "does not hold", "undecided", "not judged"]
Interval = tuple[float, float]
Study = Mapping[str, Any]
"""What a study found, or a record of it, as its JSON file has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One statement of a claim, with what was found."""

    rule: str = ""  # the statement, with its limits
    measured: str  # what was found, in words and figures
    verdict: Verdict  # "not judged" where results are missing
    core: bool = True  # whether the claim depends on it
    figures: dict[str, float] = field(default_factory=dict[str, float])  # what was measured, by name
    seeds: int | None = None  # where it is undecided: about how many would decide it, if fractions stay what they are
    baseline: Baseline | None = None  # of the runs, where the claim is judged for both baselines


NOT_RUN = Part(measured="not run", verdict="not judged")


def decided(holds: bool, measured: str, figures: dict[str, float]) -> Part:
    """Judges a statement that is true or not."""
    return Part(measured=measured, verdict="holds" if holds else "does not hold", figures=figures)


def finite(numbers: Iterable[float | None]) -> list[float]:
    """Lists numbers that a statement needs; LookupError where one is None or not finite, or where there is none."""
    found = [math.nan if number is None else number for number in numbers]
    if not found or not all(map(math.isfinite, found)):
        raise LookupError("not run")
    return found


def wilson(solved: int, runs: int) -> Interval:
    """Computes Wilson's 95% interval for a fraction.

    Example:
        >>> tuple(round(end, 3) for end in wilson(38, 40))
        (0.835, 0.986)

    References:
        Wilson, Probable inference, the law of succession, and statistical inference (1927).
    """
    square = _NORMAL**2
    middle = (solved + square / 2) / (runs + square)
    half = _NORMAL / (runs + square) * math.sqrt(solved * (runs - solved) / runs + square / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: Sequence[float]) -> tuple[float, Interval]:
    """Computes a mean over seeds and its 95% interval, the mean plus and minus 1.96 standard errors.

    Example:
        >>> mean_interval([0.5, 0.5])
        (0.5, (0.5, 0.5))
    """
    mean = statistics.fmean(values)
    half = _NORMAL * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
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


def seeds_needed(fraction: float) -> int:
    """Estimates how many seeds it takes until the interval of a fraction leaves out one half.

    Example:
        >>> seeds_needed(0.6), seeds_needed(0.5)
        (93, 10000)
    """
    distance = abs(fraction - HALF)
    if distance < 1e-3:
        return _MANY
    return min(_MANY, math.ceil(_NORMAL**2 * max(fraction * (1 - fraction), 0.01) / distance**2))


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
    """The solved seeds of every setting that was run, those of REINFORCE with one baseline."""

    def __init__(self, results: Iterable[Result], baseline: Baseline) -> None:
        self._found: dict[tuple[Any, ...], dict[int, bool]] = {}
        for r in results:
            if r.baseline == (baseline if r.loss == "reinforce" else MAIN_BASELINE[r.loss]):
                numbers = _rounded(r.temperature, r.balance_weight, r.learning_rate)
                self._found.setdefault((r.loss, r.variant, r.method, *numbers), {})[r.seed] = r.solved

    def at(self, where: str) -> list[Setting]:
        """Looks up settings by losses, variant, methods, temperatures, weights of the balance loss, learning rate.

        Weights and rate are the paper's where they are left out. What was not run has no seeds.
        """
        losses, variant, methods, temperatures, *swept = where.split()
        weights = swept[0].split(",") if swept else [""]
        rate = float(swept[1]) if len(swept) > 1 else MAIN_LEARNING_RATE
        names = METHODS if methods == "*" else methods.split(",")
        found: list[Setting] = []
        for loss, weight, name, t in itertools.product(losses.split(","), weights, names, _temperatures(temperatures)):
            numbers = _rounded(t, float(weight) if weight else MAIN_BALANCE_WEIGHT[loss], rate)
            named = f"{loss} {variant} {name} {t:g}" + (f" balance {float(weight):g}" if weight else "")
            found.append(Setting(named, self._found.get((loss, variant, name, *numbers), {})))
        return found


def _temperatures(text: str) -> list[float]:
    """Reads temperatures: all ("*"), those of the experiment that compare with a number ("<1"), or a list ("1,10")."""
    for sign, holds in (("<=", operator.le), (">=", operator.ge), ("<", operator.lt)):
        if text.startswith(sign):
            return [t for t in TEMPERATURES if holds(t, float(text.removeprefix(sign)))]
    return list(TEMPERATURES) if text == "*" else [float(number) for number in text.split(",")]


def _rounded(*numbers: float) -> tuple[float, ...]:
    """Rounds numbers: temperatures may have been through float32."""
    return tuple(float(f"{number:.5g}") for number in numbers)


def judge_statement(outcomes: Outcomes, kind: str, *places: str) -> Part:
    """Judges a statement of `claims.toml` about settings, at one or two places where `Outcomes.at` finds them."""
    if kind == "best rate":
        return judge_rates(outcomes)
    how, (ours, *theirs) = kind.removeprefix("secondary, "), [outcomes.at(place) for place in places]
    if not theirs:
        return solved_part(ours, how)
    # What the two places differ in: the strategy, or whether Sinkhorn comes first.
    variants, methods = zip(*(place.split()[1:3] for place in places), strict=True)
    names = [_VARIANTS[v] for v in variants] if len(set(methods)) == 1 else [PAPER_STRATEGIES[m].label for m in methods]
    return difference_part(ours, theirs[0], names, at_most=how.startswith("at most"), limit=float(how.split()[2]))


def judge_rates(outcomes: Outcomes) -> Part:
    """Judges whether, over all strategies at temperatures 1 and 10, no learning rate solves more runs than 0.1."""
    swept = {rate: outcomes.at(f"reinforce plain * 1,10 0 {rate}") for rate in LEARNING_RATES}
    others = [
        difference_part(swept[0.1], settings, ("0.1", f"{rate:g}"), limit=0.0)
        for rate, settings in swept.items()
        if rate != 0.1
    ]
    verdict = all_hold(part.verdict for part in others)
    if verdict == "not judged":
        return Part(measured="not all learning rates run", verdict=verdict)
    closest = min(others, key=lambda part: next(iter(part.figures.values())))
    figures = {f"rate {rate:g}": sum(s.fraction for s in settings) / len(settings) for rate, settings in swept.items()}
    solved = ", ".join(f"{figures[f'rate {rate:g}']:.0%} at {rate:g}" for rate in LEARNING_RATES)
    measured = f"solved: {solved}; nearest: {closest.measured}"
    seeds = max(part.seeds or 0 for part in others) if verdict == "undecided" else None
    return Part(measured=measured, verdict=verdict, figures=figures, seeds=seeds)


def solved_part(settings: Sequence[Setting], how: str) -> Part:
    """Judges settings to be "all solved", "one solved" or "all failed"."""
    verdicts: list[Verdict] = [setting.verdict for setting in settings]
    if missing := verdicts.count("not judged"):
        return Part(measured=f"{missing} of {len(settings)} settings not run", verdict="not judged")
    failed = all_hold(opposite(v) for v in verdicts)
    verdict = failed if how == "all failed" else opposite(failed) if how == "one solved" else all_hold(verdicts)
    open_ones = [seeds_needed(s.fraction) for s, v in zip(settings, verdicts, strict=True) if v == "undecided"]
    # "One solved" is decided as soon as one setting is.
    needed = (min if how == "one solved" else max)(open_ones) if verdict == "undecided" else None
    solved, runs = sum(sum(s.by_seed.values()) for s in settings), sum(len(s.by_seed) for s in settings)
    low, high = wilson(solved, runs)
    measured = f"{solved} of {runs} runs solved ({low:.0%} to {high:.0%})"
    figures = {setting.name: setting.fraction for setting in settings}
    if len(settings) > 1:
        least, most = min(figures.values()), max(figures.values())
        counted = f"{verdicts.count('holds')} solved, {verdicts.count('does not hold')} fail"
        counted += f", {len(open_ones)} undecided" if open_ones else ""
        measured = f"{solved / runs:.0%} of runs solved, {least:.0%} to {most:.0%} by setting; "
        measured += f"of {len(settings)} settings {counted}"
    return Part(measured=measured, verdict=verdict, figures=figures, seeds=needed)


def difference_part(
    ours: list[Setting], theirs: list[Setting], names: Sequence[str], *, at_most: bool = False, limit: float = MARGIN
) -> Part:
    """Judges how much more of the runs some settings solve than others, on the same seeds.

    The difference is that of a seed's solved fractions over the settings; its interval is over seeds. The statement is
    that it is more than the limit, or `at_most` that.
    """
    pair = [_by_seed(settings) for settings in (ours, theirs)]
    seeds = sorted(pair[0].keys() & pair[1].keys())
    if not seeds:
        return Part(measured="not all settings run", verdict="not judged")
    mean, (low, high) = mean_interval([pair[0][seed] - pair[1][seed] for seed in seeds])
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
    return Part(measured=measured, verdict=verdict, figures=figures, seeds=needed)


def _by_seed(settings: Sequence[Setting]) -> dict[int, float]:
    """The solved fraction of each seed that every setting has; nothing where a setting was not run."""
    shared = set[int].intersection(*(set(setting.by_seed) for setting in settings))
    return {seed: statistics.fmean(setting.by_seed[seed] for setting in settings) for seed in shared}
