# SPDX-License-Identifier: Apache-2.0
"""The studies that need no training: each against an oracle, and each the same for the same seed."""

import json
import math

import pytest
import torch

from equipoise.balancing import sinkhorn
from equipoise_lab.paper._studies import _marginals, _maximum_entropy, _overview, _solver_time


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# --- marginals -------------------------------------------------------------------------------------------------------


def test_gumbel_matching_marginals_at_two_rows_are_known(generator: torch.Generator) -> None:
    # The identity wins when a_00 + a_11 - a_01 - a_10 exceeds the sum of two logistic variables, whose distribution
    # function is (1 - (1 + x) e^-x) / (1 - e^-x)^2.
    logits = normal(generator, 5, 2, 2)
    x = logits[:, 0, 0] + logits[:, 1, 1] - logits[:, 0, 1] - logits[:, 1, 0]
    exact = (1.0 - (1.0 + x) * (-x).exp()) / (1.0 - (-x).exp()).square()
    mean, error, counting = _marginals.gumbel_matching_marginals(logits, 4000, generator)
    # Five problems at 5 standard errors: a false alarm in 3e-6 of all seeds.
    assert bool(((mean[:, 0, 0] - exact).abs() < 5.0 * error[:, 0, 0]).all())
    assert bool((error < counting).all())
    # Far from what Sinkhorn says, so the test can fail.
    wrong = sinkhorn(logits, tolerance=1e-9).log_p.exp()[:, 0, 0]
    assert bool(((mean[:, 0, 0] - wrong).abs() > 5.0 * error[:, 0, 0]).any())


def test_chunks_change_nothing_but_memory(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = normal(generator, 1, 4, 2)
    monkeypatch.setattr(_marginals, "_CHUNK", 7)
    mean, error, _ = _marginals.gumbel_matching_marginals(logits, 40, torch.Generator().manual_seed(1))
    torch.testing.assert_close(mean.sum(-1), torch.ones_like(mean[..., 0]))
    torch.testing.assert_close(mean.sum(-2), torch.full_like(mean[:, 0], 2.0), rtol=0, atol=6.0 * float(error.sum()))


def test_noise_is_taken_out_of_the_root_mean_square(generator: torch.Generator) -> None:
    exact = torch.full((40, 10, 10), 0.5, dtype=torch.float64)
    shifted = exact + 0.03 + 0.1 * normal(generator, 40, 10, 10)
    kinds = dict.fromkeys(("unbalanced", "sinkhorn", "gibbs"), exact)
    kinds |= {"gumbel_matching": shifted, "error": torch.full_like(exact, 0.1), "counting": exact}
    record = _marginals.differences(kinds)
    # 4,000 squares of mean 0.0109 and standard deviation 0.0155: the noise alone would give 0.1.
    assert record["sinkhorn_vs_gumbel_matching_rms"] == pytest.approx(0.03, abs=0.02)
    assert record["sinkhorn_vs_gibbs_rms"] == 0.0
    assert record["problems"] == 40


def test_marginals_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_marginals, "QUICK_SIZES", ((2, 2), (8, 2)))
    study = _marginals.run(quick=True, seed=3)
    assert json.loads(json.dumps(study, allow_nan=False)) == study
    assert study == _marginals.run(quick=True, seed=3)
    small, large = study["sizes"]
    for other in ("gumbel_matching", "gibbs"):
        assert large[f"sinkhorn_vs_{other}"] < small[f"sinkhorn_vs_{other}"]
        assert large[f"sinkhorn_vs_{other}"] < large[f"unbalanced_vs_{other}"]
    # The pooled mean is the mean of the spreads.
    rows = [row["sinkhorn_vs_gibbs"] for row in study["rows"] if row["n"] == 8]
    assert large["sinkhorn_vs_gibbs"] == pytest.approx(sum(rows) / len(rows))


