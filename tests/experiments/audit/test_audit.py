# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from equipoise.estimators import PAPER_STRATEGIES, STRATEGIES, Combination, reinforce
from equipoise.experiments.audit import (
    BASELINES,
    DRAWS,
    Audit,
    Baseline,
    Outcome,
    audit_table,
    draw_problem,
    findings,
    judge_outcome,
    measure,
    prepare,
    save_cost_figure,
    save_figure,
    verdict_text,
    write_figures,
)
from equipoise.experiments.audit import _draws as draws_module
from equipoise.experiments.audit._draws import draw_batch
from equipoise.experiments.audit._tails import Subtracted, possible_tails
from equipoise.reference import exact_logit_gradient

SIX = tuple(PAPER_STRATEGIES)
SMALL = Audit(strategies=SIX, draws=60_000, row_effect=0.0)


@dataclass(frozen=True)
class Inflated:
    """A strategy whose weights are all a little too large, and who says they are right."""

    name: str
    factor: float = 1.02
    label: str = "Inflated"
    unbiased: bool = True

    @property
    def balanced(self) -> bool:
        return STRATEGIES[self.name].balanced

    def draw_noise(self, shape, **where):
        return STRATEGIES[self.name].draw_noise(shape, **where)

    def draw(self, log_p, noise, **how):
        s, weight = STRATEGIES[self.name].draw(log_p, noise, **how)
        return s, self.factor * weight


def outcomes(audit: Audit, baseline: Baseline = "none") -> dict[str, Outcome]:
    problem = draw_problem(audit)
    strategies = prepare(audit, problem)
    return {name: measure(strategy, audit, problem, baseline=baseline) for name, strategy in strategies.items()}


def verdicts(audit: Audit) -> dict[str, str]:
    return {name: judge_outcome(outcome).verdict for name, outcome in outcomes(audit).items()}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_verdicts_on_the_six(seed: int) -> None:
    found = verdicts(replace(SMALL, seed=seed))
    assert [found[name] for name in ("sample", "skip-iw", "skip", "gm")] == ["unbiased", "unbiased", "biased", "biased"]
    assert found["gm-iw"] in ("unbiased", "undecided")
    assert found["gm-sh"] in ("biased", "undecided")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_default_draws_decide_on_gumbel_matching(seed: int) -> None:
    audit = replace(SMALL, seed=seed, strategies=("gm-iw",))
    judgement = judge_outcome(outcomes(audit)["gm-iw"])
    assert judgement.verdict != "biased"
    assert judgement.more_draws is not None
    assert judgement.more_draws + audit.draws < Audit().draws


@pytest.mark.parametrize("sharpness", [0.3, 3.0, 8.0])
def test_no_false_alarm_whatever_the_weights(sharpness: float) -> None:
    found = outcomes(replace(SMALL, draws=30_000, sharpness=sharpness, strategies=("sample", "skip-iw", "gm-iw")))
    assert all(judge_outcome(outcome).verdict != "biased" for outcome in found.values())


@pytest.mark.parametrize("name", ["sample", "skip-iw", "gm-iw"])
def test_two_percent_too_much_weight_is_found(name: str) -> None:
    problem = draw_problem(SMALL)
    assert judge_outcome(measure(Inflated(name), SMALL, problem)).verdict == "biased"
    assert judge_outcome(measure(Inflated(name, 1.0), SMALL, problem)).verdict != "biased"


def test_leave_one_out_baseline_is_biased_where_rows_compete() -> None:
    found = outcomes(replace(SMALL, strategies=("sample", "skip-iw", "gm-iw")), "leave-one-out")
    texts = [f"{outcome.name}: {verdict_text(outcome)}" for outcome in found.values()]
    verdicts = ("unbiased", "biased", "biased")
    assert texts == [f"{name} + leave-one-out: {verdict}" for name, verdict in zip(found, verdicts, strict=True)]
    assert [outcome.claimed for outcome in found.values()] == [True, False, False]


NEW = ("skip-iw-mix", "gm-iw-mix", "gm-iw-avg", "gm-iw-avg-mix")


@pytest.mark.parametrize("how", [{}, {"capacity_factor": 1.25}, {"temperature": 0.7}, {"n": 7, "k": 3}])
def test_what_came_after_the_paper_is_unbiased(how: dict[str, object]) -> None:
    for outcome in outcomes(replace(SMALL, draws=30_000, strategies=NEW, **how)).values():  # pyright: ignore[reportArgumentType]
        judgement = judge_outcome(outcome)
        assert judgement.verdict != "biased"
        assert judgement.detectable < 0.6  # a bias of this size would have been found
        assert outcome.claimed


