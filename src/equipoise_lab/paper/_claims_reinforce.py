# SPDX-License-Identifier: Apache-2.0
"""Rules for the claims about REINFORCE: sections 3 and 3.1 and appendix E of the paper."""

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab.paper._recipe import (
    BALANCE_WEIGHTS,
    LEARNING_RATES,
    METHODS,
    RATE_TEMPERATURES,
    SWEEP_TEMPERATURES,
    TEMPERATURES,
)
from equipoise_lab.paper._results import LOSSES, Loss, Variant
from equipoise_lab.paper._rules import (
    FROM_ONE,
    HIGH,
    INDEPENDENT,
    LOW,
    MATCHING,
    SOLVES,
    Grade,
    Outcomes,
    Part,
    claim,
    grade,
    grade_all_failed,
    grade_all_solved,
    grade_one_solved,
    known,
    solved_part,
)

# A shortfall is a mean difference of solved fractions. Over seven temperatures of ten seeds each, 0.1 is about two
# standard errors of it.
_MATCHES, _FALLS_SHORT = 0.1, 0.2


@claim(1, "With REINFORCE, Sample and Sample Skip IW solve the task at every temperature >= 1.")
def judge_solved_from_one(outcomes: Outcomes) -> list[Part]:
    """Claim 1: Sample and Sample Skip IW solve the task from temperature 1 on."""
    parts: list[Part] = []
    for method in ("sample", "skip-iw"):
        found = outcomes.fractions("reinforce", "plain", [method], FROM_ONE)
        label = PAPER_STRATEGIES[method].label
        rule = f"{label} solves at every temperature >= 1 (in part: half of these runs are solved)"
        parts.append(solved_part(rule, found, grade_all_solved(found.values())))
    return parts


@claim(2, "Sample Skip IW is the only estimator within capacity that matches Sample; Sample Skip does not.")
def judge_skip_only(outcomes: Outcomes) -> list[Part]:
    """Claim 2: Sample Skip IW matches Sample, and nothing else that respects capacity does."""
    rule = (
        f"over the temperatures at which Sample solves, Sample Skip IW solves at most {_MATCHES} fewer of the runs "
        f"(in part: less than {_FALLS_SHORT})"
    )
    short = _shortfall(outcomes, "sample", "skip-iw")
    parts = [_shortfall_part(rule, "skip-iw", short, None if short is None else _grade_match(short))]
    for method in ("skip", *MATCHING):
        label = PAPER_STRATEGIES[method].label
        rule = f"{label} solves at least {_FALLS_SHORT} fewer of them (in part: more than {_MATCHES})"
        short = _shortfall(outcomes, "sample", method)
        parts.append(_shortfall_part(rule, method, short, None if short is None else _grade_short(short)))
    return parts


def _solved_temperatures(outcomes: Outcomes, method: str) -> list[float] | None:
    """The temperatures at which a method solves, or None where a temperature was not run."""
    found = known(outcomes.fractions("reinforce", "plain", [method]).values())
    return None if found is None else [t for t, f in zip(TEMPERATURES, found, strict=True) if f >= SOLVES]


def _shortfall(outcomes: Outcomes, ideal: str, method: str) -> float | None:
    """Mean solved fraction of `ideal` minus that of `method` where Sample solves; nan if it never does."""
    temperatures = _solved_temperatures(outcomes, "sample")
    if temperatures == []:
        return float("nan")
    if temperatures is None:
        return None
    best = known(outcomes.fractions("reinforce", "plain", [ideal], temperatures).values())
    found = known(outcomes.fractions("reinforce", "plain", [method], temperatures).values())
    return None if best is None or found is None else (sum(best) - sum(found)) / len(best)


def _grade_match(short: float) -> float:
    """Comparisons with nan are false: where Sample never solves there is nothing to match."""
    return grade(short <= _MATCHES + 1e-9, short < _FALLS_SHORT - 1e-9)


def _grade_short(short: float) -> float:
    return grade(short >= _FALLS_SHORT - 1e-9, short > _MATCHES + 1e-9)


def _shortfall_part(rule: str, method: str, short: float | None, given: Grade, ideal: str = "Sample") -> Part:
    if short is None:
        return Part(rule=rule, measured="not all settings run", grade=None)
    if short != short:
        return Part(rule=rule, measured="Sample solves at no temperature", grade=given)
    label = PAPER_STRATEGIES[method].label
    measured = f"{label} solves {abs(short):.2f} {'fewer' if short >= 0 else 'more'} of the runs than {ideal}"
    return Part(rule=rule, measured=measured, grade=given, figures={f"{ideal} - {label}": round(short, 6)})


