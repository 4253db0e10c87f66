# SPDX-License-Identifier: Apache-2.0
"""The smoothed dual over all experts of a row, against NumPy; the Newton step on it; what it is good for."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import equipoise as eq
from equipoise.assignment import _primal_dual
from equipoise.assignment._kernels import _descent, _smoothing, _solve
from support.families import draw_scores

Floats = NDArray[np.float64]


def shares(scores: Floats, prices: Floats, mu: float) -> Floats:
    offers = scores - prices
    weights = np.exp((offers - offers.max(1, keepdims=True)) / mu)
    return weights / weights.sum(1, keepdims=True)


def draw(n: int, k: int, dtype: str) -> tuple[Floats, Floats]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(n, k)).astype(dtype), generator.uniform(0.0, 0.5, k)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mu", [0.05, 1.0])
def test_demand_and_curvature(mu: float, dtype: str) -> None:
    scores, prices = draw(200, 6, dtype)
    mask = np.arange(200) % 7 != 0
    demand, curvature = np.zeros(6), np.zeros((6, 6))
    _descent.dense_demand(scores, mask, 1, prices, mu, demand, curvature)
    _smoothing.laplacian(curvature)
    p = shares(scores[mask].astype(np.float64), prices, mu)
    np.testing.assert_allclose(demand, p.sum(0), rtol=0.02)  # as exact as the exponential
    # Shares below a thousandth are left out of the curvature.
    np.testing.assert_allclose(curvature, np.diag(p.sum(0)) - p.T @ p, atol=5e-3 * len(p))
    np.testing.assert_allclose(curvature.sum(0), 0.0, atol=1e-6 * len(p))


def chain(k: int, weight: float) -> Floats:
    """The Laplacian of experts that each share rows with the next one only."""
    links = np.diag(np.full(k - 1, weight), 1)
    links += links.T
    return np.diag(links.sum(0)) - links


def test_a_short_step_is_newtons() -> None:
    hessian, target = chain(5, 40.0), np.full(5, 100.0)
    demand = target + np.array([3.0, -1.0, 2.0, -5.0, 1.0])
    prices = np.full(5, 7.0)
    _smoothing.newton_step(prices, demand, target, hessian, 0.1, 0.2, False)
    np.testing.assert_allclose(hessian @ prices, 0.1 * (demand - target), atol=1e-3)
    assert prices.min() == 0.0


def test_differences_are_limited_and_not_prices() -> None:
    """Along a chain each link may change by the limit, so that its ends move by many times that."""
    k, mu, limit = 16, 0.01, 0.02
    demand, target = np.full(k, 100.0), np.full(k, 100.0)
    demand[:2] += 500.0
    demand[-2:] -= 500.0
    prices = np.full(k, 7.0)
    longest = _smoothing.newton_step(prices, demand, target, chain(k, 10.0), mu, limit, False)
    links = -np.diff(prices)
    assert longest > 20 * limit
    assert links.max() <= 2 * limit + 1e-9
    assert prices[0] - prices[-1] > 10 * limit
    assert (links > 0).all()


def test_groups_that_share_no_row_move_little_against_each_other() -> None:
    hessian = np.kron(np.eye(2), np.array([[20.0, -20.0], [-20.0, 20.0]]))
    target = np.full(4, 10.0)
    demand = target + np.array([3.0, 1.0, -3.0, -1.0])
    prices = np.full(4, 5.0)
    _smoothing.newton_step(prices, demand, target, hessian, 0.01, 0.02, False)
    assert prices[0] > prices[1] > prices[3] > prices[2] == 0.0
    assert prices.max() < 0.05


def test_prices_stop_at_zero_and_the_others_know() -> None:
    """Newton's step is -0.0375 and 0.0375. The first stops at 0, so the second has to make the difference."""
    hessian = np.array([[8.0, -8.0], [-8.0, 8.0]])
    prices, target = np.array([0.02, 1.0]), np.full(2, 10.0)
    demand = target + np.array([-6.0, 6.0])
    _smoothing.newton_step(prices, demand, target, hessian, 0.1, 10.0, True)
    assert prices[0] == 0.0
    assert prices[1] == pytest.approx(1.0 + 0.075 - 0.02, abs=1e-4)


