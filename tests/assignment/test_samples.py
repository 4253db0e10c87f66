# SPDX-License-Identifier: Apache-2.0
"""What samples of the rows say about prices: whether to believe it, how far it may be off, that it saves passes."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.assignment import _primal_dual
from equipoise.assignment._kernels import _descent, _samples, _solve
from support.families import draw_scores


def test_rows_agree_with_the_right_prices_and_with_no_others() -> None:
    n, k, stride = 4096, 32, 4
    target, mask = np.full(k, n / k), np.ones(n, np.bool_)
    wrong = np.where(np.arange(k) < k // 2, 0.8, 0.0)  # off by twice what 1,024 rows can tell
    agreed = Counter[str]()
    for seed in range(20):
        scores = draw_scores("gumbel", n, k, seed).numpy()
        agreed["right"] += _samples.agrees(scores, mask, stride, target, False, np.zeros(k), False)
        agreed["wrong"] += _samples.agrees(scores, mask, stride, target, False, wrong, False)
    assert agreed["right"] >= 19
    assert agreed["wrong"] == 0


def test_chance_is_that_of_the_rows_that_are_there() -> None:
    """Padding in most places: what would be chance among all rows is not among few."""
    n, k, stride = 16384, 16, 4
    scores = draw_scores("gumbel", n, k, 0).numpy()
    mask, prices = np.arange(n) < n // 16, np.where(np.arange(k) < k // 2, 0.5, 0.0)
    target = np.full(k, n / 16 / k)
    counts = np.bincount((scores - prices)[stride // 2 : n // 16 : stride].argmax(1), minlength=k)
    missed = np.maximum(counts - counts.sum() / k, 0).sum()
    assert 0.7 * np.sqrt(k * counts.sum()) < missed < 0.5 * np.sqrt(k * n / stride)
    assert not _samples.agrees(scores, mask, stride, target, False, prices, False)


@pytest.mark.parametrize("k", [16, 100])
def test_tied_rows_are_shared_among_their_experts(k: int) -> None:
    rng = np.random.default_rng(0)
    scores, prices = rng.integers(0, 3, (600, k)).astype(np.float32), np.zeros(k)
    prices[1] = np.inf
    offers = (scores - prices)[1::3]
    tied = offers == offers.max(1, keepdims=True)
    counts = (tied / tied.sum(1, keepdims=True)).sum(0)
    target = rng.uniform(1.0, 2.0, k)
    expected = np.maximum(counts - target * (200 / target.sum()), 0.0).sum()
    missed = _samples.held_out(scores, np.ones(600, np.bool_), 3, target, False, prices)
    assert missed == pytest.approx(expected)


@pytest.mark.parametrize(
    ("n", "found", "strides"),
    [
        (4096, True, [4]),
        (16384, True, [16]),
        (65536, False, [64, 8]),
        (65536, True, [64, 8]),
        (262144, False, [256]),
        (262144, True, [256, 32, 4]),
        (2**20, True, [1024, 128, 16]),
    ],
)
def test_more_samples_where_one_tells_too_little(n: int, found: bool, strides: list[int]) -> None:
    stride, taken = _samples.coarse_stride(n, 64), list[int]()
    while stride > 1:
        taken.append(stride)
        stride = _samples.next_stride(n, 64, stride, found)
    assert taken == strides


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_quantiles(scale: float) -> None:
    leads = scale * np.random.default_rng(0).exponential(size=77)
    leads[:20] = leads[20]
    leads[5] = 0.0
    for fraction in np.linspace(0.0, 1.2, 50):
        assert _samples.quantile(leads, fraction) == np.sort(leads)[min(76, int(fraction * 77))]
    assert _samples.quantile(leads[:1], 0.5) == leads[0]
    assert _samples.quantile(np.array([-0.0, 1.0, 2.0]), 0.0) == 0.0
    assert _samples.quantile(np.array([-0.0, 1.0, 2.0]), 0.5) == 1.0
    assert _samples.quantile(leads[:0], 0.5) == 0.0


def test_a_radius_is_a_quantile_of_leads() -> None:
    leads = np.random.default_rng(0).exponential(size=1000)
    ordered = np.sort(leads)
    assert _samples.radius_of(leads, 0.1) == ordered[100]
    assert _samples.radius_of(leads, 0.4) == pytest.approx(ordered[125] * 3.2)
    assert _samples.radius_of(leads, 5.0) == ordered[500]
    assert _samples.radius_of(1e-30 * leads, 0.4) == pytest.approx(1e-30 * _samples.radius_of(leads, 0.4))
    assert _samples.radius_of(leads[:0], 0.4) == 0.0


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rows_end_within_the_radius_of_their_best_offer(seed: int, biased: bool) -> None:
    n, k = 65536, 16
    scores = draw_scores("gumbel", n, k, seed) + (torch.linspace(0.0, 3.0, k) if biased else 0.0)
    mask, target, z = np.ones(n, np.bool_), np.full(k, n / k), np.empty(n, np.int32)
    prices = np.zeros(k)
    radius, mu = _solve.coarse_prices(scores.numpy(), mask, target, False, False, prices, z)
    assert mu == 0
    offers = scores.numpy() - prices
    best = np.sort(offers, 1)[:, -2:]
    chosen = np.take_along_axis(offers, eq.assign(scores).z.numpy()[:, None], 1)[:, 0]
    assert np.mean(chosen < best[:, 1] - radius) < 1e-4
    assert np.mean(best[:, 1] - best[:, 0] < radius) < 0.3  # and it is not simply large


def test_one_of_sinkhorns_steps() -> None:
    """Rows that are all alike: their softmax is known, and a step makes them indifferent."""
    value = np.array([0.0, 0.5, 2.0, 1.0, 9.0])
    scores, prices = np.tile(value, (64, 1)), np.array([0.0, 0.0, 0.0, np.inf, np.inf])
    target = np.array([16.0, 32.0, 16.0, 0.0, 0.0])
    _descent.approach(scores, np.ones(64, np.bool_), 2, target, prices, 1.0)
    expected = value + np.log([4.0, 2.0, 4.0, 1.0, 1.0])
    np.testing.assert_allclose(prices[:3], (expected - expected[:3].min())[:3], atol=0.02)  # as the exponential
    assert np.all(prices[3:] == np.inf)


def test_prices_of_an_earlier_draw_are_not_doubted_for_their_noise() -> None:
    """With few rows for each expert it shows in a sample."""
    n, k = 4096, 64
    mask, target, agreed = np.ones(n, np.bool_), np.full(k, n / k), Counter[bool]()
    for seed in range(60):
        earlier = eq.assign(draw_scores("gumbel", n, k, seed + 100)).prices.numpy()
        scores = draw_scores("gumbel", n, k, seed).numpy()
        for known in (False, True):
            agreed[known] += _samples.agrees(scores, mask, 4, target, False, earlier, known)
    assert agreed[True] == 60 > agreed[False]


def drawn_twice(n: int, k: int, seed: int, spread: float, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An earlier draw's prices, and scores of another, for experts whose popularity spreads so far."""
    popularity = spread * torch.randn(k, generator=torch.Generator().manual_seed(seed))
    earlier, scores = (draw_scores("gumbel", n, k, seed + more) + popularity for more in (1000, 0))
    return eq.assign(earlier, capacity).prices, scores


