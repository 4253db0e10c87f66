# SPDX-License-Identifier: Apache-2.0
"""The test itself: how often it is wrong, what it finds, what it asks for."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from equipoise.audit import Collector, Evidence, Tails, judge
from equipoise.audit._statistics import FALSE_ALARM, POWER, TOLERANCE

COMPONENTS = 8


def evidence_of(draws: Tensor, exact: Tensor, tails: Tails | None = None) -> Evidence:
    collector = Collector(exact)
    collector.add(draws, tails)
    return collector.evidence()


def alarms(make: Callable[[], Evidence], rate: float, repeats: int) -> int:
    return sum(judge(make(), rate=rate).verdict == "biased" for _ in range(repeats))


def test_moments_do_not_depend_on_the_batches(generator: torch.Generator) -> None:
    draws = torch.randn(1000, COMPONENTS, generator=generator).double() + 5.0
    collector = Collector(torch.full([COMPONENTS], 4.5).double())
    for batch in draws.split(333):
        collector.add(batch)
    evidence = collector.evidence()
    torch.testing.assert_close(evidence.mean, draws.mean(0))
    torch.testing.assert_close(evidence.variance, draws.var(0))
    torch.testing.assert_close(evidence.reach, (draws - 4.5).abs().amax(0))
    assert evidence.estimates == 1000


@pytest.mark.parametrize("skewed", [False, True])
def test_false_alarms_are_at_most_as_frequent_as_declared(generator: torch.Generator, skewed: bool) -> None:
    def make() -> Evidence:
        draws = torch.randn(500, COMPONENTS, generator=generator).double()
        exact = torch.zeros(COMPONENTS).double()
        if skewed:  # log-normal, skewness 33
            draws, exact = (1.5 * draws).exp(), exact + torch.tensor(1.5**2 / 2).double().exp()
        return evidence_of(draws, exact)

    # At most 60 are expected of 600; even if exactly that rate held, more than 100 had probability 1e-7.
    assert alarms(make, 0.1, 600) <= 100
    if not skewed:
        # Not because it never alarms: at a rate of 1 the limit is 2.4 standard errors, for 8 components.
        assert alarms(make, 1.0, 600) > 20


def test_weight_that_was_too_rare_to_be_seen_raises_no_alarm(generator: torch.Generator) -> None:
    # 1/q with probability q has mean 1. Of 1,000 draws with q = 1e-4, nine runs in ten see nothing but zeros.
    q = torch.tensor([1e-4]).double()
    tails = Tails(1 / q, 1 / q)

    def make(known: Tails | None) -> Evidence:
        seen = (torch.rand(1000, 1, generator=generator).double() < q) / q
        return evidence_of(seen, torch.ones(1).double(), known)

    assert alarms(lambda: make(tails), 0.05, 200) <= 25  # 10 expected at most; beyond 25 with probability 1e-5
    assert alarms(lambda: make(None), FALSE_ALARM, 200) > 150


def test_bias_that_is_called_detectable_is_found(generator: torch.Generator) -> None:
    exact = torch.ones(COMPONENTS).double()
    found = 0
    for _ in range(300):
        draws = exact + torch.randn(1000, COMPONENTS, generator=generator).double()
        bias = evidence_of(draws, exact).detectable()[3]
        draws[:, 3] += bias
        found += judge(evidence_of(draws, exact)).verdict == "biased"
    assert found >= 285  # at a power of 0.99, fewer than 285 have probability 1e-6


def test_one_part_in_fifty_is_found_with_the_stated_draws(generator: torch.Generator) -> None:
    exact = torch.full([COMPONENTS], 0.5).double()
    coins = (torch.rand(400_000, COMPONENTS, generator=generator) < 0.5).double()
    assert float(evidence_of(coins, exact).detectable().max()) < 0.02 * 0.7
    assert judge(evidence_of(coins, exact)).verdict == "unbiased"
    assert judge(evidence_of(1.02 * coins, exact)).verdict == "biased"


def test_verdict_needs_resolution_and_says_how_many_draws_that_takes() -> None:
    ones = torch.ones(4).double()
    evidence = Evidence(100, ones, ones, ones, 3.0 * ones)
    judgement = judge(evidence, groups=2)
    assert judgement.verdict == "undecided"
    assert judgement.detectable > TOLERANCE
    assert judgement.more_estimates is not None
    enough = replace(evidence, estimates=100 + judgement.more_estimates)
    assert judge(enough, groups=2).verdict == "unbiased"
    assert judge(replace(evidence, estimates=enough.estimates * 9 // 10), groups=2).verdict == "undecided"


def test_without_a_claim_no_bias_found_decides_nothing() -> None:
    ones = torch.ones(2).double()
    evidence = Evidence(10**6, ones, ones + torch.tensor([0.0, 0.003]).double(), ones, ones)
    assert judge(evidence).verdict == "unbiased"
    judgement = judge(evidence, claimed=False)
    assert (judgement.verdict, judgement.component) == ("undecided", 1)
    assert judgement.more_estimates is not None
    enough = replace(evidence, estimates=10**6 + judgement.more_estimates)
    assert float(enough.detectable()[1]) == pytest.approx(0.003, rel=1e-3)
    assert judge(enough, claimed=False).verdict == "biased"
    assert judge(replace(evidence, mean=ones), claimed=False).more_estimates is None


@pytest.mark.parametrize(("offset", "verdict"), [(0.0, "unbiased"), (1e-3, "biased")])
def test_component_that_never_varies_is_held_to_rounding(offset: float, verdict: str) -> None:
    ones = torch.ones(2).double()
    assert judge(Evidence(1000, ones, ones + offset, 0.0 * ones, offset * ones / 10)).verdict == verdict


def test_declared_rates() -> None:
    assert (FALSE_ALARM, POWER, TOLERANCE) == (1e-6, 0.99, 0.1)