@pytest.mark.parametrize("seed", range(20))
def test_a_bounded_step_is_optimal(seed: int) -> None:
    """Prices end above 0 where nothing would be gained by moving, or at 0 where only a fall would gain."""
    k = 24
    rng = np.random.default_rng(seed)
    links = np.triu(rng.exponential(size=(k, k)) * (rng.random((k, k)) < 0.3), 1)
    links += links.T
    matrix = np.diag(links.sum(0) + 0.1) - links
    right, prices = rng.normal(size=k), np.maximum(rng.normal(size=k), 0.0)
    prices[5] = np.inf
    matrix[5], matrix[:, 5], matrix[5, 5], right[5] = 0.0, 0.0, 1.0, 0.0
    free = (prices > 0) & (prices < np.inf)
    system = _smoothing.system_of_free(matrix, free)
    first = _smoothing.conjugate_gradients(system, np.where(free, right, 0.0))
    step = _smoothing.bounded_step(matrix, right, prices, free, first)
    gain, end = right - matrix @ step, prices + step
    assert step[5] == 0.0
    assert end.min() >= -1e-12
    np.testing.assert_allclose(gain[end > 1e-12], 0.0, atol=2e-3)
    assert np.all(gain[end <= 1e-12] < 2e-3)


@pytest.mark.parametrize("seed", range(4))
def test_newtons_steps_with_slack_forget_prices_that_were_noise(seed: int) -> None:
    n, k, mu = 4096, 32, 0.02
    scores = draw_scores("gumbel", n, k, seed).numpy()
    target, mask = np.full(k, 1.02 * n / k), np.ones(n, np.bool_)
    prices = np.maximum(0.1 * np.random.default_rng(seed).normal(size=k), 0.0)
    missed = list[float]()
    for _ in range(8):
        demand, hessian = np.zeros(k), np.zeros((k, k))
        _descent.dense_demand(scores, mask, 1, prices, mu, demand, hessian)
        missed.append(_smoothing.imbalance(demand, target, prices, True))
        _smoothing.laplacian(hessian)
        _smoothing.newton_step(prices, demand, target, hessian, mu, 4 * mu, True)
    assert missed[0] > 100
    assert missed[-1] < 2


@pytest.mark.parametrize("family", ["rank-1", "rank-2", "clustered", "favourite"])
@pytest.mark.parametrize("slack", [False, True])
def test_the_descent_meets_demand(family: str, slack: bool) -> None:
    n, k = 4096, 16
    scores = draw_scores(family, n, k, 0).numpy()
    mask, prices = np.ones(n, np.bool_), np.zeros(k)
    target = np.full(k, (1.25 if slack else 1.0) * n / k)
    spread = _smoothing.mean_spread(scores, mask, 64, prices)
    mu = _descent.follow(scores, mask, 16, target, slack, prices, spread / 4, 1e-5 * spread)
    radius, _ = _descent.all_prices(scores, mask, 16, target, slack, prices, mu, 1e-5 * spread)
    demand = shares(scores.astype(np.float64), prices, radius / _descent.LIST_REACH).sum(0)
    assert _smoothing.imbalance(demand, target, prices, slack) < n / 32
    assert prices.min() >= 0.0


@pytest.mark.parametrize("slack", [False, True])
@pytest.mark.parametrize("family", ["clustered", "identical", "rank-1", "rank-2", "duplicates", "binary"])
def test_what_samples_do_not_tell_is_solved_from_all_rows(
    family: str, slack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With masks and forbidden pairs, on sizes that are solved in one kernel and in blocks; proven by the gap."""
    for seed in range(3):
        scores = draw_scores(family, 2048, 16, seed)
        scores[torch.rand(2048, 16, generator=torch.Generator().manual_seed(seed)) < 0.1] = -torch.inf
        scores[torch.arange(2048), torch.arange(2048) % 16] = 0.5
        mask = torch.arange(2048) % 11 != 0
        capacity = 160 if slack else None
        values = []
        for block in (8192, 512):
            monkeypatch.setattr(_primal_dual, "BLOCK_ROWS", block)
            a = eq.assign(scores, capacity, mask=mask)
            assert a.gap <= 1e-9 * max(abs(float(a.value)), 4.0)
            assert (a.counts <= a.capacity).all()
            values.append(float(a.value))
        assert values[0] == pytest.approx(values[1], rel=1e-9)


def test_an_illegal_score_among_ties_is_named() -> None:
    scores = draw_scores("identical", 16384, 64, 0)
    scores[12345, 3] = float("nan")
    with pytest.raises(ValueError, match="12345"):
        eq.assign(scores)


@pytest.mark.parametrize("seed", range(12))
def test_rows_that_are_alike_end_without_a_favourite(seed: int) -> None:
    """Where one expert is ahead for all rows, a step as long as it may be must not be believed unseen."""
    n, k = 4096, 64
    scores = draw_scores("identical", n, k, seed).numpy()
    prices = np.zeros(k)
    mu, spread = _solve.first_prices(scores, np.ones(n, np.bool_), np.full(k, n / k), False, prices)
    assert mu == pytest.approx(_solve.LEAST_MU * spread)
    offers = np.sort(scores[0] - prices)
    assert offers[-1] - offers[-2] < 4 * mu
