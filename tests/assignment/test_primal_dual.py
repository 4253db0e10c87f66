# SPDX-License-Identifier: Apache-2.0
"""The default solver's two ways through a problem, and where it has to change its mind, give one value."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.assignment import _primal_dual
from support.families import FAMILIES, draw_scores

Check = Callable[[torch.Tensor, eq.Assignment], None]


def largest_score(scores: torch.Tensor) -> float:
    return float(scores[scores.isfinite()].double().abs().max())


@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize("family", FAMILIES)
def test_small_problems_either_way(
    family: str, factor: float, check_certified: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k = 400, 8
    scores, capacity = draw_scores(family, n, k, seed=7), math.ceil(n * factor / k)
    monkeypatch.setattr(_primal_dual, "SMALL_ROWS", n)
    direct = eq.assign(scores, capacity)
    monkeypatch.setattr(_primal_dual, "SMALL_ROWS", 0)
    sampled = eq.assign(scores, capacity)
    check_certified(scores, sampled)
    assert abs(float(direct.value - sampled.value)) <= 2e-9 * max(abs(float(direct.value)), largest_score(scores))


@pytest.mark.parametrize("block", [64, 700, 10**6])
def test_blocks_only_change_the_order_of_sums(
    block: int, check_certified: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = draw_scores("clustered", 2000, 8, seed=8)
    whole = eq.assign(scores)
    monkeypatch.setattr(_primal_dual, "BLOCK_ROWS", block)
    cut = eq.assign(scores)
    check_certified(scores, cut)
    assert float(cut.value) == pytest.approx(float(whole.value), rel=2e-9)


# What every 4th, 8th, 16th ... row says about the prices is wrong here: those rows are unlike the others.
@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize("stride", [4, 16, 64])
@pytest.mark.parametrize("offset", [20.0, 1e4])
def test_samples_that_mislead(stride: int, offset: float, factor: float, check_certified: Check) -> None:
    n, k = 4096, 16
    scores = draw_scores("gumbel", n, k, seed=9)
    scores[::stride, 0] += offset
    check_certified(scores, eq.assign(scores, math.ceil(n * factor / k)))


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_rows_in_the_order_of_their_experts(factor: float, check_certified: Check) -> None:
    n, k = 4096, 16
    scores = draw_scores("logits", n, k, seed=10)
    scores = scores[scores.argmax(-1).argsort()]
    check_certified(scores, eq.assign(scores, math.ceil(n * factor / k)))


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_sampled_rows_alone_would_have_no_solution(factor: float, check_certified: Check) -> None:
    # Every 16th row insists on expert 0, which can just hold them.
    n, k = 4096, 16
    scores = draw_scores("gumbel", n, k, seed=11)
    scores[::16, 1:] = -math.inf
    a = eq.assign(scores, math.ceil(n * factor / k))
    check_certified(scores, a)
    assert bool((a.z[::16] == 0).all())


@pytest.mark.parametrize("n", [60, 4096])
def test_capacities_far_from_equal(n: int, check_certified: Check) -> None:
    scores = draw_scores("gumbel", n, 16, seed=12)
    few = torch.tensor([0, 0, 1, 1, 2, 3, 0, 5, 1, 0, 2, 1, 0, 1, 3])
    capacity = torch.cat([few, n - few.sum().view(1)])
    tight = eq.assign(scores, capacity)
    check_certified(scores, tight)
    assert torch.equal(tight.counts, capacity)
    check_certified(scores, eq.assign(scores, 2 * capacity))


@pytest.mark.parametrize("n", [60, 4096])
def test_room_for_all_is_an_argmax(n: int) -> None:
    scores = draw_scores("gumbel", n, 16, seed=13)
    a = eq.assign(scores, n)
    assert torch.equal(a.z, scores.argmax(-1))
    assert (a.prices.tolist(), a.gap.item()) == ([0.0] * 16, 0.0)


@pytest.mark.parametrize("n", [60, 2000])
@pytest.mark.parametrize("offset", [1e6, -1e6])
def test_large_constants_in_rows_leave_the_rest_exact(n: int, offset: float, check_certified: Check) -> None:
    plain = draw_scores("gumbel", n, 8, seed=14).double()
    shift = offset * torch.rand(n, 1, generator=torch.Generator().manual_seed(15)).double()
    a = eq.assign(plain + shift)
    check_certified(plain + shift, a)
    chosen = plain.gather(-1, a.z[:, None]).sum()
    # Rounding of plain + shift is 1e-10 a row.
    assert float(chosen) == pytest.approx(float(eq.assign(plain).value), abs=2e-10 * n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [60, 2000])
def test_scores_at_the_end_of_their_range(n: int, dtype: torch.dtype, check_certified: Check) -> None:
    unit = draw_scores("gumbel", n, 8, seed=16).to(dtype)
    # Sums of n scores must stay finite in float64; in float32 the largest number will do.
    top = 1e290 if dtype == torch.float64 else torch.finfo(dtype).max / 64
    for scale in (top, 2 * torch.finfo(dtype).tiny):
        scores = (unit / unit.abs().max() * 64) * scale / 64
        check_certified(scores, eq.assign(scores))


@pytest.mark.parametrize("rows", [4382, 9000])
def test_offers_beyond_the_range_of_the_scores(rows: int) -> None:
    """Scores of 1e37, and prices that float32 cannot express, are legal."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        scores = torch.from_numpy((rng.normal(size=(rows, 3)) + np.linspace(0, 1, 3)) * 1e37).float()
        a = eq.assign(scores)
        assert a.gap <= 1e-9 * max(abs(float(a.value)), float(scores.abs().max()))
    scores = torch.from_numpy(np.random.default_rng(0).normal(size=(rows, 3))).float()
    for capacity in ([0, rows, rows], [rows, rows, rows // 2]):
        far = torch.tensor([0.0, 1e39, 1e39], dtype=torch.float64)
        a, b = eq.assign(scores, capacity), eq.assign(scores, capacity, prices=far)
        assert float(b.value) == pytest.approx(float(a.value), rel=1e-12)
