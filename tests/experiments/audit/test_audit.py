# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch

from equipoise.estimators import STRATEGIES
from equipoise.experiments.audit import (
    Audit,
    Outcome,
    audit_table,
    draw_problem,
    findings,
    judge_outcome,
    measure,
    prepare,
    save_figure,
    verdict_text,
    write_figures,
)
from equipoise.reference import exact_logit_gradient

SMALL = Audit(draws=60_000)


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


def outcomes(audit: Audit) -> dict[str, Outcome]:
    problem = draw_problem(audit)
    return {strategy.name: measure(strategy, audit, problem) for strategy in prepare(audit, problem)}


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
    found = outcomes(replace(SMALL, baseline="leave-one-out", strategies=("sample", "skip-iw", "gm-iw")))
    audit = replace(SMALL, baseline="leave-one-out")
    texts = [verdict_text(audit, judge_outcome(outcome)) for outcome in found.values()]
    assert texts == ["unbiased (leave-one-out)", "biased (leave-one-out)", "biased (leave-one-out)"]
    assert [outcome.claimed for outcome in found.values()] == [True, False, False]


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
    found = [measure(strategy, audit, problem) for strategy in prepare(audit, problem)]
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
    assert audit_table(audit, found).row_count == 3


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
        ({"strategies": ()}, "strategies must name at least one"),
    ],
)
def test_bad_run_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)  # pyright: ignore[reportArgumentType]


def test_unknown_baseline_is_refused() -> None:
    audit = object.__new__(Audit)  # the tests' type checker would refuse it in the constructor
    for name, value in {**asdict(SMALL), "baseline": "median"}.items():
        object.__setattr__(audit, name, value)
    with pytest.raises(ValueError, match="baseline must be one of 'none', 'leave-one-out', got 'median'"):
        audit.__post_init__()