@pytest.mark.parametrize("name", ["sample", "skip-iw", "gm-iw-mix"])
def test_baselines_are_unbiased_and_those_that_see_rows_reduce_the_variance(name: str) -> None:
    audit = Audit(draws=32_000, strategies=(name,))
    deviation = {}
    for baseline in BASELINES:
        if baseline == "leave-one-out":
            continue
        outcome = outcomes(audit, baseline)[name]
        assert outcome.claimed
        assert judge_outcome(outcome).verdict != "biased"
        deviation[baseline] = findings(outcome)["router"].deviation
        if baseline == "draws":
            deviation[baseline] *= DRAWS**0.5  # of one draw
            assert outcome.evidence.draws * DRAWS == outcome.draws == 32_000
    # Half of the losses' variance is the rows', and their mean is 1. Features and residuals show them through noise.
    assert deviation["ema"] < 0.9 * deviation["none"]
    assert deviation["expert-mean"] < 0.9 * deviation["none"]
    assert deviation["residual"] < 0.75 * deviation["ema"]
    assert deviation["critic"] < 0.9 * deviation["residual"]
    assert deviation["draws"] < 0.75 * deviation["ema"]


@dataclass
class Forgetful:
    """A critic whose expectation is not added back."""

    draws: int = 1
    learns: bool = False

    def read(self, s, losses, weight):
        return s.at_z(torch.arange(s.log_q.shape[-1]).double().expand(s.log_q.shape)), None

    def update(self, s, losses) -> None: ...


@pytest.mark.parametrize("name", ["sample", "skip-iw", "gm-iw"])
def test_critic_without_its_expectation_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_module, "make_control", lambda baseline, problem: Forgetful())
    outcome = outcomes(replace(SMALL, strategies=(name,)), "critic")[name]
    assert judge_outcome(outcome).verdict == "biased"


def test_tails_of_a_critic_are_those_of_the_estimates() -> None:
    # Where weights are 1 every draw is as likely as it looks, so what was possible is what was seen.
    audit = Audit(draws=40_000, strategies=("sample",))
    problem = draw_problem(audit)
    strategy = prepare(audit, problem)["sample"]
    s, weight = draw_batch(strategy, audit, problem, [audit.draws], torch.Generator().manual_seed(1))
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


def test_cases_by_default_and_by_choice() -> None:
    audit = Audit(draws=1000)
    cases = audit.cases()
    assert cases[: len(STRATEGIES)] == [(name, "none", 1000) for name in STRATEGIES]
    others = [b for b in BASELINES if b != "none"]
    assert cases[len(STRATEGIES) :] == [(s, b, 500) for s in ("sample", "skip-iw", "gm-iw-mix") for b in others]
    assert Audit(strategies=("gm", "gm", "gm-sh"), draws=9).cases() == [("gm", "none", 9), ("gm-sh", "none", 9)]
    chosen = Audit(strategies=("gm", "sample"), baselines=("critic", "none"), draws=9)
    assert chosen.cases() == [(s, b, 9) for b in ("none", "critic") for s in ("gm", "sample")]


def test_slack_and_options_reach_the_strategies() -> None:
    assert (Audit().slots, Audit(capacity_factor=1.25).slots, Audit(n=7, k=3).slots, Audit(capacity=6).slots) == (
        4,
        5,
        3,
        6,
    )
    audit = replace(SMALL, draws=5000, strategies=("gm-iw", "gm-iw-avg-mix"))
    slack = replace(audit, capacity_factor=1.5)
    assert all(outcomes(slack)[name].effective > found.effective + 0.03 for name, found in outcomes(audit).items())
    strategy = prepare(replace(audit, eps=0.05, solves=3), draw_problem(audit))["gm-iw-avg-mix"]
    assert isinstance(strategy, Combination)
    assert (strategy.eps, strategy.draws) == (0.05, 3)


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
    assert [outcome.claimed for outcome in outcomes(plain).values()] == [True, True, False, False, False, False]
    hot = outcomes(replace(plain, temperature=2.0))
    assert not any(outcome.claimed for outcome in hot.values())
    assert all(judge_outcome(outcome).verdict == "biased" for outcome in hot.values())
    assert all(outcome.possible_weight is None for outcome in hot.values())


def test_problem_is_the_seeds_and_its_gradient_exact() -> None:
    problem, again = draw_problem(SMALL), draw_problem(SMALL)
    assert torch.equal(problem.exact, again.exact)
    assert problem.noise_seed == again.noise_seed != draw_problem(replace(SMALL, seed=1)).noise_seed
    router, experts = problem.exact.view(2, 8, 2)
    torch.testing.assert_close(router, exact_logit_gradient(problem.logits, problem.losses))
    torch.testing.assert_close(experts, problem.logits.softmax(-1) / 8)


