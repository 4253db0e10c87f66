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
    MARGIN,
    MATCHING,
    Outcomes,
    Part,
    all_hold,
    claim,
    difference_part,
    solved_part,
)

_LABELS = {name: strategy.label for name, strategy in PAPER_STRATEGIES.items()}


@claim(1, "With REINFORCE, Sample and Sample Skip IW solve the task at every temperature >= 1.", both=True)
def judge_solved_from_one(outcomes: Outcomes) -> list[Part]:
    """Claim 1: Sample and Sample Skip IW solve the task from temperature 1 on."""
    return [
        solved_part(
            f"{_LABELS[method]} solves at every temperature >= 1",
            outcomes.settings("reinforce", "plain", [method], FROM_ONE),
            "all solved",
        )
        for method in ("sample", "skip-iw")
    ]


@claim(2, "Sample Skip IW is the only estimator within capacity that matches Sample; Sample Skip does not.", both=True)
def judge_skip_only(outcomes: Outcomes) -> list[Part]:
    """Claim 2: Sample Skip IW matches Sample, and nothing else that respects capacity does."""
    rule = f"over the temperatures >= 1, Sample Skip IW solves at most {MARGIN} fewer of the runs than Sample"
    others = [
        _compare(outcomes, f"{_LABELS[method]} solves more than {MARGIN} fewer of them", "sample", method)
        for method in ("skip", *MATCHING)
    ]
    return [_compare(outcomes, rule, "sample", "skip-iw", at_most=True), *others]


def _compare(
    outcomes: Outcomes,
    rule: str,
    better: str,
    worse: str,
    temperatures: tuple[float, ...] = FROM_ONE,
    *,
    at_most: bool = False,
    limit: float = MARGIN,
    core: bool = True,
) -> Part:
    """Compares two strategies of the first panel on the same seeds."""
    ours, theirs = (outcomes.settings("reinforce", "plain", [m], temperatures) for m in (better, worse))
    names = _LABELS[better], _LABELS[worse]
    return difference_part(rule, ours, theirs, names, at_most=at_most, limit=limit, core=core)


@claim(
    3,
    "Gumbel-Matching IW and SH are less effective, but good at large temperature; biased Gumbel-Matching is not.",
    both=True,
)
def judge_matching(outcomes: Outcomes) -> list[Part]:
    """Claim 3: Gumbel-Matching IW and SH fall short of Sample Skip IW, recover at large temperature; the biased not."""
    parts: list[Part] = []
    for method in ("gm-iw", "gm-sh"):
        label = _LABELS[method]
        rule = f"over the temperatures >= 1, {label} solves more than {MARGIN} fewer of the runs than Sample Skip IW"
        parts.append(_compare(outcomes, rule, "skip-iw", method))
        rule = f"over all temperatures too, {label} solves fewer of the runs than Sample Skip IW"
        parts.append(_compare(outcomes, rule, "skip-iw", method, TEMPERATURES, limit=0.0, core=False))
        rule = f"{label} solves at temperatures 10, 30 and 100"
        parts.append(solved_part(rule, outcomes.settings("reinforce", "plain", [method], HIGH), "all solved"))
    rule = "biased Gumbel-Matching fails at temperatures 10, 30 and 100"
    return [*parts, solved_part(rule, outcomes.settings("reinforce", "plain", ["gm"], HIGH), "all failed")]


@claim(5, "With Sinkhorn first, REINFORCE works only at high temperature.")
def judge_sinkhorn(outcomes: Outcomes) -> list[Part]:
    """Claim 5: with Sinkhorn first, REINFORCE works only at high temperature, and works worse than without."""
    return [
        solved_part(
            "the unbiased estimators solve at temperatures 10, 30 and 100",
            outcomes.settings("reinforce", "sinkhorn", ["sample", "skip-iw", "gm-iw"], HIGH),
            "all solved",
        ),
        solved_part(
            "all six fail at every temperature < 1",
            outcomes.settings("reinforce", "sinkhorn", METHODS, LOW),
            "all failed",
        ),
        compare_variants(outcomes, "reinforce", "plain", "sinkhorn", TEMPERATURES, core=False),
    ]


