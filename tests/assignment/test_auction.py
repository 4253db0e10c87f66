# SPDX-License-Identifier: Apache-2.0
"""The auction always ends, is always feasible, and says how far off it is."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.assignment import _auction
from equipoise.assignment._auction import auction_assign
from equipoise.assignment._proof import certify
from equipoise.ops import draw_gumbel, rank_within_groups

INF = float("inf")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return draw_gumbel(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_result(
    scores: torch.Tensor, capacity: torch.Tensor, mask: torch.Tensor | None, z: torch.Tensor, prices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Feasible, and prices by the convention; returns value and gap."""
    k = scores.shape[-1]
    rows = torch.ones(z.shape, dtype=torch.bool) if mask is None else mask
    _, _, counts, value, _, _, gap = certify(scores, z, prices, capacity, mask)
    assert z.dtype == torch.int64
    assert prices.dtype == torch.float64
    assert bool((z[rows] < k).all())
    assert bool((z[~rows] == k).all())
    assert bool((counts <= capacity).all())
    assert bool(value.isfinite().all())
    assert bool(prices.isfinite().all())
    assert bool((prices >= 0).all())
    assert bool((prices[counts < capacity] == 0).all())
    assert bool((prices.amin(-1) == 0).all())
    assert bool((gap >= 0).all())
    return value, gap


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_feasible_whenever_anything_is(
    enumerate_all: Callable, random_problem: Callable, seed: int, warm: bool
) -> None:
    scores, capacity, mask = random_problem(seed)
    exact = enumerate_all(scores, capacity, mask)
    prices = torch.linspace(3, 0, len(capacity), dtype=torch.float64)[None] if warm else None
    if not exact.feasible:
        with pytest.raises(ValueError, match="scores must leave"):
            auction_assign(scores[None], capacity[None], mask[None], prices)
        return
    z, final_prices = auction_assign(scores[None], capacity[None], mask[None], prices)
    value, gap = check_result(scores[None], capacity[None], mask[None], z, final_prices)
    slack = 1e-12 * max(abs(exact.value), 1e-300)
    assert value.item() <= exact.value + slack
    assert value.item() + gap.item() >= exact.value - slack


@pytest.mark.parametrize("k", [2, 16])
def test_epsilon_is_the_median_lead_of_gumbel_noise_and_follows_the_scale(k: int) -> None:
    scores, rows = noise(1, 4000, k), torch.ones(1, 4000, dtype=torch.bool)
    epsilon = _auction._epsilon(scores, rows)
    # The best of k leads by more than x with probability k / (1 + (k - 1) e^x); one standard error is 0.02 at most.
    assert epsilon.item() == pytest.approx(math.log((2 * k - 1) / (k - 1)), abs=5 * 0.02)
    shifted = 1024.0 * (scores + torch.arange(4000.0)[:, None])
    torch.testing.assert_close(_auction._epsilon(shifted, rows), 1024.0 * epsilon)


def test_epsilon_is_positive_where_rows_are_flat() -> None:
    scores = torch.zeros(3, 5, 4, dtype=torch.float64)
    scores[1, 0, 0] = 2.0
    scores[2, :, 1:] = -INF
    epsilon = _auction._epsilon(scores, torch.ones(3, 5, dtype=torch.bool))
    assert bool((epsilon > 0).all())
    assert bool(epsilon.isfinite().all())


@pytest.mark.parametrize("scale", [2.0**100, 2.0**-100])
def test_scale_changes_neither_rounds_nor_result(scale: float) -> None:
    scores, capacity = noise(2, 60, 5), torch.full([2, 5], 13)
    z, prices = auction_assign(scores, capacity, None, None)
    z_scaled, prices_scaled = auction_assign(scale * scores, capacity, None, None)
    assert torch.equal(z, z_scaled)
    assert torch.equal(scale * prices, prices_scaled)


