# SPDX-License-Identifier: Apache-2.0
"""Groups of experts that share no rows: found, and moved by as much as balance asks for."""

import numpy as np
import pytest
from numpy.typing import NDArray

import equipoise as eq
from equipoise.assignment._kernels import _choices, _collect, _groups
from support.families import draw_scores

Floats = NDArray[np.float64]


def linked(k: int, *pairs: tuple[int, int]) -> Floats:
    """The Laplacian of pairs of experts that share ten rows each."""
    links = np.zeros((k, k))
    for j, t in pairs:
        links[j, t] = links[t, j] = 10.0
    return np.diag(links.sum(0)) - links


def counts(scores: Floats, prices: Floats) -> NDArray[np.int64]:
    return np.bincount((scores - prices).argmax(1), minlength=scores.shape[1])


def apart(scores: Floats, capacity: Floats, prices: Floats, hessian: Floats, slack: bool) -> bool:
    mask, demand = np.ones(len(scores), np.bool_), counts(scores, prices).astype(np.float64)
    return _groups.shift_groups_apart(scores, mask, 1, capacity, slack, prices, demand, hessian)


def test_groups_are_what_links_connect() -> None:
    prices = np.array([0.5, 0.5, np.inf, 0.0, 0.0, 1.0])
    nobody = np.zeros(6, np.bool_)
    labels, groups = _groups.group_experts(linked(6, (0, 5), (3, 1)), prices, nobody)
    assert (labels.tolist(), groups) == ([0, 1, -1, 1, 2, 0], 3)
    resting = prices == 0  # together whatever they share, and whoever shares rows with them
    labels, groups = _groups.group_experts(linked(6, (0, 5), (3, 1)), prices, resting)
    assert (labels.tolist(), groups) == ([1, 0, -1, 0, 0, 1], 2)


def test_a_weak_link_connects_nobody() -> None:
    weak = linked(2, (0, 1)) * (0.9 * _groups.SHARED / 10.0)
    assert _groups.group_experts(weak, np.zeros(2), np.zeros(2, np.bool_))[1] == 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_groups_far_apart(dtype: str) -> None:
    """Of 100 rows, 70 want the first two experts by far. The prices of both rise until just 20 rows want to leave."""
    generator = np.random.default_rng(0)
    scores = generator.normal(size=(100, 4))
    scores[:70, :2] += 30.0
    scores[70:, 2:] += 30.0
    scores, prices = scores.astype(dtype), np.zeros(4)
    assert apart(scores, np.full(4, 25.0), prices, linked(4, (0, 1), (2, 3)), slack=False)
    assert counts(scores, prices)[:2].sum() == pytest.approx(50, abs=1)  # one row is tied
    assert prices[0] == prices[1] > 20.0
    assert prices[2] == prices[3] == 0.0


def test_several_groups_pass_rows_on() -> None:
    """Rows that leave the first group overfill the second one, which has to rise as well."""
    generator = np.random.default_rng(0)
    scores = 0.1 * generator.normal(size=(90, 3))
    scores[:60] += [20.0, 10.0, 0.0]
    scores[60:] += [0.0, 20.0, 10.0]
    prices = np.zeros(3)
    assert apart(scores, np.full(3, 30.0), prices, linked(3), slack=False)
    assert np.abs(counts(scores, prices) - 30).max() <= 2


def test_with_slack_a_group_that_is_too_dear_comes_down() -> None:
    generator = np.random.default_rng(0)
    scores = generator.normal(size=(100, 2))
    scores[:80, 0] += 30.0
    prices = np.array([50.0, 0.0])  # nobody takes the first expert
    assert apart(scores, np.array([60.0, 80.0]), prices, linked(2), slack=True)
    assert counts(scores, prices)[0] == pytest.approx(60, abs=1)
    prices = np.array([50.0, 0.0])
    assert apart(scores, np.array([98.0, 80.0]), prices, linked(2), slack=True)
    assert prices.tolist() == [0.0, 0.0]  # and not below: it has room for all who want it


@pytest.mark.parametrize("groups", [1, _groups.MOST_GROUPS + 1])
def test_one_group_or_too_many_stay(groups: int) -> None:
    scores = np.random.default_rng(0).normal(size=(100, groups))
    prices = np.zeros(groups)
    assert not apart(scores, np.ones(groups), prices, linked(groups), slack=False)
    assert not prices.any()


def test_rows_that_can_go_nowhere_else_stop_it() -> None:
    scores = np.zeros((10, 2))
    scores[:, 1] = -np.inf
    prices = np.zeros(2)
    assert not apart(scores, np.full(2, 5.0), prices, linked(2), slack=False)
    assert not prices.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_groups_of_rows_that_nobody_has_checked(bad: float) -> None:
    """Groups are moved before scores are refused: what is wrong in them must not keep the search going for ever."""
    scores = np.random.default_rng(0).normal(size=(100, 3))
    scores[:80, 0] += 30.0
    scores[5] = bad
    apart(scores, np.full(3, 34.0), np.zeros(3), linked(3), slack=False)
    clusters = draw_scores("clustered", 4096, 16, 0)
    clusters[5] = bad
    with pytest.raises(ValueError, match="row 5"):
        eq.assign(clusters)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("k", [5, 16, 21])
def test_collecting_candidates_meets_every_illegal_score(k: int, tied: bool, bad: float, dtype: str) -> None:
    """Candidates are found eight experts at a time, and the last few one by one; tied ones do not fit in a list."""
    generator = np.random.default_rng(0)
    for j in range(k):
        scores = (np.zeros((6, k)) if tied else generator.normal(size=(6, k))).astype(dtype)
        scores[3, j] = bad
        choices, z = _choices.room_for_choices(scores, 6), np.zeros(6, np.int32)
        listing = _collect.new_listing(scores, generator.uniform(0.0, 1.0, k) * (not tied), 0.1)
        _, row = _collect.collect(scores, np.ones(6, np.bool_), listing, 0, 6, 1, choices, 0, np.zeros(k), z)
        assert row == 3
