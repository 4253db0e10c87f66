# SPDX-License-Identifier: Apache-2.0
"""Scores and prices at the ends of what float64 can hold: exact results, or a message that says why there are none."""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise.assignment._range import Solved, _power_of_two, solve_in_range
from support.methods import EXACT, METHODS

TOO_LARGE = (
    r"scores must have a total, and differences, that float64 can hold .*, got scores of up to .*: divide them by"
)
Check = Callable[[Tensor, eq.Assignment], None]


def draw_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("k", [2, 3, 4])
def test_huge_scores_equal_enumeration_or_are_refused(method: str, k: int, enumerate_all: Callable) -> None:
    solved = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        units = torch.randint(-7, 4, [3, k], generator=generator).double()
        capacity = torch.full([k], 2 if k == 2 else 1)
        expected = enumerate_all(units, capacity).value
        # 7 * 2**1021 is the largest multiple that float64 holds. A price may be beyond it where the value is not.
        if abs(expected) > 7 or float(eq.assign(units, capacity, method=method).prices.max()) > 7:
            with pytest.raises(ValueError, match=TOO_LARGE):
                eq.assign(units * 2.0**1021, capacity, method=method)
            continue
        a = eq.assign(units * 2.0**1021, capacity, method=method)
        assert float(a.value) == expected * 2.0**1021
        assert float(a.gap) == 0
        solved += 1
    assert solved >= 20


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n", "k"), [(9, 2), (8, 4), (600, 6), (1200, 12)])
@pytest.mark.parametrize("exponent", [990, 1015, 1018])
def test_factor_of_a_power_of_two_changes_nothing(
    method: str, n: int, k: int, exponent: int, check_certified: Check
) -> None:
    # Rows of opposite sign: the total is small though no part of it is.
    unit = draw_normal(n, k) / 1024 + 10.0 * (-1.0) ** torch.arange(n).unsqueeze(-1)
    a, b = eq.assign(unit, method=method), eq.assign(unit * 2.0**exponent, method=method)
    assert torch.equal(a.z, b.z)
    value, prices, gap = (x / 2.0**exponent for x in (b.value, b.prices, b.gap))
    torch.testing.assert_close(value, a.value, rtol=1e-11, atol=0.0)
    torch.testing.assert_close(gap, a.gap, rtol=1e-9, atol=1e-12)
    if method != "auction":
        check_certified(unit, replace(b, value=value, prices=prices, gap=gap))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n", "k"), [(8, 2), (8, 3), (1200, 12)])
@pytest.mark.parametrize("sign", [1, -1])
def test_total_beyond_float64(method: str, n: int, k: int, sign: int) -> None:
    scores = sign * (1 + draw_normal(n, k).abs() / 16) * 1e308
    with pytest.raises(ValueError, match=TOO_LARGE):
        eq.assign(scores, method=method)
    a = eq.assign(scores / 2**40, method=method)
    assert bool(a.value.isfinite())


def test_problem_that_is_too_large_is_named() -> None:
    scores = draw_normal(2, 2, 8, 3)
    scores[1, 0] = 1e308
    with pytest.raises(ValueError, match=r"got scores of up to 1e\+308 in problem 2: divide"):
        eq.assign(scores)


@pytest.mark.parametrize("method", METHODS)
def test_each_problem_has_its_own_scale(method: str) -> None:
    scores = draw_normal(3, 8, 4)
    scale = torch.tensor([2.0**-1000, 1.0, 2.0**1020], dtype=torch.float64)[:, None, None]
    scores = torch.where(scale > 1, scores / 32, scores) * scale
    together = eq.assign(scores, method=method)
    for i in range(3):
        alone = eq.assign(scores[i], method=method)
        assert torch.equal(alone.z, together.z[i])
        assert float(alone.value) == float(together.value[i])
        assert torch.equal(alone.prices, together.prices[i])


@pytest.mark.parametrize("method", METHODS)
def test_masked_rows_may_hold_anything(method: str) -> None:
    scores = draw_normal(8, 4) * 2.0**1010
    mask = torch.arange(8) != 3
    expected = eq.assign(scores, mask=mask, method=method)
    for anything in (1.7e308, -1.7e308, math.nan, math.inf):
        scores[3] = anything
        a = eq.assign(scores, mask=mask, method=method)
        assert torch.equal(a.z, expected.z)
        assert torch.equal(a.prices, expected.prices)


def test_masked_rows_do_not_set_the_scale() -> None:
    scores, mask = draw_normal(2, 8, 4), torch.arange(8).expand(2, 8) != 3
    scores[0, 3] = 1.7e308
    assert _power_of_two(scores, mask, torch.Tensor.cpu).tolist() == [1.0, 1.0]
    assert _power_of_two(scores, None, torch.Tensor.cpu)[0] < 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n", "k"), [(8, 4), (1200, 12)])