def compare_variants(
    outcomes: Outcomes, loss: Loss, better: Variant, worse: Variant, temperatures: tuple[float, ...], *, core: bool
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
        f"over Sample, Sample Skip IW and Sample Skip at {span}, more of the runs are solved {words[better]} than "
        f"{words[worse]}"
    )
    ours, theirs = (outcomes.settings(loss, variant, INDEPENDENT, temperatures) for variant in (better, worse))
    return difference_part(rule, ours, theirs, (words[better], words[worse]), limit=0.0, core=core)


@claim(9, "REINFORCE without importance weights works at low temperature, but not with Gumbel-Matching.")
def judge_no_weights(outcomes: Outcomes) -> list[Part]:
    """Claim 9: REINFORCE without importance weights works at low temperature, not with Gumbel-Matching."""
    parts = [
        solved_part(
            f"{_LABELS[method]} solves at some temperature < 1",
            outcomes.settings("reinforce", "no-iw", [method], LOW),
            "one solved",
            core=method != "skip",
        )
        for method in INDEPENDENT
    ]
    high = outcomes.settings("reinforce", "no-iw", ["sample", "skip-iw"], HIGH)
    matching = outcomes.settings("reinforce", "no-iw", MATCHING)
    return [
        *parts,
        solved_part("Sample and Sample Skip IW fail at temperatures 10, 30 and 100", high, "all failed"),
        solved_part("Gumbel-Matching fails at every temperature", matching, "all failed"),
    ]


@claim(10, "REINFORCE works with and without a balance loss; at a weight of 0.1 everything fails.")
def judge_balance_loss(outcomes: Outcomes) -> list[Part]:
    """Claim 10: REINFORCE works with and without a balance loss; at weight 0.1 nothing does."""
    methods, temperatures = ("sample", "skip-iw"), (1.0, 10.0)
    without = outcomes.settings("reinforce", "plain", methods, temperatures, balance_weight=0.0)
    within = [
        setting
        for weight in BALANCE_WEIGHTS[1:-1]
        for setting in outcomes.settings("reinforce", "plain", methods, temperatures, balance_weight=weight)
    ]
    most = BALANCE_WEIGHTS[-1]
    too_much = [
        setting
        for loss in LOSSES
        for setting in outcomes.settings(loss, "plain", METHODS, SWEEP_TEMPERATURES, balance_weight=most)
    ]
    who = "Sample and Sample Skip IW solve with REINFORCE at temperatures 1 and 10"
    rule = "at weight 0.1 every strategy fails with either loss at temperatures 0.03, 0.3, 1 and 10"
    return [
        solved_part(f"{who} without a balance loss", without, "all solved"),
        solved_part(f"{who} with weights 0.003, 0.01 and 0.03", within, "all solved"),
        solved_part(rule, too_much, "all failed"),
    ]


@claim(14, "Of the learning rates, 0.1 works best overall.")
def judge_learning_rate(outcomes: Outcomes) -> list[Part]:
    """Claim 14: over all strategies at temperatures 1 and 10, no learning rate solves more runs than 0.1."""
    rule = (
        "over the six strategies with REINFORCE at temperatures 1 and 10, the learning rate 0.1 solves more runs than "
        "each of 0.001, 0.003, 0.01, 0.03, 0.3 and 1"
    )
    swept = {
        rate: outcomes.settings("reinforce", "plain", METHODS, RATE_TEMPERATURES, learning_rate=rate)
        for rate in LEARNING_RATES
    }
    others = {
        rate: difference_part(rule, swept[0.1], settings, ("0.1", f"{rate:g}"), limit=0.0)
        for rate, settings in swept.items()
        if rate != 0.1
    }
    verdict = all_hold(part.verdict for part in others.values())
    if verdict == "not judged":
        return [Part(rule=rule, measured="not all learning rates run", verdict=verdict)]
    closest = min(others.values(), key=lambda part: next(iter(part.figures.values())))
    needed = max((part.seeds or 0 for part in others.values()), default=0)
    figures = {f"rate {rate:g}": sum(s.fraction for s in settings) / len(settings) for rate, settings in swept.items()}
    measured = "solved: " + ", ".join(f"{figures[f'rate {rate:g}']:.0%} at {rate:g}" for rate in LEARNING_RATES)
    measured += f"; nearest: {closest.measured}"
    seeds = needed if verdict == "undecided" else None
    return [Part(rule=rule, measured=measured, verdict=verdict, figures=figures, seeds=seeds)]