def test_figures_of_a_strategy_do_not_depend_on_its_company() -> None:
    audit = replace(SMALL, draws=1000)
    alone = outcomes(replace(audit, strategies=("skip",)))["skip"]
    assert torch.equal(alone.evidence.mean, outcomes(audit)["skip"].evidence.mean)


def test_weights_and_drops_are_counted() -> None:
    found = outcomes(replace(SMALL, draws=5000))
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
    audit = replace(SMALL, draws=50_000, strategies=("sample",))
    p = draw_problem(audit).logits.softmax(-1).flatten()
    seen = outcomes(audit)["sample"].evidence.variance.view(2, -1)[1]
    torch.testing.assert_close(seen, p * (1 - p) / 64, rtol=0.05, atol=0.0)


def test_files_hold_everything(tmp_path: Path) -> None:
    audit = replace(SMALL, draws=4000, n=5, k=3, strategies=("sample", "skip", "gm-sh"))
    problem = draw_problem(audit)
    found = [measure(strategy, audit, problem) for strategy in prepare(audit, problem).values()]
    found.append(measure(STRATEGIES["sample"], audit, problem, baseline="draws"))
    stored = json.loads(write_figures(audit, problem, found, tmp_path / "new").read_text())
    assert stored["test"] == {
        "components": 30,
        "false_alarm": 1e-6,
        "power": 0.99,
        "tolerance": 0.1,
        "confidence": 0.95,
    }
    assert torch.tensor(stored["exact"]["router"]).shape == (5, 3)
    for entry in stored["strategies"]:
        for group in ("router", "experts"):
            assert torch.tensor(entry[group]["mean"]).shape == (5, 3)
            assert torch.tensor(entry[group]["half_width"]).gt(0).all()
            low, high = entry[group]["bias_interval"]
            assert 0 <= low <= high
        assert {"verdict", "z", "z_limit", "more_draws", "effective_sample_size", "largest_weight"} <= set(entry)
    paths = save_figure(audit, found, tmp_path)
    assert [path.name for path in paths] == ["audit.svg", "audit.png"]
    assert all(path.stat().st_size > 0 for path in paths)
    assert "gm-sh" in paths[0].read_text()
    assert "sample + draws" not in paths[0].read_text()
    paths = save_cost_figure(audit, found, tmp_path)
    assert [path.name for path in paths] == ["audit-cost.svg", "audit-cost.png"]
    assert all(name in paths[0].read_text() for name in ("gm-sh", "sample + draws"))
    assert audit_table(audit, found).row_count == 4
    assert [entry["baseline"] for entry in stored["strategies"]] == ["none"] * 3 + ["draws"]
    assert [entry["estimates"] for entry in stored["strategies"]] == [4000, 4000, 4000, 1000]
    assert stored["strategies"][3]["seconds_per_estimate"] > stored["strategies"][3]["seconds_per_draw"]


def test_findings_are_in_units_of_the_gradient() -> None:
    audit = replace(SMALL, strategies=("gm",))
    found = findings(outcomes(audit)["gm"])
    assert found["router"].bias_interval[0] < found["router"].bias < found["router"].bias_interval[1]
    assert 0.5 < found["router"].bias < 0.9  # far from nothing, at the default problem
    assert found["experts"].deviation < 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"k": 1}, "k must be at least 2, got 1"),
        ({"draws": 1}, "draws must be at least 2, got 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"capacity": 0}, "capacity must be an integer >= 1, got 0"),
        ({"temperature": -1.0}, "temperature must be finite and >= 0, got -1"),
        ({"temperature": float("nan")}, "temperature must be finite and >= 0, got nan"),
        ({"sharpness": float("inf")}, "sharpness must be finite"),
        ({"row_effect": -1.0}, "row_effect must be finite and >= 0, got -1.0"),
        ({"capacity_factor": 0.0}, "capacity_factor must be finite and > 0, got 0.0"),
        ({"capacity_factor": 1.5, "capacity": 4}, "capacity_factor must not be given beside capacity, got 1.5 and 4"),
        ({"strategies": ()}, "strategies must name at least one"),
        ({"baselines": ()}, "baselines must name at least one"),
        ({"baselines": ("median",)}, "baseline must be one of 'none', 'ema', .*, 'draws', got 'median'"),
    ],
)
def test_bad_run_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("option", [{"eps": 0.1}, {"solves": 2}])
def test_option_that_no_strategy_has_is_refused(option: dict[str, object]) -> None:
    audit = replace(SMALL, strategies=("sample",), **option)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=rf"{next(iter(option))} must be left out where no strategy (mixes|averages)"):
        prepare(audit, draw_problem(audit))
