# SPDX-License-Identifier: Apache-2.0
"""Unbiased estimates pass, biased ones are found out, and what is measured is what it says."""

from dataclasses import FrozenInstanceError, dataclass, replace

import pytest
import torch

import equipoise as eq
from equipoise.audit import BASELINES, DRAWS, AuditResult, Conditions, audit, draw_problem
from equipoise.audit._draws import draw_batch
from equipoise.audit._tails import Subtracted, possible_tails
from equipoise.estimators import PAPER_STRATEGIES, STRATEGIES, reinforce
from equipoise.reference import exact_logit_gradient

SIX = tuple(PAPER_STRATEGIES)
SMALL = Conditions(draws=60_000, row_effect=0.0)


@dataclass(frozen=True)
class Inflated:
    """A strategy whose weights are all a little too large, and who says they are right."""

    name: str
    factor: float = 1.02
    label: str = "Inflated"
    unbiased: bool = True

    @property
    def respects_capacity(self) -> bool:
        return STRATEGIES[self.name].respects_capacity

    def draw_noise(self, shape, **where):
        return STRATEGIES[self.name].draw_noise(shape, **where)

    def draw(self, log_p, noise, **how):
        s, weight = STRATEGIES[self.name].draw(log_p, noise, **how)
        return s, self.factor * weight


def results(names: tuple[str, ...], conditions: Conditions, baseline: str = "none") -> dict[str, AuditResult]:
    return {name: audit(name, conditions, baseline=baseline) for name in names}


def test_a_result_says_what_it_rests_on() -> None:
    state = torch.random.get_rng_state()
    found = eq.audit.audit("skip", replace(SMALL, draws=20_000))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (found.name, found.verdict, found.claimed) == ("skip", "biased", False)
    assert (found.false_alarm, found.power, found.tolerance, found.confidence) == (1e-6, 0.99, 0.1, 0.95)
    assert found.bias.shape == found.z_scores.shape == found.variance.shape == (32,)
    worst = found.judgement.component
    assert float(found.z_scores[worst].abs()) == pytest.approx(found.judgement.z, rel=1e-6)
    assert found.judgement.z > found.judgement.z_limit
    torch.testing.assert_close(found.bias, found.evidence.mean - found.evidence.exact)
    with pytest.raises(FrozenInstanceError):
        found.draws = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_a_component_that_never_varies_has_no_z_score() -> None:
    found = audit("sample", replace(SMALL, draws=1000, sharpness=1000.0))
    still = found.variance == 0
    assert still.any()
    assert (found.z_scores[still] == 0).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_verdicts_on_the_six(seed: int) -> None:
    found = {name: result.verdict for name, result in results(SIX, replace(SMALL, seed=seed)).items()}
    assert [found[name] for name in ("sample", "skip-iw", "skip", "gm")] == ["unbiased", "unbiased", "biased", "biased"]
    assert found["gm-iw"] in ("unbiased", "undecided")
    assert found["gm-sh"] in ("biased", "undecided")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_default_draws_decide_on_gumbel_matching(seed: int) -> None:
    judgement = audit("gm-iw", replace(SMALL, seed=seed)).judgement
    assert judgement.verdict != "biased"
    assert judgement.more_estimates is not None
    assert judgement.more_estimates + SMALL.draws < Conditions().draws


@pytest.mark.parametrize("sharpness", [0.3, 3.0, 8.0])
def test_no_false_alarm_whatever_the_weights(sharpness: float) -> None:
    found = results(("sample", "skip-iw", "gm-iw"), replace(SMALL, draws=30_000, sharpness=sharpness))
    assert all(outcome.verdict != "biased" for outcome in found.values())


@pytest.mark.parametrize("name", ["sample", "skip-iw", "gm-iw"])
def test_two_percent_too_much_weight_is_found(name: str) -> None:
    assert audit(Inflated(name), SMALL).verdict == "biased"
    assert audit(Inflated(name, 1.0), SMALL).verdict != "biased"


