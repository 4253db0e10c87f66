# SPDX-License-Identifier: Apache-2.0
"""Small problems against enumeration, for every method, and what must not change the value."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import equipoise as eq
from support.methods import EXACT, METHODS

SEEDS = st.integers(0, 2**32 - 1)
Check = Callable[[torch.Tensor, eq.Assignment], None]


def magnitude(scores: torch.Tensor) -> float:
    return float(scores[scores.isfinite()].abs().max()) if bool(scores.isfinite().any()) else 0.0


@pytest.mark.parametrize("method", EXACT)
@given(seed=SEEDS, warm=st.booleans(), single=st.booleans())
def test_exact_methods_equal_enumeration(
    enumerate_all: Callable,
    random_problem: Callable,
    check_certified: Check,
    method: str,
    seed: int,
    warm: bool,
    single: bool,
) -> None:
    scores, capacity, mask = random_problem(seed)
    scores = scores.float() if single else scores
    exact = enumerate_all(scores, capacity, mask)
    prices = torch.linspace(3, -1, len(capacity), dtype=torch.float64) if warm else None
    if not exact.feasible:
        with pytest.raises(ValueError, match="scores must leave"):
            eq.assign(scores, capacity, mask=mask, prices=prices, method=method)
        return
    a = eq.assign(scores, capacity, mask=mask, prices=prices, method=method)
    check_certified(scores, a)
    assert abs(float(a.value) - exact.value) <= 1e-9 * max(abs(exact.value), magnitude(scores))


@given(seed=SEEDS, warm=st.booleans())
def test_auction_is_feasible_and_brackets_enumeration(
    enumerate_all: Callable, random_problem: Callable, seed: int, warm: bool
) -> None:
    scores, capacity, mask = random_problem(seed)
    exact = enumerate_all(scores, capacity, mask)
    prices = torch.linspace(3, -1, len(capacity), dtype=torch.float64) if warm else None
    if not exact.feasible:
        with pytest.raises(ValueError, match="scores must leave"):
            eq.assign(scores, capacity, mask=mask, prices=prices, method="auction")
        return
    a = eq.assign(scores, capacity, mask=mask, prices=prices, method="auction")
    assert bool((a.counts <= capacity).all())
    assert torch.equal(a.z < scores.shape[1], mask)
    rounding = 1e-12 * max(abs(exact.value), magnitude(scores))
    assert float(a.value) - rounding <= exact.value <= float(a.value) + float(a.gap) + rounding


@st.composite
def legal_problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Scores without forbidden pairs, capacities that hold them, and a seed for what is done to them."""
    n, k = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    seed = draw(SEEDS)
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(n, k, generator=g, dtype=torch.float64)
    if draw(st.booleans()):
        scores = (2 * scores).round() / 2  # ties
    slack = draw(st.integers(0, 3))
    capacity = torch.bincount(torch.randint(k, (n + slack,), generator=g), minlength=k)
    return scores, capacity, seed


@pytest.mark.parametrize("method", EXACT)
class TestInvariance:
    @given(problem=legal_problems())
    def test_order_of_rows_and_experts(
        self, check_certified: Check, method: str, problem: tuple[torch.Tensor, torch.Tensor, int]
    ) -> None:
        scores, capacity, seed = problem
        g = torch.Generator().manual_seed(seed + 1)
        rows, experts = torch.randperm(len(scores), generator=g), torch.randperm(len(capacity), generator=g)
        a = eq.assign(scores, capacity, method=method)
        b = eq.assign(scores[rows][:, experts], capacity[experts], method=method)
        check_certified(scores[rows][:, experts], b)
        assert float(b.value) == pytest.approx(float(a.value), rel=2e-9, abs=2e-9)

    @given(problem=legal_problems())
    def test_constant_added_to_each_row(
        self, check_certified: Check, method: str, problem: tuple[torch.Tensor, torch.Tensor, int]
    ) -> None:
        scores, capacity, seed = problem
        shift = 10 * torch.randn(len(scores), 1, generator=torch.Generator().manual_seed(seed + 1)).double()
        a = eq.assign(scores, capacity, method=method)
        b = eq.assign(scores + shift, capacity, method=method)
        check_certified(scores + shift, b)
        assert float(b.value) == pytest.approx(float(a.value + shift.sum()), rel=2e-9, abs=2e-7)

    @given(problem=legal_problems())
    def test_constant_added_to_each_expert_of_a_tight_problem(
        self, check_certified: Check, method: str, problem: tuple[torch.Tensor, torch.Tensor, int]
    ) -> None:
        scores, capacity, seed = problem
        while int(capacity.sum()) > len(scores):
            capacity[int(capacity.argmax())] -= 1
        shift = 10 * torch.randn(len(capacity), generator=torch.Generator().manual_seed(seed + 1)).double()
        a = eq.assign(scores, capacity, method=method)
        b = eq.assign(scores + shift, capacity, method=method)
        check_certified(scores + shift, b)
        assert float(b.value) == pytest.approx(float(a.value + (shift * capacity).sum()), rel=2e-9, abs=2e-7)


def test_value_does_not_depend_on_the_exact_method(generator: torch.Generator) -> None:
    scores = torch.randn(4, 120, 6, generator=generator)
    values = [eq.assign(scores, 24, method=method).value for method in ("auto", *EXACT)]
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=0)
    torch.testing.assert_close(values[1], values[2], rtol=2e-9, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_padding_may_hold_anything(method: str, generator: torch.Generator) -> None:
    scores = torch.randn(7, 3, generator=generator)
    clean = eq.assign(scores[:5], 2, method=method)
    scores[5], scores[6, 0] = math.nan, math.inf
    a = eq.assign(scores, 2, mask=torch.tensor([True] * 5 + [False] * 2), method=method)
    assert a.z.tolist() == [*clean.z.tolist(), 3, 3]
    assert torch.equal(a.value, clean.value)
    assert torch.equal(a.counts, clean.counts)


def test_ties_are_broken_in_the_same_way_every_time() -> None:
    for scores in (torch.zeros(6, 3), torch.zeros(4096, 16), torch.ones(3000, 40)):
        first = eq.assign(scores)
        assert torch.equal(first.z, eq.assign(scores.clone()).z)
        assert float(first.value) == float(scores[:, 0].sum())
