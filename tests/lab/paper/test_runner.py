# SPDX-License-Identifier: Apache-2.0
"""Running in parts: what is done stays done, whatever interrupts it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from equipoise_lab.paper import Paper, _runner, read_results
from equipoise_lab.paper._runner import load_unit, run_units
from equipoise_lab.paper._sensitivity import _panels, alternatives, run_sensitivity

TINY = Paper(
    methods=("sample", "gm"),
    losses=("reinforce",),
    variants=("plain", "sinkhorn"),
    temperatures=(1.0, 10.0),
    seeds=2,
    panel_seeds=2,
    baselines=("ema",),
    steps=6,
    sweeps=(),
)


def test_processes_give_what_one_process_gives(tmp_path: Path) -> None:
    small = replace(TINY, variants=("plain",))
    seen: list[int] = []
    several = run_units(small, tmp_path / "several", workers=2, progress=seen.append)
    assert several == run_units(small, tmp_path / "one", workers=0)
    assert [(r.loss, r.method, r.temperature, r.seed) for r in several] == [
        (r.loss, r.method, r.temperature, r.seed) for r in small.runs()
    ]
    assert sum(seen) == 2 * 6


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []
    train = _runner.train

    def interrupted(runs, recipe, **how):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(runs[0].unit)
        return train(runs, recipe, **how)

    monkeypatch.setattr(_runner, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_units(TINY, tmp_path, workers=0)
    # Two units of four runs are safe.
    assert len(read_results(tmp_path / "results.csv")) == 8
    monkeypatch.setattr(
        _runner, "train", lambda runs, recipe, **how: trained.append("more") or train(runs, recipe, **how)
    )
    results = run_units(TINY, tmp_path, workers=0)
    assert trained[2:] == ["more", "more"]
    assert results == run_units(TINY, tmp_path / "anew", workers=0) == read_results(tmp_path / "results.csv")


def test_what_another_recipe_left_is_not_used(tmp_path: Path) -> None:
    run_units(TINY, tmp_path, workers=0)
    assert load_unit(tmp_path, "direct-gm", TINY) is not None
    assert load_unit(tmp_path, "direct-gm", replace(TINY, noise_sd=0.2)) is None
    assert load_unit(tmp_path, "direct-gm", replace(TINY, panel_seeds=1)) is None
    # How errors are read does not change the models.
    assert load_unit(tmp_path, "direct-gm", replace(TINY, measure="expected")) is not None


def test_sensitivity_has_a_row_for_every_alternative(tmp_path: Path) -> None:
    recipe = replace(TINY, methods=("sample",), losses=("reinforce", "gating"), steps=3, seeds=1, panel_seeds=1)
    results = run_units(recipe, tmp_path, workers=0)
    found = run_sensitivity(recipe, results, {}, tmp_path, workers=0, advance=lambda _: None)
    changed = [(row["field"], row["value"]) for row in found["rows"]]
    assert changed == [(None, None), *((f, str(v)) for f, v in alternatives(recipe))]
    assert json.loads((tmp_path / "sensitivity" / "sensitivity.json").read_text()) == found
    assert [row["minority"] for row in found["rows"]][:3] == [None, pytest.approx(0.31), None]
    assert all(set(row["without"]) == {"1", "2", "3"} for row in found["rows"])
    assert all(set(row["verdicts"]) == {"1", "2", "3", "5", "6", "7", "8", "9"} for row in found["rows"])


def test_another_measure_needs_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(TINY, threshold=0.5)
    results = run_units(recipe, tmp_path, workers=0)
    monkeypatch.setattr(_runner, "train", None)
    monkeypatch.setattr("equipoise_lab.paper._sensitivity.alternatives", lambda _: [("measure", "expected")])
    found = run_sensitivity(recipe, results, {}, tmp_path, workers=0, advance=lambda _: None)
    expected = sum(r.mse_expected < 0.5 for r in results) / len(results)
    assert found["rows"][0]["solved"] == pytest.approx(sum(r.mse < 0.5 for r in results) / len(results))
    assert found["rows"][1]["solved"] == pytest.approx(expected)


def test_sensitivity_trains_the_sweep_that_a_claim_about_the_panels_needs() -> None:
    """Without it, claim 6 (what gating needs) could be judged under no reading of the paper but the default."""
    recipe = Paper(seeds=1, panel_seeds=1, steps=2)
    trained = sum(len(runs) for runs in _panels(recipe).units().values())
    weights = {run.balance_weight for run in _panels(recipe).runs() if run.loss == "gating"}
    assert trained == 7 * 72 + 6 * 4 * 4  # six methods, four more weights, four temperatures
    assert weights == {0.0, 0.003, 0.01, 0.03, 0.1}
    assert {run.balance_weight for run in _panels(recipe).runs() if run.loss == "reinforce"} == {0.0}
