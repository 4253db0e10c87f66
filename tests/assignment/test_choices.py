# SPDX-License-Identifier: Apache-2.0
"""Lists of candidates: what is on them, what follows from them, and what happens when too little is."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import equipoise as eq
from equipoise.assignment import _primal_dual
from equipoise.assignment._kernels import _amend, _choices, _collect, _flow, _pricing, _samples, _smoothing, _solve
from support.families import draw_scores

Floats = NDArray[np.float64]


def collected(
    scores: Floats, mask: NDArray[np.bool_], prices: Floats, radius: float, stride: int = 1
) -> tuple[_choices.Choices, Floats, NDArray[np.int32]]:
    n, k = scores.shape
    room, settled, z = _choices.room_for_choices(scores, n), np.zeros(k), np.full(n, -7, np.int32)
    listing = _collect.new_listing(scores, prices, radius)
    m, illegal = _collect.collect(scores, mask, listing, 0, n, stride, room, 0, settled, z)
    assert illegal == -1
    return _choices.first(room, m), settled, z


def within(scores: Floats, prices: Floats, radius: float) -> NDArray[np.bool_]:
    offers = scores - prices.astype(scores.dtype)
    return offers >= offers.max(1, keepdims=True) - scores.dtype.type(radius)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("k", [5, 16, 64, 71, 130])
def test_candidates_are_what_is_within_the_radius(k: int, stride: int, dtype: str) -> None:
    """Against the obvious, on more rows than a chunk has; with masked rows and forbidden pairs."""
    n, generator = 2500, np.random.default_rng(k)
    scores = generator.gumbel(size=(n, k)).astype(dtype)
    scores[generator.random((n, k)) < 0.1] = -np.inf
    scores[:, k // 2] = 0.0
    mask, prices = generator.random(n) < 0.9, 0.3 * generator.random(k)
    choices, settled, z = collected(scores, mask, prices, 0.7, stride)
    near = within(scores, prices, 0.7)
    expected = np.zeros(k)
    for i in range(0, n, stride):
        if not mask[i]:
            assert z[i] == -1
        elif near[i].sum() == 1:
            assert near[i, z[i]]
            expected[z[i]] += 1
    room, listed = choices.cols.shape[1], set()
    for a, i in enumerate(choices.rows):
        cols = choices.cols[a, : choices.width[a]]
        assert len(set(cols)) == len(cols)
        assert near[i, cols].all()
        np.testing.assert_array_equal(choices.vals[a, : choices.width[a]], scores[i, cols])
        assert len(cols) == near[i].sum() or near[i].sum() > room
        assert (scores[i] - prices.astype(dtype)).argmax() in cols
        listed.add(i)
    assert listed == {i for i in range(0, n, stride) if mask[i] and near[i].sum() > 1}
    np.testing.assert_array_equal(settled, expected)


@pytest.mark.parametrize("k", [3, 64, 130])
def test_counts_of_best_offers_on_rows_in_between(k: int) -> None:
    scores = draw_scores("gumbel", 1000, k, 0).numpy()
    prices, mask = np.linspace(0.0, 1.0, k), np.arange(1000) % 7 != 0
    rows = np.arange(2, 1000, 4)[mask[2::4]]
    counts = np.bincount((scores[rows] - prices.astype(np.float32)).argmax(1), minlength=k)
    missed = np.maximum(counts - len(rows) / k, 0).sum()
    assert _samples.held_out(scores, mask, 4, np.full(k, 1000 / k), False, prices) == pytest.approx(missed)


def test_rows_with_equally_many_candidates_stand_together() -> None:
    scores = draw_scores("gumbel", 4096, 64, 0).numpy()
    choices, _, _ = collected(scores, np.ones(4096, np.bool_), np.zeros(64), 0.4)
    runs = 1 + np.count_nonzero(np.diff(choices.width))
    assert len(choices.rows) > 1000
    assert runs <= 4 * choices.cols.shape[1]  # four chunks


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("column", [0, 7, 63, 64, 69])
def test_an_illegal_score_is_found_wherever_it_stands(column: int, value: float) -> None:
    scores = draw_scores("gumbel", 600, 70, 0).numpy()
    scores[400, column] = value
    room, listing = _choices.room_for_choices(scores, 600), _collect.new_listing(scores, np.zeros(70), 0.5)
    found = _collect.collect(
        scores, np.ones(600, np.bool_), listing, 0, 600, 1, room, 0, np.zeros(70), np.empty(600, np.int32)
    )
    assert found[1] == 400


@pytest.mark.parametrize("k", [16, 64])
def test_narrowing_settles_who_is_far_ahead(k: int) -> None:
    n, generator = 3000, np.random.default_rng(k)
    scores, prices = generator.gumbel(size=(n, k)), 0.2 * generator.random(k)
    choices, settled, z = collected(scores, np.ones(n, np.bool_), np.zeros(k), 0.6)
    lists = [(i, choices.cols[a, : choices.width[a]].copy()) for a, i in enumerate(choices.rows)]
    before, counts, kept, gone = settled.copy(), settled.copy(), [], settled.copy()
    for i, cols in lists:
        offers = np.sort(scores[i, cols] - prices[cols])
        best = cols[(scores[i, cols] - prices[cols]).argmax()]
        counts[best] += 1
        if offers[-1] - offers[-2] <= 0.2:
            kept.append(i)
        else:
            gone[best] += 1
    assert 0 < len(kept) < len(lists)
    got = np.empty(k)
    narrowed = _choices.narrow(choices, prices, 0.2, settled, z, got)
    assert narrowed.rows.tolist() == kept
    np.testing.assert_array_equal(settled, gone)
    np.testing.assert_array_equal(got, counts)
    assert not np.array_equal(settled, before)
    remaining = dict(lists)
    for a, i in enumerate(narrowed.rows):
        np.testing.assert_array_equal(narrowed.cols[a, : narrowed.width[a]], remaining[i])
        np.testing.assert_array_equal(narrowed.vals[a, : narrowed.width[a]], scores[i, remaining[i]])


@pytest.mark.parametrize("k", [8, 64])
def test_demand_and_curvature_of_lists(k: int) -> None:
    """Against the formulas, with the same stand-in for the exponential; lists of two and longer ones."""
    n, generator, mu = 2000, np.random.default_rng(k), 0.1
    scores, prices = generator.gumbel(size=(n, k)), 0.2 * generator.random(k)
    choices, _, _ = collected(scores, np.ones(n, np.bool_), np.zeros(k), 0.6)
    demand, curvature, dual = np.zeros(k), np.zeros((k, k)), 0.0
    for a in range(len(choices.rows)):
        cols = choices.cols[a, : choices.width[a]]
        offers = choices.vals[a, : choices.width[a]] - prices[cols]
        weights = np.maximum(1 + (offers - offers.max()) / mu / 16, 0.0)
        weights = np.where(weights > 1 / 16, weights, 0.0) ** 16
        share = weights / weights.sum()
        demand[cols] += share
        curvature[np.ix_(cols, cols)] += np.outer(share, share)
        dual += offers.max() + mu * np.log(weights.sum())
    assert set(choices.width) >= {2, 3, 4}
    got, pairs = np.zeros(k), np.zeros((k, k))
    value = _smoothing.soft_demand(choices, prices, mu, got, pairs)
    np.testing.assert_allclose(got, demand, rtol=1e-10)
    np.testing.assert_allclose(pairs + pairs.T, curvature - np.diag(np.diag(curvature)), rtol=1e-9, atol=1e-12)
    assert value == pytest.approx(dual, rel=1e-10)


@pytest.mark.parametrize("offset", [-10.0, 0.0, 10.0])
@pytest.mark.parametrize("slack", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_refining_leaves_few_rows_to_move(seed: int, slack: bool, offset: float) -> None:
    """Whatever the sign of the scores: rows that are settled on the way no longer count in the dual."""
    n, k = 16384, 64
    scores = draw_scores("gumbel", n, k, seed).numpy() + np.float32(offset)
    target, prices, mask = np.full(k, 1.02 * n / k if slack else n / k), np.zeros(k), np.ones(n, np.bool_)
    radius = _samples.sampling_radius(scores, mask, prices, 1, 1, 1.0)
    choices, settled, z = collected(scores, mask, prices, radius)
    listed = len(choices.rows)
    narrowed, excess, mu = _solve.refine(choices, settled, target, slack, 1, radius, radius / 4, k / 2, prices, z)
    counts = np.bincount((scores - prices).argmax(1), minlength=k)
    assert excess <= k / 2
    assert np.maximum(counts - target, 0).sum() == pytest.approx(excess)
    assert 0 < len(narrowed.rows) < listed
    for a in range(len(narrowed.rows)):  # and those are nearly indifferent
        offers = np.sort(narrowed.vals[a, : narrowed.width[a]] - prices[narrowed.cols[a, : narrowed.width[a]]])
        assert offers[-1] - offers[-2] <= _solve.SETTLED * mu


def test_prices_that_leave_their_candidates_behind_are_reported() -> None:
    """Half the rows have to change experts, and only those that are nearly indifferent are listed."""
    n, k = 4096, 16
    scores = draw_scores("gumbel", n, k, 0).numpy() + np.where(np.arange(k) < 8, 2.0, 0.0).astype(np.float32)
    mask, prices = np.ones(n, np.bool_), np.zeros(k)
    choices, settled, z = collected(scores, mask, prices, 0.2)
    _, excess, _ = _solve.refine(choices, settled, np.full(k, n / k), False, 1, 0.2, 0.05, k / 2, prices, z)
    assert excess == _solve.DRIFTED


def test_differences_count_only_between_experts_that_share_rows() -> None:
    hessian = np.array([[2.0, -2.0, 0.0], [-2.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    assert _smoothing.furthest_apart(hessian, np.array([1.0, 4.0, 90.0])) == 3.0
    assert _smoothing.furthest_apart(hessian, np.array([1.0, np.nan, 90.0])) == 0.0


class TestDoors:
    """Rows that list experts 0 and 1 only, which cannot hold them all; the third is far away and empty."""

    def shut_in(self, n: int, most: int, forbidden: bool = False) -> tuple[Floats, NDArray[np.int64], _choices.Choices]:
        scores = np.random.default_rng(0).random((n, 3))
        scores[:, 2] = -np.inf if forbidden else scores[:, 2] - 50.0
        choices = _choices.room_for_choices(scores, n)
        choices.rows[:], choices.width[:] = np.arange(n), 2
        choices.cols[:, :2], choices.vals[:, :2] = [0, 1], scores[:, :2]
        return scores, np.full(3, most), choices

    @pytest.mark.parametrize(("n", "most"), [(10, 4), (200, 99)])
    def test_those_leave_who_lose_least(self, n: int, most: int) -> None:
        """One door is enough, and of many rows it opens for few."""
        scores, capacity, choices = self.shut_in(n, most)
        prices, settled, z, distance = np.zeros(3), np.zeros(3), np.empty(n, np.int32), np.empty(3)
        assert _flow.exact_flow(choices, settled, capacity, prices, z, 0.0, 0, distance) >= 0
        assert distance[2] == np.inf
        choices, opened = _amend.open_doors(scores, capacity, prices, distance, choices, settled, z)
        assert 0 < opened <= max(n // 4, 10)
        assert _flow.exact_flow(choices, settled, capacity, prices, z, 0.0, len(choices.rows), distance) == -1
        expected = eq.assign(torch.from_numpy(scores), most, method="cycle-cancelling")
        assert scores[np.arange(n), z].sum() == pytest.approx(float(expected.value))

    def test_settled_rows_are_asked_too(self) -> None:
        scores, capacity, choices = self.shut_in(10, 4)
        settled, z = np.zeros(3), np.empty(10, np.int32)
        choices = _choices.narrow(choices, np.zeros(3), 0.4, settled, z, np.empty(3))
        before = int(settled.sum())
        assert 0 < before < 10
        prices, distance, seated = np.zeros(3), np.empty(3), 0
        while _flow.exact_flow(choices, settled, capacity, prices, z, 0.0, seated, distance) >= 0:
            choices, opened = _amend.open_doors(scores, capacity, prices, distance, choices, settled, z)
            assert opened > 0
            seated = len(choices.rows)
        assert settled.sum() < before
        assert len(choices.rows) + settled.sum() == 10
        assert (np.bincount(z, minlength=3) <= capacity).all()

    def test_where_there_is_no_way_out_none_is_opened(self) -> None:
        scores, capacity, choices = self.shut_in(10, 4, forbidden=True)
        prices, settled, z, distance = np.zeros(3), np.zeros(3), np.empty(10, np.int32), np.empty(3)
        assert _flow.exact_flow(choices, settled, capacity, prices, z, 0.0, 0, distance) >= 0
        assert _amend.open_doors(scores, capacity, prices, distance, choices, settled, z)[1] == 0

    def test_a_full_list_gives_up_its_worst_candidate(self) -> None:
        scores = np.arange(8.0).reshape(1, 8)
        choices = _choices.room_for_choices(scores, 1)
        room = choices.cols.shape[1]
        choices.rows[0], choices.width[0] = 0, room
        choices.cols[0], choices.vals[0] = np.arange(room), scores[0, :room]
        inside = np.arange(8) < room
        _amend.add_door(scores, 0, inside, np.zeros(8), 0, choices, 0)
        assert choices.width[0] == room
        assert choices.cols[0].tolist() == [0, 7, *range(2, room)]  # not expert 0, where the row is
        assert choices.vals[0, 1] == 7.0


@pytest.mark.parametrize("seed", range(4))
def test_rows_with_a_better_offer_join_those_that_are_seated(seed: int) -> None:
    """Twelve rows were settled at the wrong expert: of the others only those move that make room for them."""
    n, k, missing = 2000, 8, 12
    scores, mask = draw_scores("gumbel", n, k, seed).double().numpy(), np.ones(n, np.bool_)
    expected = eq.assign(torch.from_numpy(scores), method="cycle-cancelling")
    prices, capacity = expected.prices.numpy(), np.full(k, n // k)
    distance, wrong = np.empty(k), np.empty(n, np.int32)
    choices, settled, z = collected(scores, mask, prices, 0.3)
    for a in range(len(choices.rows) - missing, len(choices.rows)):
        i = choices.rows[a]
        z[i] = np.argsort(scores[i] - prices)[-2]
        settled[z[i]] += 1
    choices = _choices.first(choices, len(choices.rows) - missing)
    assert _flow.exact_flow(choices, settled, capacity, prices, z, 0.0, 0, distance) == -1
    rounds, listing = 0, _collect.all_listed(scores)
    _, regret, _, count = _pricing.price_rows(scores, z, prices, listing, 0, n, wrong)
    assert regret > 1e-3
    while regret > 1e-9:
        before = z.copy()
        choices, seated = _amend.reinstate(scores, mask, prices, 0.6, wrong[:count], choices, settled, z)
        assert len(choices.rows) - count <= seated < len(choices.rows)
        assert _flow.exact_flow(choices, settled, capacity, prices, z, 0.0, seated, distance) == -1
        assert 0 < np.sum(z != before) <= 3 * count
        _, regret, _, count = _pricing.price_rows(scores, z, prices, listing, 0, n, wrong)
        rounds += 1
    assert rounds < 6
    assert scores[np.arange(n), z].sum() == pytest.approx(float(expected.value), rel=1e-12)


@pytest.mark.parametrize("family", ["rank-1", "clustered"])
def test_what_no_row_connects_is_joined(family: str) -> None:
    """Matrices on which prices alone leave experts shut in, at a size that takes the whole way; proven by the gap."""
    for seed in range(3):
        for capacity in (None, 160):
            scores = draw_scores(family, 8200, 64, seed)
            a = eq.assign(scores, capacity)
            assert a.gap <= 1e-9 * max(abs(float(a.value)), float(scores.abs().max()))
            assert (a.counts <= a.capacity).all()


def test_rows_are_spread_over_offers_within_reach() -> None:
    """Rows 0 to 5 are tied between experts 0 and 1, rows 6 and 7 nearly so between 1 and 2; expert 2 needs none."""
    scores = np.array([[1.0, 1.0, 0.0]] * 6 + [[0.0, 1.0, 0.95]] * 2)
    prices, settled, counts = np.zeros(3), np.array([1.0, 0.0, 0.0]), np.empty(3)
    choices = _choices.all_choices(scores, np.ones(8, np.bool_))
    cols = np.repeat(np.arange(3, dtype=np.int32)[None], 8, 0)
    choices = choices._replace(cols=cols, vals=scores.copy(), dense=False)
    target, needy = np.array([4.0, 3.0, 2.0]), np.zeros(3, np.bool_)
    _choices.count_spread(choices, prices, 0.1, settled, target, needy, counts)
    assert counts.tolist() == [4.0, 3.0, 2.0]
    _choices.count_spread(choices, prices, 0.01, settled, target, needy, counts)
    assert counts.tolist() == [4.0, 5.0, 0.0]
    _choices.count_spread(choices, prices, 0.1, settled, np.full(3, 8.0), np.array([False, False, True]), counts)
    assert counts.tolist() == [4.0, 5.0, 0.0]


@pytest.mark.parametrize("seed", range(4))
def test_exact_ties_are_no_imbalance(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves in place of real numbers, experts of different popularity: lists of candidates are enough."""
    n, k = 16384, 32
    popularity = torch.randn(k, generator=torch.Generator().manual_seed(seed))
    scores = (2 * (draw_scores("logits", n, k, seed) + popularity)).round() / 2
    monkeypatch.setattr(_primal_dual._descent, "all_prices", None)  # not called
    a = eq.assign(scores)
    assert float(a.gap) <= 1e-9 * float(a.value)
