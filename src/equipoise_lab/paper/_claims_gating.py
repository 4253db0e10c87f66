# SPDX-License-Identifier: Apache-2.0
"""Rules for the claims about differentiable gating: section 3.1 and appendix E of the paper."""

from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab.paper._claims_reinforce import compare_variants
from equipoise_lab.paper._recipe import METHODS, SWEEP_TEMPERATURES
from equipoise_lab.paper._rules import (
    FAILS,
    FROM_ONE,
    HIGH,
    INDEPENDENT,
    LOW,
    MATCHING,
    VERY_LOW,
    Outcomes,
    Part,
    claim,
    grade,
    grade_all_failed,
    grade_one_solved,
    solved_part,
)

_CORRECTED = ("gm-iw", "gm-sh")
_TENTH = "(in part: at most one in ten settings is solved)"


@claim(6, "Gating needs a balance loss of 0.01 or 0.03, balanced sampling, importance weights and a low temperature.")
def judge_gating(outcomes: Outcomes) -> list[Part]:
    """Claim 6: gating succeeds with all four ingredients, and not where one of them is missing."""
    parts: list[Part] = []
    for weight, temperatures in ((0.01, LOW), (0.03, (0.03, 0.3))):
        found = outcomes.fractions("gating", "plain", _CORRECTED, temperatures, balance_weight=weight)
        shown = "some temperature < 1" if temperatures == LOW else "temperature 0.03 or 0.3"
        rule = (
            f"with balance weight {weight:g}, Gumbel-Matching IW or SH solves at {shown} (in part: does not fail there)"
        )
        parts.append(solved_part(rule, found, grade_one_solved(found.values())))
    without: dict[str, float | None] = {}
    for weight in (0.0, 0.003):
        without |= outcomes.fractions("gating", "plain", METHODS, SWEEP_TEMPERATURES, balance_weight=weight)
    independent = outcomes.fractions("gating", "plain", INDEPENDENT)
    high = outcomes.fractions("gating", "plain", _CORRECTED, HIGH)
    unweighted = outcomes.fractions("gating", "no-iw", MATCHING)
    negatives = (
        (
            f"with balance weights 0 and 0.003 every strategy fails at temperatures 0.03, 0.3, 1 and 10 {_TENTH}",
            without,
        ),
        (
            f"Sample, Sample Skip IW and Sample Skip, which do not balance, fail at every temperature {_TENTH}",
            independent,
        ),
        (f"without importance weights Gumbel-Matching fails at every temperature {_TENTH}", unweighted),
        ("Gumbel-Matching IW and SH fail at temperatures 10, 30 and 100 (in part: solve at none)", high),
    )
    return parts + [solved_part(rule, found, grade_all_failed(found.values())) for rule, found in negatives]


@claim(7, "Gating works better with Sinkhorn first than without, and then needs a very low temperature.")
def judge_gating_sinkhorn(outcomes: Outcomes) -> list[Part]:
    """Claim 7: gating is better with Sinkhorn first, and needs a very low temperature then."""
    parts = [compare_variants(outcomes, "gating", "sinkhorn", "plain", LOW, core=True)]
    for method, label in (("sample", "Sample"), ("skip-iw", "Sample Skip IW")):
        found = outcomes.fractions("gating", "sinkhorn", [method], VERY_LOW)
        rule = f"with Sinkhorn first, {label} solves at some temperature <= 0.1 (in part: does not fail there)"
        parts.append(solved_part(rule, found, grade_one_solved(found.values())))
    found = outcomes.fractions("gating", "sinkhorn", METHODS, FROM_ONE)
    rule = f"with Sinkhorn first, every strategy fails at every temperature >= 1 {_TENTH}"
    return [*parts, solved_part(rule, found, grade_all_failed(found.values()))]


@claim(8, "Gating without importance weights fails.")
def judge_gating_no_weights(outcomes: Outcomes) -> list[Part]:
    """Claim 8: without importance weights gating fails, whatever the strategy and the temperature."""
    found = outcomes.fractions("gating", "no-iw")
    rule = f"every strategy fails at every temperature {_TENTH}"
    return [solved_part(rule, found, grade_all_failed(found.values()))]


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
    runs: list[Mapping[str, Any]] = [
        r for r in study.get("runs", ()) if needed <= r.keys() and r["method"] in PAPER_STRATEGIES
    ]
    settings = sorted({(str(r["method"]), bool(r["importance"])) for r in runs})
    best = {
        setting: _best_scales([r for r in runs if (r["method"], r["importance"]) == setting]) for setting in settings
    }
    return [_compare_noise(best, other) for other in ("gaussian", "jitter")]


def _best_scales(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The largest solved fraction of each kind over its scales."""
    best: dict[str, float] = {}
    for r in runs:
        best[r["kind"]] = max(best.get(r["kind"], 0.0), r["solved"] / r["seeds"])
    return best


def _compare_noise(best: Mapping[tuple[str, bool], Mapping[str, float]], other: str) -> Part:
    """Compares Gumbel noise with one other kind, wherever either of the two does not fail."""
    name = {"gaussian": "Gaussian noise", "jitter": "input jitter"}[other]
    rule = (
        f"wherever Gumbel noise or {name} trains at all (over 2 of 10 seeds), Gumbel noise at its best scale solves at "
        f"most 0.1 fewer of the seeds than {name} at its best (in part: at most 0.2 fewer, or neither ever trains)"
    )
    pairs = {
        f"{PAPER_STRATEGIES[method].label}{'' if importance else ' without importance weights'}": (
            kinds["gumbel"],
            kinds[other],
        )
        for (method, importance), kinds in best.items()
        if "gumbel" in kinds and other in kinds
    }
    if not pairs:
        return Part(rule=rule, measured="not run", grade=None)
    figures = {f"{setting} gumbel": one for setting, (one, _) in pairs.items()}
    figures |= {f"{setting} {other}": two for setting, (_, two) in pairs.items()}
    trained = {setting: pair for setting, pair in pairs.items() if max(pair) > FAILS}
    if not trained:
        measured = f"neither trains the model with {', '.join(pairs)}"
        return Part(rule=rule, measured=measured, grade=0.5, figures=figures)
    worst = max(two - one for one, two in trained.values())
    shown = "; ".join(f"{setting}: Gumbel noise {one:.0%}, {name} {two:.0%}" for setting, (one, two) in trained.items())
    given = grade(worst <= 0.1 + 1e-9, worst <= 0.2 + 1e-9)
    return Part(rule=rule, measured=shown, grade=given, figures=figures)
