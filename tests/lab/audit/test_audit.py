# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equipoise.audit import AuditResult
from equipoise.estimators import PAPER_STRATEGIES, STRATEGIES, WeightedSampler
from equipoise_lab.audit import (
    BASELINES,
    Audit,
    audit_table,
    measure,
    prepare,
    save_figures,
    verdict_text,
    write_figures,
)

SMALL = Audit(strategies=tuple(PAPER_STRATEGIES), draws=60_000, row_effect=0.0)


def outcomes(run: Audit, baseline: str = "none") -> dict[str, AuditResult]:
    return {name: measure(strategy, run, baseline=baseline) for name, strategy in prepare(run).items()}


def test_residual_baseline_is_unbiased_and_better_than_a_moving_average() -> None:
    run = Audit(draws=32_000, strategies=("gm-iw-mix",))
    found = {baseline: outcomes(run, baseline)["gm-iw-mix"] for baseline in ("ema", "residual")}
    assert found["residual"].name == "gm-iw-mix + residual"
    assert found["residual"].claimed
    assert verdict_text(found["residual"]) != "biased"
    deviation = {name: outcome.findings["router"].deviation for name, outcome in found.items()}
    assert deviation["residual"] < 0.75 * deviation["ema"]


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
    strategy = prepare(replace(audit, eps=0.05, solves=3))["gm-iw-avg-mix"]
    assert isinstance(strategy, WeightedSampler)
    assert (strategy.eps, strategy.solves) == (0.05, 3)


def test_figures_of_a_strategy_do_not_depend_on_its_company() -> None:
    audit = replace(SMALL, draws=1000)
    alone = outcomes(replace(audit, strategies=("skip",)))["skip"]
    assert torch.equal(alone.evidence.mean, outcomes(audit)["skip"].evidence.mean)


def test_files_hold_everything(tmp_path: Path) -> None:
    audit = replace(SMALL, draws=4000, n=5, k=3, strategies=("sample", "skip", "gm-sh"))
    found = [measure(strategy, audit) for strategy in prepare(audit).values()]
    found.append(measure(STRATEGIES["sample"], audit, baseline="draws"))
    stored = json.loads(write_figures(audit, found, tmp_path / "new").read_text())
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
        assert {"verdict", "z", "z_limit", "more_estimates", "effective_sample_size", "largest_weight"} <= set(entry)
    paths = save_figures(audit, found, tmp_path)
    assert [path.name for path in paths] == ["audit.svg", "audit.png", "audit-cost.svg", "audit-cost.png"]
    assert all(path.stat().st_size > 0 for path in paths)
    assert "gm-sh" in paths[0].read_text()
    assert "sample + draws" not in paths[0].read_text()
    assert all(name in paths[2].read_text() for name in ("gm-sh", "sample + draws"))
    assert audit_table(audit, found).row_count == 4
    assert [entry["baseline"] for entry in stored["strategies"]] == ["none"] * 3 + ["draws"]
    assert [entry["estimates"] for entry in stored["strategies"]] == [4000, 4000, 4000, 1000]
    assert stored["strategies"][3]["seconds_per_estimate"] > stored["strategies"][3]["seconds_per_draw"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "n must be an integer >= 1, got 0"),
        ({"solves": 0}, "solves must be an integer >= 1, got 0"),
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
        prepare(audit)