@claim(3, "Gumbel-Matching IW and SH are less effective, but good at large temperature; biased Gumbel-Matching is not.")
def judge_matching(outcomes: Outcomes) -> list[Part]:
    """Claim 3: Gumbel-Matching IW and SH fall short of Sample Skip IW, recover at large temperature; the biased not."""
    parts: list[Part] = []
    for method in ("gm-iw", "gm-sh"):
        label = PAPER_STRATEGIES[method].label
        rule = (
            f"over the temperatures at which Sample solves, {label} solves at least {_FALLS_SHORT} fewer of the runs "
            f"than Sample Skip IW (in part: more than {_MATCHES})"
        )
        short = _shortfall(outcomes, "skip-iw", method)
        given = None if short is None else _grade_short(short)
        parts.append(_shortfall_part(rule, method, short, given, "Sample Skip IW"))
        parts.append(_whole_range(outcomes, method))
        found = outcomes.fractions("reinforce", "plain", [method], HIGH)
        rule = f"{label} solves at temperatures 10, 30 and 100 (in part: half of these runs are solved)"
        parts.append(solved_part(rule, found, grade_all_solved(found.values())))
    found = outcomes.fractions("reinforce", "plain", ["gm"], HIGH)
    rule = "biased Gumbel-Matching fails at temperatures 10, 30 and 100 (in part: solves at none)"
    return [*parts, solved_part(rule, found, grade_all_failed(found.values()))]


def _whole_range(outcomes: Outcomes, method: str) -> Part:
    """Less effective over all temperatures: the other reading of the sentence."""
    label = PAPER_STRATEGIES[method].label
    rule = f"over all temperatures too, {label} solves fewer runs than Sample Skip IW (in part: as many)"
    found = known(outcomes.fractions("reinforce", "plain", [method]).values())
    skip = known(outcomes.fractions("reinforce", "plain", ["skip-iw"]).values())
    if found is None or skip is None:
        return Part(rule=rule, measured="not all settings run", grade=None, core=False)
    one, other = sum(found) / len(found), sum(skip) / len(skip)
    equal = abs(one - other) < 1e-9
    measured = f"{one:.0%} of runs solved, Sample Skip IW {other:.0%}"
    figures = {f"{method} all temperatures": one, "skip-iw all temperatures": other}
    return Part(
        rule=rule, measured=measured, grade=grade(one < other and not equal, equal), core=False, figures=figures
    )


@claim(5, "With Sinkhorn first, REINFORCE works only at high temperature.")
def judge_sinkhorn(outcomes: Outcomes) -> list[Part]:
    """Claim 5: with Sinkhorn first, REINFORCE works only at high temperature, and works worse than without."""
    high = outcomes.fractions("reinforce", "sinkhorn", ["sample", "skip-iw", "gm-iw"], HIGH)
    low = outcomes.fractions("reinforce", "sinkhorn", METHODS, LOW)
    return [
        solved_part(
            "the unbiased estimators solve at temperatures 10, 30 and 100 (in part: half of these runs are solved)",
            high,
            grade_all_solved(high.values()),
        ),
        solved_part(
            "all six fail at every temperature < 1 (in part: at most one in ten settings is solved)",
            low,
            grade_all_failed(low.values()),
        ),
        compare_variants(outcomes, "reinforce", "plain", "sinkhorn", TEMPERATURES, core=False),
    ]


def compare_variants(
    outcomes: Outcomes,
    loss: Loss,
    better: Variant,
    worse: Variant,
    temperatures: tuple[float, ...],
    *,
    core: bool,
) -> Part:
    """Compares two variants over the strategies that Sinkhorn can change (Gumbel-Matching is invariant to it).

    Args:
        outcomes: all results.
        loss: "reinforce" or "gating".
        better: the variant that should solve more.
        worse: the other.
        temperatures: over which to average.
        core: see `Part`.
    """
    words = {"plain": "without Sinkhorn", "sinkhorn": "with Sinkhorn first"}
    span = "all temperatures" if temperatures == TEMPERATURES else "temperatures < 1"
    rule = (
        f"over Sample, Sample Skip IW and Sample Skip at {span}, at least 0.1 more of the runs are solved "
        f"{words[better]} than {words[worse]} (in part: more)"
    )
    sides: list[float] = []
    for variant in (better, worse):
        found = known(outcomes.fractions(loss, variant, INDEPENDENT, temperatures).values())
        if found is None:
            return Part(rule=rule, measured="not all settings run", grade=None, core=core)
        sides.append(sum(found) / len(found))
    gain = sides[0] - sides[1]
    measured = f"{sides[0]:.0%} {words[better]}, {sides[1]:.0%} {words[worse]}"
    figures = {f"{loss} {better} mean": sides[0], f"{loss} {worse} mean": sides[1]}
    return Part(rule=rule, measured=measured, grade=grade(gain >= 0.1 - 1e-9, gain > 1e-9), core=core, figures=figures)


