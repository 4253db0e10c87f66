# SPDX-License-Identifier: Apache-2.0
"""Rules for the claims about differentiable gating: section 3.1 and appendix E of the paper."""

from collections.abc import Mapping
from typing import Any

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab.paper._claims_reinforce import compare_variants
from equipoise_lab.paper._recipe import METHODS, SWEEP_TEMPERATURES
from equipoise_lab.paper._results import THRESHOLD
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
    Setting,
    all_hold,
    claim,
    difference_part,
    solved_part,
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
        study: `runs`, each with kind, scale, method, importance, and the mse of each seed.
    """
    best: dict[str, dict[str, Setting]] = {}
    for r in study.get("runs", ()):
        if {"kind", "method", "importance", "mse"} <= r.keys() and r["method"] in PAPER_STRATEGIES:
            name = PAPER_STRATEGIES[r["method"]].label + ("" if r["importance"] else " without importance weights")
            solved = {seed: mse is not None and mse < THRESHOLD for seed, mse in enumerate(r["mse"])}
            found, kinds = Setting(f"{name} {r['kind']}", solved), best.setdefault(name, {})
            kinds[r["kind"]] = max(kinds.get(r["kind"], found), found, key=lambda setting: setting.fraction)
    return [_compare_noise(best, other) for other in ("gaussian", "jitter")]


def _compare_noise(best: Mapping[str, Mapping[str, Setting]], other: str) -> Part:
    """Compares Gumbel noise with one other kind, wherever either of the two solves the task for most seeds."""
    name = {"gaussian": "Gaussian noise", "jitter": "input jitter"}[other]
    rule = (
        f"wherever Gumbel noise or {name} solves the task for most seeds, Gumbel noise at its best scale solves at "
        f"most {MARGIN} fewer of the seeds than {name} at its best"
    )
    pairs = {s: (kinds[other], kinds["gumbel"]) for s, kinds in best.items() if {"gumbel", other} <= kinds.keys()}
    trained = {s: pair for s, pair in pairs.items() if max(setting.fraction for setting in pair) > HALF}
    if not trained:
        measured = f"neither trains the model with {', '.join(pairs)}" if pairs else "not run"
        return Part(rule=rule, measured=measured, verdict="undecided" if pairs else "not judged")
    parts = [
        difference_part(rule, [theirs], [ours], (f"{setting}: {name}", "Gumbel noise"), at_most=True)
        for setting, (theirs, ours) in trained.items()
    ]
    return Part(
        rule=rule,
        measured="; ".join(part.measured for part in parts),
        verdict=all_hold(part.verdict for part in parts),
        figures={setting.name: setting.fraction for pair in pairs.values() for setting in pair},
        seeds=max((part.seeds for part in parts if part.seeds is not None), default=None),
    )