def test_what_is_wrong_with_huge_scores_is_still_said(method: str, n: int, k: int) -> None:
    scores = draw_normal(n, k) * 1e305
    for bad, message in ((math.nan, "got NaN in row 5"), (math.inf, r"got \+inf in row 5")):
        with pytest.raises(ValueError, match=message):
            eq.assign(scores.index_fill(0, torch.tensor([5]), bad), method=method)
    c = n // k
    scores[2 : 2 * c + 3, 2:] = -math.inf
    with pytest.raises(ValueError, match=rf"-inf confines {2 * c + 1} rows, among them row 2, to experts 0, 1, which"):
        eq.assign(scores, method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n", "k"), [(9, 2), (8, 4), (600, 6), (1200, 12)])
def test_largest_scores_of_shorter_types(method: str, n: int, k: int, check_certified: Check) -> None:
    unit = draw_normal(n, k)
    unit /= unit.abs().max()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        scores = (unit * torch.finfo(dtype).max).to(dtype)
        a = eq.assign(scores, method=method)
        assert torch.equal(a.z, eq.assign(scores.double(), method=method).z)
        if method != "auction":
            check_certified(scores, a)


def exact_gap(scores: Tensor, a: eq.Assignment) -> Fraction:
    """The gap in rational arithmetic: what a reader of the prices would find."""
    gap = Fraction(0)
    prices = [Fraction(p) for p in a.prices.tolist()]
    for row, expert in zip(scores.tolist(), a.z.tolist(), strict=True):
        offers = [Fraction(s) - p if s > -math.inf else None for s, p in zip(row, prices, strict=True)]
        gap += max(x for x in offers if x is not None) - offers[expert]
    return gap + sum(p * (c - m) for p, c, m in zip(prices, a.capacity.tolist(), a.counts.tolist(), strict=True))


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
class TestWarmStartFromAnotherScale:
    @pytest.mark.parametrize("start", ["one", "line", "random", "equal", "huge"])
    @pytest.mark.parametrize(("n", "k"), [(3, 3), (8, 4), (9, 2), (64, 8), (1200, 12)])
    def test_prices_are_on_the_scale_of_the_scores(
        self, method: str, dtype: torch.dtype, n: int, k: int, start: str
    ) -> None:
        prices = {
            "one": 1e6 * torch.eye(k, dtype=torch.float64)[0],
            "line": torch.linspace(0, 1.4e6, k, dtype=torch.float64),
            "random": 1e6 * torch.rand(k, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
            "equal": torch.full([k], 1e6, dtype=torch.float64),
            "huge": 1e308 * torch.linspace(-1, 1, k, dtype=torch.float64),
        }[start]
        # Cycle-cancelling takes 20 ms a problem: 3 for each start, size and dtype, which are 120 in all.
        seeds = 1 if n > 100 else 10 if method == "primal-dual" else 3
        for seed in range(seeds):
            # Half of the pairs are forbidden, so that few chains of moves connect the experts.
            scores = (1e-12 * draw_normal(n, k, seed=seed)).to(dtype)
            forbidden = draw_normal(n, k, seed=seed + 100) > 0
            forbidden[torch.arange(n), torch.arange(n) % k] = False
            scores = scores.masked_fill(forbidden, -math.inf)
            a, cold = eq.assign(scores, prices=prices, method=method), eq.assign(scores, method=method)
            scale = max(abs(float(a.value)), 1e-12)
            assert float(a.prices.max()) <= k * 20e-12
            assert float(exact_gap(scores, a)) <= 1e-9 * scale
            assert float(a.value) == pytest.approx(float(cold.value), rel=2e-9)

    def test_only_prices_that_say_nothing_are_left_out(self, method: str, dtype: torch.dtype) -> None:
        # Prices far above the average score, yet within the scores' differences: the start stands.
        scores = torch.zeros(8, 4, dtype=dtype)
        scores[:, 0] = 1e4
        scores[::2, 0] -= 1e4
        start = torch.tensor([1e4, 0.0, 0.0, 0.0], dtype=torch.float64)
        a = eq.assign(scores - scores.mean(), prices=start, method=method)
        assert float(exact_gap(scores - scores.mean(), a)) == 0


def test_prices_that_are_not_finite_are_refused_beside_huge_scores() -> None:
    with pytest.raises(ValueError, match="prices must be finite"):
        eq.assign(draw_normal(8, 4) * 1e300, prices=torch.full([4], math.nan, dtype=torch.float64))


@pytest.mark.parametrize(
    ("dtype", "scale", "calls"), [(torch.float32, 1e30, 1), (torch.float64, 1.0, 1), (torch.float64, 1e300, 2)]
)
def test_only_an_error_that_overflow_may_have_caused_is_looked_into(
    dtype: torch.dtype, scale: float, calls: int
) -> None:
    """Another attempt costs time, and for float32 the time to compile kernels for float64."""
    seen = list[torch.dtype]()

    def refuse(scores: Tensor, *_: object) -> Solved:
        seen.append(scores.dtype)
        raise ValueError("scores must leave the rows room")

    with pytest.raises(ValueError, match="leave the rows room"):
        solve_in_range(refuse, (draw_normal(8, 4) * scale).to(dtype), None, None, None)
    assert len(seen) == calls
