# SPDX-License-Identifier: Apache-2.0
"""Judges the claims that the training runs decide: the statements of `claims.toml`, and the learning rates."""

from collections.abc import Iterable, Sequence

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab.paper._recipe import LEARNING_RATES, METHODS, RATE_TEMPERATURES
from equipoise_lab.paper._rules import Outcomes, Part, all_hold, difference_part, solved_part

_VARIANTS = {"plain": "without Sinkhorn", "sinkhorn": "with Sinkhorn first"}


def judge_statements(outcomes: Outcomes, statements: Iterable[Sequence[str]]) -> list[Part]:
    """Judges statements: each its kind, one or two places where `Outcomes.at` finds settings, and its words."""
    parts: list[Part] = []
    for kind, *places, rule in statements:
        core, how = not kind.startswith("secondary, "), kind.removeprefix("secondary, ")
        found = [outcomes.at(place) for place in places]
        if len(found) == 1:
            parts.append(solved_part(rule, found[0], how, core=core))
        else:
            limit, at_most = float(how.split()[2]), how.startswith("at most")
            names = _names(*places)
            parts.append(difference_part(rule, found[0], found[1], names, at_most=at_most, limit=limit, core=core))
    return parts


def _names(one: str, other: str) -> tuple[str, str]:
    """Names what two places differ in: the strategy, or whether Sinkhorn comes first."""
    (_, variant, method, *_), (_, second, rival, *_) = one.split(), other.split()
    if method == rival:
        return _VARIANTS[variant], _VARIANTS[second]
    return PAPER_STRATEGIES[method].label, PAPER_STRATEGIES[rival].label


def judge_rates(outcomes: Outcomes) -> list[Part]:
    """Claim 14: over all strategies at temperatures 1 and 10, no learning rate solves more runs than 0.1."""
    rule = (
        "over the six strategies with REINFORCE at temperatures 1 and 10, the learning rate 0.1 solves more runs than "
        "each of 0.001, 0.003, 0.01, 0.03, 0.3 and 1"
    )
    swept = {
        rate: outcomes.settings("reinforce", "plain", METHODS, RATE_TEMPERATURES, learning_rate=rate)
        for rate in LEARNING_RATES
    }
    others = [
        difference_part(rule, swept[0.1], settings, ("0.1", f"{rate:g}"), limit=0.0)
        for rate, settings in swept.items()
        if rate != 0.1
    ]
    verdict = all_hold(part.verdict for part in others)
    if verdict == "not judged":
        return [Part(rule=rule, measured="not all learning rates run", verdict=verdict)]
    closest = min(others, key=lambda part: next(iter(part.figures.values())))
    figures = {f"rate {rate:g}": sum(s.fraction for s in settings) / len(settings) for rate, settings in swept.items()}
    solved = ", ".join(f"{figures[f'rate {rate:g}']:.0%} at {rate:g}" for rate in LEARNING_RATES)
    measured = f"solved: {solved}; nearest: {closest.measured}"
    seeds = max(part.seeds or 0 for part in others) if verdict == "undecided" else None
    return [Part(rule=rule, measured=measured, verdict=verdict, figures=figures, seeds=seeds)]