@claim(9, "REINFORCE without importance weights works at low temperature, but not with Gumbel-Matching.")
def judge_no_weights(outcomes: Outcomes) -> list[Part]:
    """Claim 9: REINFORCE without importance weights works at low temperature, not with Gumbel-Matching."""
    parts: list[Part] = []
    for method in INDEPENDENT:
        found = outcomes.fractions("reinforce", "no-iw", [method], LOW)
        rule = f"{PAPER_STRATEGIES[method].label} solves at some temperature < 1 (in part: does not fail at some)"
        parts.append(solved_part(rule, found, grade_one_solved(found.values()), core=method != "skip"))
    high = outcomes.fractions("reinforce", "no-iw", ["sample", "skip-iw"], HIGH)
    rule = "Sample and Sample Skip IW fail at temperatures 10, 30 and 100 (in part: solve at none)"
    parts.append(solved_part(rule, high, grade_all_failed(high.values())))
    matching = outcomes.fractions("reinforce", "no-iw", MATCHING)
    rule = "Gumbel-Matching fails at every temperature (in part: at most one in ten settings is solved)"
    return [*parts, solved_part(rule, matching, grade_all_failed(matching.values()))]


@claim(10, "REINFORCE works with and without a balance loss; at a weight of 0.1 everything fails.")
def judge_balance_loss(outcomes: Outcomes) -> list[Part]:
    """Claim 10: REINFORCE works with and without a balance loss; at weight 0.1 nothing does."""
    methods, temperatures = ("sample", "skip-iw"), (1.0, 10.0)
    without = outcomes.fractions("reinforce", "plain", methods, temperatures, balance_weight=0.0)
    within: dict[str, float | None] = {}
    for weight in BALANCE_WEIGHTS[1:-1]:
        within |= outcomes.fractions("reinforce", "plain", methods, temperatures, balance_weight=weight)
    too_much: dict[str, float | None] = {}
    for loss in LOSSES:
        too_much |= outcomes.fractions(loss, "plain", METHODS, SWEEP_TEMPERATURES, balance_weight=BALANCE_WEIGHTS[-1])
    who = "Sample and Sample Skip IW solve with REINFORCE at temperatures 1 and 10"
    half = "(in part: half of these runs are solved)"
    return [
        solved_part(f"{who} without a balance loss {half}", without, grade_all_solved(without.values())),
        solved_part(f"{who} with weights 0.003, 0.01 and 0.03 {half}", within, grade_all_solved(within.values())),
        solved_part(
            "at weight 0.1 every strategy fails with either loss at temperatures 0.03, 0.3, 1 and 10 (in part: at most "
            "one in ten settings is solved)",
            too_much,
            grade_all_failed(too_much.values()),
        ),
    ]


@claim(14, "Of the learning rates, 0.1 works best overall.")
def judge_learning_rate(outcomes: Outcomes) -> list[Part]:
    """Claim 14: over all strategies at temperatures 1 and 10, no learning rate solves more runs than 0.1."""
    rule = (
        "over the six strategies with REINFORCE at temperatures 1 and 10, no other of the learning rates 0.001, 0.003, "
        "0.01, 0.03, 0.1, 0.3 and 1 solves as many runs as 0.1 (in part: none solves over 0.05 more)"
    )
    totals: dict[float, float] = {}
    for rate in LEARNING_RATES:
        found = known(outcomes.fractions("reinforce", "plain", METHODS, RATE_TEMPERATURES, learning_rate=rate).values())
        if found is None:
            return [Part(rule=rule, measured="not all learning rates run", grade=None)]
        totals[rate] = sum(found) / len(found)
    chosen, others = totals[0.1], max(total for rate, total in totals.items() if rate != 0.1)
    measured = "solved: " + ", ".join(f"{total:.0%} at {rate:g}" for rate, total in totals.items())
    given = grade(chosen > others + 1e-9, chosen > 0.0 and others - chosen <= 0.05 + 1e-9)
    return [Part(rule=rule, measured=measured, grade=given, figures={f"rate {r:g}": t for r, t in totals.items()})]