def test_leave_one_out_baseline_is_biased_where_rows_compete() -> None:
    found = results(("sample", "skip-iw", "gm-iw"), SMALL, "leave-one-out")
    texts = [f"{outcome.name}: {outcome.verdict}" for outcome in found.values()]
    verdicts = ("unbiased", "biased", "biased")
    assert texts == [f"{name} + leave-one-out: {verdict}" for name, verdict in zip(found, verdicts, strict=True)]
    assert [outcome.claimed for outcome in found.values()] == [True, False, False]


NEW = ("skip-iw-mix", "gm-iw-mix", "gm-iw-avg", "gm-iw-avg-mix")


@pytest.mark.parametrize("how", [{}, {"capacity_factor": 1.25}, {"temperature": 0.7}, {"n": 7, "k": 3}])
def test_what_came_after_the_paper_is_unbiased(how: dict[str, object]) -> None:
    for outcome in results(NEW, replace(SMALL, draws=30_000, **how)).values():  # pyright: ignore[reportArgumentType]
        judgement = outcome.judgement
        assert judgement.verdict != "biased"
        assert judgement.detectable < 0.6  # a bias of this size would have been found
        assert outcome.claimed


@pytest.mark.parametrize("name", ["sample", "skip-iw", "gm-iw-mix"])
def test_baselines_are_unbiased_and_those_that_see_rows_reduce_the_variance(name: str) -> None:
    deviation = {}
    for baseline in BASELINES:
        if baseline == "leave-one-out":
            continue
        outcome = audit(name, Conditions(draws=32_000), baseline=baseline)
        assert outcome.claimed
        assert outcome.verdict != "biased"
        deviation[baseline] = outcome.findings["router"].deviation
        if baseline == "draws":
            deviation[baseline] *= DRAWS**0.5  # of one draw
            assert outcome.evidence.estimates * DRAWS == outcome.draws == 32_000
    # Half of the losses' variance is the rows', and their mean is 1. Features show them through noise.
    assert deviation["ema"] < 0.9 * deviation["none"]
    assert deviation["expert-mean"] < 0.9 * deviation["none"]
    assert deviation["critic"] < 0.75 * deviation["ema"]
    assert deviation["draws"] < 0.75 * deviation["ema"]


@dataclass
class Forgetful:
    """A critic whose expectation is not added back."""

    name: str = "forgetful"
    draws: int = 1
    learns: bool = False

    def read(self, s, losses, weight):
        return s.at_z(torch.arange(s.log_q.shape[-1]).double().expand(s.log_q.shape)), None

    def update(self, s, losses) -> None: ...


@pytest.mark.parametrize("name", ["sample", "skip-iw", "gm-iw"])
def test_critic_without_its_expectation_is_found_out(name: str) -> None:
    outcome = audit(name, SMALL, baseline=Forgetful())
    assert (outcome.name, outcome.verdict) == (f"{name} + forgetful", "biased")


def test_tails_of_a_critic_are_those_of_the_estimates() -> None:
    # Where weights are 1 every draw is as likely as it looks, so what was possible is what was seen.
    conditions = Conditions()
    problem, generator = draw_problem(conditions), torch.Generator().manual_seed(1)
    s, weight = draw_batch(STRATEGIES["sample"], conditions, problem, [40_000], generator)
    critic = 0.7 * problem.losses
    subtracted = Subtracted(0.3, critic.expand(s.log_q.shape), 1)
    tails = possible_tails(problem, torch.ones(1, 8, 2).double(), subtracted)
    logits = problem.logits.expand(s.log_q.shape).clone().requires_grad_()
    losses = s.at_z(problem.losses.expand(s.log_q.shape))
    loss = reinforce(logits.log_softmax(-1), s, losses, baseline=0.3, weight=weight, critic=subtracted.critic)
    gradients = torch.autograd.grad(loss.sum(), logits)[0].flatten(1)
    seen, possible = gradients.square().mean(0), tails.second_moment[:16]
    torch.testing.assert_close(possible, seen, rtol=0.05, atol=1e-6)
    assert bool((gradients.abs().amax(0) <= tails.reach[:16] + 1e-12).all())