@pytest.mark.parametrize("k", [2, 16])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 8.0, 1e3])
def test_gap_is_at_most_the_last_epsilon_a_row_when_the_bidding_ends(
    k: int, sharpness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0

    def count(*arguments: torch.Tensor) -> torch.Tensor:
        nonlocal rounds
        rounds += 1
        return rank_within_groups(*arguments)

    monkeypatch.setattr(_auction, "rank_within_groups", count)
    scores = noise(3, 320, k) + sharpness * torch.randn(3, 320, k, generator=torch.Generator().manual_seed(1)).double()
    capacity = torch.full([3, k], 320 // k)
    z, prices = auction_assign(scores, capacity, None, None)
    _, gap = check_result(scores, capacity, None, z, prices)
    epsilon = _auction._epsilon(scores, torch.ones(3, 320, dtype=torch.bool))
    assert rounds < 100
    assert bool((gap <= 320 * epsilon * _auction._GROWTH ** (rounds - 1)).all())


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_any_number_of_rounds_ends_feasible(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_auction, "_MAX_ROUNDS", rounds)
    scores = noise(2, 50, 7)
    scores[torch.rand(scores.shape, generator=torch.Generator().manual_seed(2)) < 0.4] = -INF
    capacity = torch.tensor([8, 8, 8, 8, 8, 8, 2]).expand(2, 7)
    z, prices = auction_assign(scores, capacity, None, None)
    check_result(scores, capacity, None, z, prices)


def test_finite_scores_that_stand_for_forbidden_pairs_are_no_part_of_the_scale() -> None:
    scores, capacity = noise(2, 240, 12), torch.full([2, 12], 20)
    missing = torch.rand(scores.shape, generator=torch.Generator().manual_seed(5)) < 0.3
    expected, expected_prices = auction_assign(scores.masked_fill(missing, -INF), capacity, None, None)
    finite = scores.masked_fill(missing, torch.finfo(torch.float32).min)
    z, prices = auction_assign(finite, capacity, None, None)
    assert torch.equal(z, expected)
    assert torch.equal(prices, expected_prices)


def test_completion_moves_rows_along_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    # Row i may take experts i and i + 1; the last row only the first expert. Greedily every row takes the first it may,
    # and then all have to move.
    monkeypatch.setattr(_auction, "_MAX_ROUNDS", 0)
    n = 12
    scores = torch.full([1, n, n], -INF)
    for i in range(n - 1):
        scores[0, i, i], scores[0, i, i + 1] = 1.0, 0.0
    scores[0, n - 1, 0] = -1.0
    z, _ = auction_assign(scores, torch.ones(1, n, dtype=torch.int64), None, None)
    assert z[0].tolist() == [*range(1, n), 0]


def test_no_slack_and_free_slots_in_one_batch() -> None:
    scores = noise(2, 12, 4)
    capacity = torch.tensor([[3, 3, 3, 3], [12, 12, 12, 0]])
    z, prices = auction_assign(scores, capacity, None, None)
    _, gap = check_result(scores, capacity, None, z, prices)
    assert torch.equal(z[1], scores[1, :, :3].argmax(-1))
    assert float(gap[1]) == 0.0  # the price of the expert without capacity is set so that it costs nothing


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_floating_dtype_is_solved_as_its_values_are(dtype: torch.dtype) -> None:
    scores = noise(1, 40, 4).to(dtype)
    capacity = torch.full([1, 4], 10)
    for result, expected in zip(
        auction_assign(scores, capacity, None, None), auction_assign(scores.double(), capacity, None, None), strict=True
    ):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 3), (1, 4, 1), (1, 1, 1), (3, 2, 9)])
def test_empty_and_tiny(shape: tuple[int, int, int]) -> None:
    b, n, k = shape
    capacity = torch.full([b, k], -(-n // k))
    z, prices = auction_assign(noise(*shape), capacity, None, None)
    check_result(noise(*shape), capacity, None, z, prices)


def test_padding_may_hold_anything() -> None:
    scores = noise(1, 6, 2)
    clean = scores[:, :4].clone()
    scores[0, 4], scores[0, 5, 0] = math.nan, INF
    mask = torch.tensor([[True] * 4 + [False] * 2])
    capacity = torch.tensor([[2, 2]])
    z, prices = auction_assign(scores, capacity, mask, None)
    expected, expected_prices = auction_assign(clean, capacity, None, None)
    assert z[0].tolist() == [*expected[0].tolist(), 2, 2]
    assert torch.equal(prices, expected_prices)


@pytest.mark.parametrize(
    ("bad", "message"), [(math.nan, "NaN in row 3 of problem 1"), (INF, r"\+inf in row 3 of problem 1")]
)
@pytest.mark.parametrize("expert", [0, 2])
def test_illegal_scores(bad: float, message: str, expert: int) -> None:
    scores = noise(2, 6, 3)
    scores[1, 3, expert] = bad
    with pytest.raises(ValueError, match=message):
        auction_assign(scores, torch.tensor([[3, 3, 0], [3, 3, 0]]), None, None)


def test_a_row_without_expert_is_named() -> None:
    scores = noise(1, 4, 3)
    scores[0, 2] = -INF
    with pytest.raises(ValueError, match="row 2 is -inf for all"):
        auction_assign(scores, torch.full([1, 3], 2), None, None)


def test_rows_that_are_confined_are_named_with_their_experts() -> None:
    scores = noise(2, 8, 4)
    scores[1, 2:7, 1:3] = -INF
    with pytest.raises(
        ValueError, match=r"confines 5 rows of problem 1, among them row 2, to experts 0, 3, which hold 4"
    ):
        auction_assign(scores, torch.full([2, 4], 2), None, None)