@pytest.mark.parametrize(("n", "k"), [(4096, 16), (4096, 64), (16384, 64), (65536, 64)])
def test_a_forgotten_start_has_the_lists_of_a_cold_one(n: int, k: int) -> None:
    """Then it does the same work, less some questions, and can be no slower."""
    mask, target, z = np.ones(n, np.bool_), np.full(k, n / k), np.empty(n, np.int32)
    for seed in range(6):
        earlier, scores = drawn_twice(n, k, seed, 0.0, n // k)
        warm, cold = earlier.numpy().copy(), np.zeros(k)
        radius = _samples.forget_near(scores.numpy(), mask, target, False, warm)
        assert np.array_equal(warm, np.zeros(k))
        assert (radius, 0.0) == _solve.coarse_prices(scores.numpy(), mask, target, False, False, cold, z)
        assert np.array_equal(cold, np.zeros(k))


@pytest.mark.parametrize("slack", [1.0, 1.25])
def test_prices_that_are_far_apart_are_kept(slack: float) -> None:
    n, k = 4096, 32
    capacity = math.ceil(slack * n / k)
    mask, target = np.ones(n, np.bool_), np.full(k, float(capacity))
    for seed in range(10):
        earlier, scores = drawn_twice(n, k, seed, 1.0, capacity)
        prices = earlier.numpy().copy()
        assert _samples.forget_near(scores.numpy(), mask, target, slack > 1, prices) == -1
        assert np.array_equal(prices, earlier.numpy())


@pytest.mark.parametrize(("n", "k", "spread"), [(4096, 16, 0.35), (4096, 64, 0.25), (16384, 64, 0.2)])
def test_whether_prices_in_between_are_kept_is_for_a_sample_to_say(n: int, k: int, spread: float) -> None:
    """The one that a cold start asks."""
    mask, target, kept = np.ones(n, np.bool_), np.full(k, n / k), Counter[bool]()
    stride = _samples.last_stride(n, k)
    for seed in range(20):
        earlier, scores = drawn_twice(n, k, seed, spread, n // k)
        variance = _samples.error_variance(stride, False)
        radius = _samples.sampling_radius(scores.numpy(), mask, np.zeros(k), stride, 1, variance)
        if not _samples.CLOSE * radius < float(earlier.max()) < _samples.FAR * radius:
            continue
        agrees = _samples.agrees(scores.numpy(), mask, stride, target, False, np.zeros(k), False)
        forgotten = _samples.forget_near(scores.numpy(), mask, target, False, earlier.numpy().copy()) >= 0
        assert forgotten == agrees
        kept[forgotten] += 1
    assert min(kept[True], kept[False]) > 0


@pytest.mark.parametrize(("slack", "edge"), [(1.0, 0.3), (1.25, 0.6)])
def test_half_of_a_sample_answers_for_all_of_it_or_not_at_all(slack: float, edge: float) -> None:
    """Where earlier prices are right it often does; it hardly ever does where all rows would say something else."""
    n, k, stride = 4096, 64, 4
    mask, target, prices = np.ones(n, np.bool_), np.full(k, slack * n / k), np.zeros(k)
    read, rash, most = Counter[float](), 0, _samples.chance(n / stride, target, _samples.SURER) * math.sqrt(1.25)
    for seed in range(30):
        for spread in (0.0, edge, 1.2 * edge, 2.0 * edge):
            popularity = spread * torch.randn(k, generator=torch.Generator().manual_seed(seed))
            scores = (draw_scores("gumbel", n, k, seed) + popularity).numpy()
            fits = _samples.held_out(scores, mask, stride, target, slack > 1, prices) <= most
            agrees = _samples.agrees(scores, mask, stride, target, slack > 1, prices, True)
            assert agrees or not fits
            rash += agrees != fits
            scores[stride // 2 + stride :: 2 * stride, 0] = 99.0  # the other half, if asked, contradicts
            read[spread] += _samples.agrees(scores, mask, stride, target, slack > 1, prices, True)
    assert read[0.0] > 15 > read[2.0 * edge]
    assert rash <= 6  # of 120, of which a third are near the edge


def test_prices_are_not_forgotten_for_equal_ones_that_rows_do_not_agree_with() -> None:
    n, k = 4096, 16
    mask, target = np.ones(n, np.bool_), np.full(k, n / k)
    noise = eq.assign(draw_scores("gumbel", n, k, 0)).prices.numpy()
    scores = draw_scores("gumbel", n, k, 1).numpy()
    assert _samples.forget_near(scores, mask, target, False, noise.copy()) > 0
    assert _samples.forget_near(scores + np.linspace(0, 3, k), mask, target, False, noise.copy()) == -1


def test_with_slack_a_radius_knows_the_highest_price() -> None:
    n, k = 4096, 16
    scores, mask, target = draw_scores("gumbel", n, k, 0).numpy(), np.ones(n, np.bool_), np.full(k, 1.25 * n / k)
    radii = list[float]()
    for highest in (0.0, 0.02, 0.3):
        prices = np.where(np.arange(k) == 3, highest, 0.0)
        radii.append(_samples.forget_near(scores, mask, target, True, prices))
    assert radii[1] - radii[0] == pytest.approx(0.02)
    assert radii[0] > 0.1  # chance alone
    assert radii[2] == _samples.sampling_radius(scores, mask, np.zeros(k), 16, 1, _samples.error_variance(16, False))


@pytest.mark.parametrize(("slack", "spread"), [(1.05, 0.3), (1.0, 0.5)])
def test_prices_that_left_their_lists_get_others(slack: float, spread: float) -> None:
    """Nearly all do so at once, or balance; with one in some hundred it shows only in the end."""
    n, k = 4096, 16
    mask, capacity, z = np.ones(n, np.bool_), np.full(k, math.ceil(slack * n / k)), np.empty(n, np.int32)
    for seed in range(300):
        popularity = spread * torch.randn(k, generator=torch.Generator().manual_seed(seed))
        scores = (draw_scores("gumbel", n, k, seed) + popularity).numpy()
        assert _solve.solve_usual(scores, mask, capacity, False, np.zeros(k), z)[0], seed


def test_closed_experts_stay_closed() -> None:
    n, k = 4096, 16
    mask, target = np.ones(n, np.bool_), np.where(np.arange(k) == 3, 0.0, n / (k - 1))
    prices = np.where(np.arange(k) == 3, np.inf, 0.01 * np.arange(k))
    assert _samples.forget_near(draw_scores("gumbel", n, k, 0).numpy(), mask, target, False, prices) > 0
    assert np.array_equal(prices, np.where(np.arange(k) == 3, np.inf, 0.0))


@pytest.mark.parametrize("k", [16, 100])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_leads_and_the_counts_of_their_rows(k: int, dtype: type) -> None:
    rng = np.random.default_rng(0)
    scores, prices, mask = rng.normal(size=(500, k)).astype(dtype), rng.uniform(size=k), rng.random(500) < 0.7
    prices[1] = np.inf
    offers = (scores - prices)[1::3][mask[1::3]]
    best, counts = np.sort(offers, 1)[:, -2:], np.ones(k)
    leads = _samples.leads_of(scores, mask, 1, 3, prices, counts)
    np.testing.assert_allclose(leads, best[:, 1] - best[:, 0], atol=1e-6)
    assert np.array_equal(counts, 1 + np.bincount(offers.argmax(1), minlength=k))


def test_leads_of_ties_and_of_rows_with_one_expert() -> None:
    scores = np.array([[1.0, 1.0, 0.0], [-np.inf, 2.0, -np.inf], [0.0, 5.0, 3.0], [4.0, 0.0, 9.0]])
    counts = np.zeros(3)
    leads = _samples.leads_of(scores, np.array([True, True, True, False]), 0, 1, np.zeros(3), counts)
    assert leads.tolist() == [0.0, 2.0]
    assert counts.tolist() == [0.5, 2.5, 0.0]


def test_every_row_counts_at_a_stride_of_one() -> None:
    counts = np.zeros(3)
    _samples.count_best(np.eye(3)[[0, 1, 2, 2]], np.ones(4, np.bool_), 0, 1, np.zeros(3), counts)
    assert counts.tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("known", [1, 2, 5])
def test_rows_that_told_their_leads_are_part_of_a_sample(known: int) -> None:
    """Counted when their leads were, and not again; with ties, forbidden pairs and masked rows."""
    rng = np.random.default_rng(known)
    scores, mask, prices = rng.integers(0, 4, (997, 9)).astype(np.float64), rng.random(997) < 0.8, np.zeros(9)
    scores[rng.random((997, 9)) < 0.3] = -np.inf
    together, apart = np.zeros(9), np.zeros(9)
    _samples.leads_of(scores, mask, 3, 7 * known, prices, apart)
    _samples.count_others(scores, mask, 3, 7, known, prices, apart)
    _samples.count_best(scores, mask, 3, 7, prices, together)
    np.testing.assert_allclose(apart, together, rtol=1e-12)
    assert together.sum() == pytest.approx(mask[3::7].sum())


def test_scores_of_both_zeros() -> None:
    scores = torch.where(torch.rand(9000, 5, generator=torch.Generator().manual_seed(0)) < 0.5, 0.0, -0.0)
    assert eq.assign(scores).gap == 0


Reads = Callable[[], Counter[str]]


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """How many rows were listed and priced since this was last called."""
    read = Counter[str]()

    def count_rows(module: Any, name: str, start: int) -> None:
        kernel = getattr(module, name)

        def call(*arguments: Any) -> Any:
            read[name] += arguments[start + 1] - arguments[start]
            return kernel(*arguments)

        monkeypatch.setattr(module, name, call)

    def since() -> Counter[str]:
        counted = read.copy()
        read.clear()
        return counted

    count_rows(_primal_dual._collect, "collect", 3)
    count_rows(_primal_dual._pricing, "price_rows", 4)
    return since


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("slack", [1.0, 1.05, 1.25])
def test_a_large_matrix_is_read_twice(slack: float, warm: bool, rows_read: Reads) -> None:
    """Once to list candidates, once for the proof: more would mean that lists were too short or prices moved away.

    One matrix in four may lack a candidate that it needs, and is priced again.
    """
    n, k = 65536, 64
    capacity = math.ceil(slack * n / k)
    earlier = [
        eq.assign(draw_scores("gumbel", n, k, seed + 100), capacity).prices if warm else None for seed in range(4)
    ]
    rows_read()
    for seed in range(4):
        eq.assign(draw_scores("gumbel", n, k, seed), capacity, prices=earlier[seed])
    read = rows_read()
    assert read["collect"] == 4 * n
    assert read["price_rows"] <= 5 * n


# How far the experts' popularity spreads in the earlier draw and in this one, and whether it is the same experts'.
@pytest.mark.parametrize(
    ("before", "now", "same"), [(1, 1, True), (1, 0, True), (0, 1, True), (1, 1, False), (1, 2, True)]
)
@pytest.mark.parametrize("slack", [1.0, 1.05, 1.25])
def test_a_start_that_misleads_costs_no_more_than_none(
    slack: float, before: float, now: float, same: bool, rows_read: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_primal_dual, "BLOCK_ROWS", 1024)  # so that passes are called from Python, and counted
    n, k = 4096, 32
    capacity = math.ceil(slack * n / k)
    cold, warm = Counter[str](), Counter[str]()
    for seed in range(6):
        popularity = torch.randn(2, k, generator=torch.Generator().manual_seed(seed))
        earlier = draw_scores("gumbel", n, k, seed + 100) + before * popularity[0]
        scores = draw_scores("gumbel", n, k, seed) + now * popularity[0 if same else 1]
        prices = eq.assign(earlier, capacity).prices
        rows_read()
        a = eq.assign(scores, capacity)
        cold += rows_read()
        b = eq.assign(scores, capacity, prices=prices)
        warm += rows_read()
        assert float(a.value) == pytest.approx(float(b.value), rel=1e-9)
    assert warm["collect"] <= cold["collect"]
    assert warm["price_rows"] <= cold["price_rows"] + n  # one of the six may find its lists a row short


@pytest.mark.parametrize("slack", [1.0, 1.05, 1.25])
@pytest.mark.parametrize("spread", [0.1, 0.2, 0.4, 1.0])
def test_experts_of_different_popularity_take_few_passes(slack: float, spread: float, rows_read: Reads) -> None:
    """Popularity that a sample has not noticed, or not fully: prices leave their lists, and get others in time."""
    n, k = 65536, 64
    for seed in range(3):
        popularity = spread * torch.randn(k, generator=torch.Generator().manual_seed(seed))
        eq.assign(draw_scores("gumbel", n, k, seed) + popularity, math.ceil(slack * n / k))
        assert rows_read().total() <= 4 * n
