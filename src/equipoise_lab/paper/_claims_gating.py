# SPDX-License-Identifier: Apache-2.0
"""Rules for the claims about differentiable gating: section 3.1 and appendix E of the paper."""

import math
from collections.abc import Mapping
from typing import Any

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab.paper._claims_reinforce import compare_variants
from equipoise_lab.paper._recipe import METHODS, SWEEP_TEMPERATURES
from equipoise_lab.paper._rules import (
    FROM_ONE,
    HALF,
    HIGH,
    INDEPENDENT,
    LOW,
    MARGIN,
    MATCHING,
    VERY_LOW,
    Outcomes,
    Part,
    above,
    all_hold,
    claim,
    opposite,
    seeds_needed,
    solved_part,
    wilson,
)

_CORRECTED = ("gm-iw", "gm-sh")


@claim(6, "Gating needs a balance loss of 0.01 or 0.03, balanced sampling, importance weights and a low temperature.")
def judge_gating(outcomes: Outcomes) -> list[Part]:
    """Claim 6: gating succeeds with all four ingredients, and not where one of them is missing."""
    parts: list[Part] = []
    for weight, temperatures in ((0.01, LOW), (0.03, (0.03, 0.3))):
        shown = "some temperature < 1" if temperatures == LOW else "temperature 0.03 or 0.3"
        found = outcomes.settings("gating", "plain", _CORRECTED, temperatures, balance_weight=weight)
        rule = f"with balance weight {weight:g}, Gumbel-Matching IW or SH solves at {shown}"
        parts.append(solved_part(rule, found, "one solved"))
    without = [
        setting
        for weight in (0.0, 0.003)
        for setting in outcomes.settings("gating", "plain", METHODS, SWEEP_TEMPERATURES, balance_weight=weight)
    ]
    negatives = (
        ("with balance weights 0 and 0.003 every strategy fails at temperatures 0.03, 0.3, 1 and 10", without),
        (
            "Sample, Sample Skip IW and Sample Skip, which do not balance, fail at every temperature",
            outcomes.settings("gating", "plain", INDEPENDENT),
        ),
        (
            "without importance weights Gumbel-Matching fails at every temperature",
            outcomes.settings("gating", "no-iw", MATCHING),
        ),
        (
            "Gumbel-Matching IW and SH fail at temperatures 10, 30 and 100",
            outcomes.settings("gating", "plain", _CORRECTED, HIGH),
        ),
    )
    return parts + [solved_part(rule, found, "all failed") for rule, found in negatives]


@claim(7, "Gating works better with Sinkhorn first than without, and then needs a very low temperature.")
def judge_gating_sinkhorn(outcomes: Outcomes) -> list[Part]:
    """Claim 7: gating is better with Sinkhorn first, and needs a very low temperature then."""
    parts = [compare_variants(outcomes, "gating", "sinkhorn", "plain", LOW, core=True)]
    for method in ("sample", "skip-iw"):
        rule = f"with Sinkhorn first, {PAPER_STRATEGIES[method].label} solves at some temperature <= 0.1"
        parts.append(solved_part(rule, outcomes.settings("gating", "sinkhorn", [method], VERY_LOW), "one solved"))
    rule = "with Sinkhorn first, every strategy fails at every temperature >= 1"
    return [*parts, solved_part(rule, outcomes.settings("gating", "sinkhorn", METHODS, FROM_ONE), "all failed")]


@claim(8, "Gating without importance weights fails.")
def judge_gating_no_weights(outcomes: Outcomes) -> list[Part]:
    """Claim 8: without importance weights gating fails, whatever the strategy and the temperature."""
    rule = "every strategy fails at every temperature"
    return [solved_part(rule, outcomes.settings("gating", "no-iw"), "all failed")]


@claim(
    16,
    "For gating, scaled Gumbel noise on the log-probabilities does as well as Gaussian noise or input jitter.",
    study="noise",
)
def judge_noise(study: Mapping[str, Any]) -> list[Part]:
    """Claim 16: Gumbel noise does as well as Gaussian noise and jitter, each at the scale that suits it best.

    Args:
        study: `runs`, each with kind, scale, method, importance, solved, seeds.
    """
    needed = {"kind", "method", "importance", "solved", "seeds"}
    best: dict[str, dict[str, tuple[int, int]]] = {}
    for r in study.get("runs", ()):
        if needed <= r.keys() and r["method"] in PAPER_STRATEGIES:
            setting = PAPER_STRATEGIES[r["method"]].label
            kinds = best.setdefault(setting if r["importance"] else f"{setting} without importance weights", {})
            kinds[r["kind"]] = max(kinds.get(r["kind"], (0, r["seeds"])), (r["solved"], r["seeds"]))
    return [_compare_noise(best, other) for other in ("gaussian", "jitter")]


def _compare_noise(best: Mapping[str, Mapping[str, tuple[int, int]]], other: str) -> Part:
    """Compares Gumbel noise with one other kind, wherever either of the two solves the task for most seeds."""
    name = {"gaussian": "Gaussian noise", "jitter": "input jitter"}[other]
    rule = (
        f"wherever Gumbel noise or {name} solves the task for most seeds, Gumbel noise at its best scale solves at most "
        f"{MARGIN} fewer of the seeds than {name} at its best"
    )
    pairs = {s: (kinds["gumbel"], kinds[other]) for s, kinds in best.items() if {"gumbel", other} <= kinds.keys()}
    if not pairs:
        return Part(rule=rule, measured="not run", verdict="not judged")
    figures = {
        f"{s} {kind}": k / n for s, pair in pairs.items() for kind, (k, n) in zip(("gumbel", other), pair, strict=True)
    }
    trained = {s: pair for s, pair in pairs.items() if max(k / n for k, n in pair) > HALF}
    if not trained:
        measured = f"neither trains the model with {', '.join(pairs)}"
        return Part(rule=rule, measured=measured, verdict="undecided", figures=figures)
    gaps = [_difference(theirs, ours) for ours, theirs in trained.values()]
    shown = "; ".join(f"{s}: Gumbel noise {a} of {n}, {name} {b} of {m}" for s, ((a, n), (b, m)) in trained.items())
    verdict = all_hold(opposite(above(interval, MARGIN)) for _, interval in gaps)
    seeds = max(seeds_needed(0.5 + (gap - MARGIN) / 2) for gap, _ in gaps) if verdict == "undecided" else None
    return Part(rule=rule, measured=shown, verdict=verdict, figures=figures, seeds=seeds)


def _difference(one: tuple[int, int], other: tuple[int, int]) -> tuple[float, tuple[float, float]]:
    """The difference of two fractions with Newcombe's 95% interval, which is made of both Wilson intervals."""
    (p, (p_low, p_high)), (q, (q_low, q_high)) = ((k / n, wilson(k, n)) for k, n in (one, other))
    return p - q, (
        p - q - math.hypot(p - p_low, q_high - q),
        p - q + math.hypot(p_high - p, q - q_low),
    )