def test_row_effect_moves_the_losses_and_nothing_else() -> None:
    flat, rows = draw_problem(SMALL), draw_problem(replace(SMALL, row_effect=2.0))
    assert torch.equal(flat.logits, rows.logits)
    assert flat.noise_seed == rows.noise_seed
    torch.testing.assert_close(flat.exact, rows.exact)
    shift = rows.losses - flat.losses
    torch.testing.assert_close(shift[:, 0], shift[:, 1])
    assert float(shift[:, 0].std()) > 0.5


def test_without_importance_weights_the_claim_needs_the_router_itself() -> None:
    plain = replace(SMALL, draws=20_000, importance=False)
    assert [outcome.claimed for outcome in results(SIX, plain).values()] == [True, True, False, False, False, False]
    hot = results(SIX, replace(plain, temperature=2.0))
    assert not any(outcome.claimed for outcome in hot.values())
    assert all(outcome.verdict == "biased" for outcome in hot.values())
    assert all(outcome.possible_weight is None for outcome in hot.values())


def test_problem_is_the_seeds_and_its_gradient_exact() -> None:
    problem, again = draw_problem(SMALL), draw_problem(SMALL)
    assert torch.equal(problem.exact, again.exact)
    assert problem.noise_seed == again.noise_seed != draw_problem(replace(SMALL, seed=1)).noise_seed
    router, experts = problem.exact.view(2, 8, 2)
    torch.testing.assert_close(router, exact_logit_gradient(problem.logits, problem.losses))
    torch.testing.assert_close(experts, problem.logits.softmax(-1) / 8)


def test_weights_and_drops_are_counted() -> None:
    found = results(SIX, replace(SMALL, draws=5000))
    assert (found["sample"].dropped, found["gm-iw"].dropped) == (0.0, 0.0)
    assert 0.05 < found["skip"].dropped < 0.3
    assert found["sample"].effective == pytest.approx(1.0)
    assert 0.0 < found["gm-iw"].effective < 0.9
    gm_iw = found["gm-iw"]
    assert gm_iw.possible_weight is not None
    assert gm_iw.possible_weight >= gm_iw.largest_weight > 2.0
    assert found["skip"].seconds > 0.0


def test_variance_is_that_of_the_estimates() -> None:
    # Independent rows at temperature 1: 1[z_i = j] / n has variance p (1 - p) / n^2.
    conditions = replace(SMALL, draws=50_000)
    p = draw_problem(conditions).logits.softmax(-1).flatten()
    seen = audit("sample", conditions).variance.view(2, -1)[1]
    torch.testing.assert_close(seen, p * (1 - p) / 64, rtol=0.05, atol=0.0)


def test_findings_are_in_units_of_the_gradient() -> None:
    found = audit("gm", SMALL).findings
    assert found["router"].bias_interval[0] < found["router"].bias < found["router"].bias_interval[1]
    assert 0.5 < found["router"].bias < 0.9  # far from nothing, at the default problem
    assert found["experts"].deviation < 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "n must be an integer >= 1, got 0"),
        ({"k": 1}, "k must be an integer >= 2, got 1"),
        ({"draws": 1}, "draws must be an integer >= 2, got 1"),
        ({"seed": -1}, "seed must be an integer from 0"),
        ({"capacity": 0}, "capacity must be an integer >= 1, got 0"),
        ({"temperature": -1.0}, "temperature must be finite and >= 0, got -1"),
        ({"temperature": float("nan")}, "temperature must be finite and >= 0, got nan"),
        ({"sharpness": float("inf")}, "sharpness must be finite"),
        ({"row_effect": -1.0}, "row_effect must be finite and >= 0, got -1.0"),
        ({"capacity_factor": 0.0}, "capacity_factor must be finite and > 0, got 0.0"),
        ({"capacity_factor": 1.5, "capacity": 4}, "capacity_factor must not be given beside capacity, got 1.5 and 4"),
    ],
)
def test_bad_run_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)  # pyright: ignore[reportArgumentType]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="baseline must be one of 'none', 'ema', .*, 'draws', got 'median'"):
        audit("sample", SMALL, baseline="median")
    with pytest.raises(ValueError, match="strategy must be one of|sample, skip-iw"):
        audit("best", SMALL)


def test_progress_is_told() -> None:
    told: list[int] = []
    audit("sample", replace(SMALL, draws=20_000), advance=told.append)
    assert sum(told) == 20_000