# --- maximum entropy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(4, 2), (6, 3), (4, 4)])
def test_tau_of_flat_matrices_is_n_over_n_minus_1(generator: torch.Generator, n: int, k: int) -> None:
    log_p = sinkhorn(0.01 * normal(generator, n, k), tolerance=1e-13).log_p
    record, _ = _maximum_entropy.fit(log_p)
    assert record["tau"] == pytest.approx(n / (n - 1), rel=0.01)
    assert record["total_variation"] < 1e-3 * record["total_variation_tau_1"] + 1e-4


def test_shown_points_are_u_up_to_rows_and_columns(generator: torch.Generator) -> None:
    log_p = sinkhorn(2.0 * normal(generator, 4, 4), tolerance=1e-13).log_p
    record, points = _maximum_entropy.fit(log_p)
    residual = (points[:, 1] / points[:, 0]).log().reshape(4, 4)
    torch.testing.assert_close(residual.mean(0), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(residual.mean(1), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-9)
    assert float(residual.abs().amax()) == pytest.approx(record["max_residual"], rel=1e-6)
    # Not a fit that anything passes: at this spread the power law is only approximate.
    assert 0.5 < record["r_squared"] < 0.9999


def test_maximum_entropy_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_maximum_entropy, "QUICK_SIZES", ((4, 2), (4, 4)))
    monkeypatch.setattr(_maximum_entropy, "SHARPNESS", (0.5, 2.0))
    study = _maximum_entropy.run(quick=True)
    assert json.loads(json.dumps(study, allow_nan=False)) == study
    assert len(study["problems"]) == 2 * 2 * 2
    assert len(study["median"]) == 2 * 2
    assert [point["n"] for point in study["points"]] == [4] * 2  # (4, 4) is shown, once for each spread
    assert study["median"][0]["expected_tau"] == pytest.approx(4 / 3)


# --- solver time -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time."""
    monkeypatch.setattr(_solver_time, "QUICK_ROWS", (8, 16, 48))
    monkeypatch.setattr(_solver_time, "SQUARE", (4,))


@pytest.mark.usefixtures("small")
def test_solvers_agree_and_improvements_are_counted() -> None:
    study = _solver_time.run(quick=True)
    assert json.loads(json.dumps(study, allow_nan=False)) == study
    assert [(size["n"], size["k"]) for size in study["sizes"][:2]] == [(4, 4), (8, 2)]
    for size in study["sizes"]:
        assert size["agree"]
        assert size["cycle_cancelling_ms"] > 0.0
        assert size["hungarian_ms"] > 0.0
        assert size["primal_dual_ms"] > 0.0
        assert size["improvements"] >= 0.0
        assert size["improvements_batched"] >= 0.0


@pytest.mark.usefixtures("small")
def test_solver_time_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_solver_time, "_has_scipy", lambda: False)
    study = _solver_time.run(quick=True)
    assert not study["scipy"]
    assert "left out: scipy is not installed" in study["note"]
    assert all(size["hungarian_ms"] is None for size in study["sizes"])


@pytest.mark.usefixtures("small")
def test_hungarian_calls_over_budget_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_solver_time, "_BUDGET_SECONDS", 0.0)
    sizes = [size for size in _solver_time.run(quick=True)["sizes"] if size["k"] == 2]
    assert [size["hungarian_over_budget"] for size in sizes] == [False, True, True]
    assert [size["hungarian_ms"] is None for size in sizes] == [False, True, True]


# --- overview --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_overview_shows_what_it_says(seed: int) -> None:
    study = _overview.run(seed=seed)
    assert study == _overview.run(seed=seed)
    for name in ("router", "sinkhorn"):
        assert all(math.isclose(sum(row), 1.0, abs_tol=1e-9) for row in study[name])
    assert [round(sum(column), 6) for column in zip(*study["sinkhorn"], strict=True)] == [4.0] * 3
    assert [study["balanced"].count(expert) for expert in range(3)] == [4] * 3
    assert study["skip"] == study["independent"]
    for expert in range(3):
        rows = [kept for kept, z in zip(study["kept"], study["skip"], strict=True) if z == expert]
        assert sum(rows) == min(len(rows), 4)
    best = [max(range(3), key=row.__getitem__) for row in study["router"]]
    assert best == sorted(best)
