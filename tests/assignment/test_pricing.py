# SPDX-License-Identifier: Apache-2.0
"""The certificate of rows that are not read a second time, against pricing every entry."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import equipoise as eq
from equipoise.assignment import _primal_dual
from equipoise.assignment._kernels import _choices, _collect, _pricing, _solve
from support.families import draw_scores

Floats = NDArray[np.float64]
Matrix = NDArray[np.floating]
RADIUS = 0.5


def listed(scores: Matrix, mask: NDArray[np.bool_], prices: Floats) -> tuple[_collect.Listing, NDArray[np.int32]]:
    n, k = scores.shape
    listing, z = _collect.new_listing(scores, prices, RADIUS), np.empty(n, np.int32)
    room = _choices.room_for_choices(scores, n)
    m, illegal = _collect.collect(scores, mask, listing, 0, n, 1, room, 0, np.zeros(k), z)
    assert illegal == -1
    assert np.isnan(listing.alone[room.rows[:m]]).all()
    return listing, z


def regrets(scores: Matrix, z: NDArray[np.int32], prices: Floats) -> Floats:
    offers = scores.astype(np.float64) - prices
    return np.where(z >= 0, offers.max(1) - offers[np.arange(len(z)), z], 0.0)


def worth(scores: Matrix, z: NDArray[np.int32]) -> Floats:
    return np.where(z >= 0, scores[np.arange(len(z)), z].astype(np.float64), 0.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("offset", [0.0, -3e3, 1e5])
@pytest.mark.parametrize("drift", [0.0, 0.4, 0.6, 3.0])
@pytest.mark.parametrize("k", [5, 16, 71])
def test_nothing_is_missed_however_far_prices_move(k: int, drift: float, offset: float, dtype: str) -> None:
    """With forbidden pairs, masked rows and a closed expert; in two blocks, the second of which writes after the first.

    The offset makes scores of float32 coarse: at 1e5 two of them differ by 1/128 or not at all.
    """
    n, generator = 3000, np.random.default_rng(k)
    scores = (offset + generator.gumbel(size=(n, k))).astype(dtype)
    scores[generator.random((n, k)) < 0.1] = -np.inf
    scores[:, 1] = offset
    mask, prices = generator.random(n) < 0.9, 0.3 * generator.random(k)
    prices[0] = np.inf
    listing, z = listed(scores, mask, prices)
    moved = prices + drift * generator.random(k)
    wrong, missed = np.empty(n, np.int32), regrets(scores, z, moved)
    parts = [_pricing.price_rows(scores, z, moved, listing, *block, wrong) for block in ((0, 1000), (1000, n))]
    found = np.concatenate([wrong[: parts[0][3]], wrong[1000 : 1000 + parts[1][3]]])
    np.testing.assert_array_equal(np.sort(found), np.flatnonzero(missed > 0))
    assert sum(part[0] for part in parts) == pytest.approx(worth(scores, z).sum(), rel=1e-12)
    assert sum(part[1] for part in parts) == pytest.approx(missed.sum(), rel=1e-12)
    assert max(part[2] for part in parts) == np.abs(worth(scores, z)).max()


@pytest.mark.parametrize(("gap", "by"), [(0.625, 0.5), (0.625, 0.75), (0.5, 0.0), (0.5, 0.25)])
def test_a_rival_catches_up_exactly_when_prices_say_so(gap: float, by: float) -> None:
    """Rows prefer expert 0 by `gap`; then the price of expert 1 falls by `by`, that of expert 0 does not."""
    scores = np.tile(np.array([[gap, 0.0, -9.0]]), (20, 1))
    prices, wrong = np.full(3, 1.0), np.empty(20, np.int32)
    listing, z = listed(scores, np.ones(20, np.bool_), prices)
    z[:] = 0  # also where both are candidates
    moved = prices - np.array([0.0, by, 0.0])
    _, regret, _, count = _pricing.price_rows(scores, z, moved, listing, 0, 20, wrong)
    assert count == (20 if by > gap else 0)
    assert regret == 20 * max(0.0, by - gap)


def test_rows_without_a_choice_are_not_read_again() -> None:
    """Their scores may be overwritten, and the proof stands; not so if prices moved, or if the row had a choice."""
    n, k = 2000, 8
    scores = np.random.default_rng(0).gumbel(size=(n, k))
    listing, z = listed(scores, np.ones(n, np.bool_), np.zeros(k))
    alone = ~np.isnan(listing.alone)
    assert 0.4 * n < alone.sum() < 0.9 * n
    forgotten, wrong = np.where(alone[:, None], 99.0 * (np.arange(k) == 3), scores), np.empty(n, np.int32)
    prices = 0.45 * np.random.default_rng(1).random(k)
    assert _pricing.price_rows(forgotten, z, prices, listing, 0, n, wrong)[1] < 1.0 * n
    prices[2] = 0.75
    elsewhere = np.sum(alone & (z == 2))
    assert _pricing.price_rows(forgotten, z, prices, listing, 0, n, wrong)[1] > 90 * elsewhere > 0


def test_a_row_that_was_given_a_choice_is_read_again() -> None:
    scores = np.array([[5.0, 0.0], [0.0, 5.0], [5.0, 0.0]])
    listing, z = listed(scores, np.ones(3, np.bool_), np.zeros(2))
    wrong = np.empty(3, np.int32)
    z[2] = 1  # as if it had been moved
    _collect.enlist(listing, np.array([2], np.int32))
    assert _pricing.price_rows(scores, z, np.zeros(2), listing, 0, 3, wrong) == (10.0, 5.0, 5.0, 1)
    assert wrong[0] == 2


def test_rounding_is_never_taken_for_a_lead() -> None:
    """Above 2^24 float32 knows even numbers only, so a rival may seem further behind than it is."""
    generator, caught_up = np.random.default_rng(0), 0
    for _ in range(1000):
        scores = (2.0**24 + 2 * generator.integers(0, 4, (50, 3))).astype(np.float32)
        prices, radius = generator.uniform(0, 3, 3), generator.uniform(1, 5)
        listing, z = _collect.new_listing(scores, prices, radius), np.empty(50, np.int32)
        room = _choices.room_for_choices(scores, 50)
        m, _ = _collect.collect(scores, np.ones(50, np.bool_), listing, 0, 50, 1, room, 0, np.zeros(3), z)
        moved = prices - generator.uniform(0.5, 1) * radius * (np.arange(3) == 1)
        z[room.rows[:m]] = (scores[room.rows[:m]] - moved).argmax(1)
        _, regret, _, count = _pricing.price_rows(scores, z, moved, listing, 0, 50, np.empty(50, np.int32))
        assert regret == pytest.approx(regrets(scores, z, moved).sum(), rel=1e-12)
        caught_up += count
    assert caught_up > 10


@pytest.mark.parametrize("factor", [1.0, 1.1])
@pytest.mark.parametrize("radius", [1e-3, 1e-2, 3e-2])
@pytest.mark.parametrize("seed", range(3))
def test_rows_move_although_lists_gave_them_no_choice(
    seed: int, radius: float, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists that are much too short, from Python and in one compiled call: what a row is worth is what it is worth now.

    Rows that have to leave were alone, or shut in with an overfull expert.
    """
    n, k = 2048, 8
    scores = draw_scores("gumbel", n, k, seed)
    capacity = int(factor * n / k)
    expected = eq.assign(scores, capacity, method="cycle-cancelling")
    noise = 4 * radius * torch.rand(k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    near, target = (expected.prices + noise).numpy(), np.full(k, capacity)
    s, mask, prices, settled = scores.numpy(), np.ones(n, np.bool_), near.copy(), np.zeros(k)
    listing, z, room = _collect.new_listing(s, prices, radius), np.empty(n, np.int32), _choices.room_for_choices(s, n)
    m, _ = _collect.collect(s, mask, listing, 0, n, 1, room, 0, settled, z)
    choices = _choices.first(room, m)
    solved, value, regret = _solve.finish_usual(s, mask, target, listing, choices, settled, prices, z)
    assert solved
    assert value == pytest.approx(worth(s, z).sum(), rel=1e-12)
    assert value == pytest.approx(float(expected.value), rel=1e-9)
    assert regret == pytest.approx(regrets(s, z, prices).sum(), abs=1e-9)

    def too_short(_s: object, _m: object, _t: object, _k: object, _w: object, prices: Floats, _z: object) -> object:
        prices[:] = near
        return radius, 0.0

    monkeypatch.setattr(_primal_dual, "BLOCK_ROWS", 1024)
    monkeypatch.setattr(_primal_dual._solve, "coarse_prices", too_short)
    a = eq.assign(scores, capacity)
    assert float(a.value) == pytest.approx(worth(s, a.z.numpy().astype(np.int32)).sum(), rel=1e-12)
    assert float(a.value) == pytest.approx(float(expected.value), rel=1e-9)
