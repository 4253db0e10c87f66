# SPDX-License-Identifier: Apache-2.0
"""eq.sinkhorn against POT, against plain alternating normalisation, and against what it promises."""

import math
import warnings
from collections.abc import Callable

import numpy
import ot
import pytest
import torch
from torch import Tensor

from equipoise.balancing import Balanced, ConvergenceWarning, sinkhorn

SHAPES = [(1, 1), (1, 3), (4, 1), (3, 5), (8, 8), (40, 3), (100, 2), (64, 16), (50, 20)]


def normal(*shape: int, sd: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sd * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def assert_balanced(balanced: Balanced, target: Tensor, tight: bool, tolerance: float) -> None:
    """Rows sum to 1; columns to the target, or to at most it and exactly it where the price is positive."""
    p = balanced.log_p.double().exp()
    columns = p.sum(-2)
    torch.testing.assert_close(p.sum(-1), torch.ones(p.shape[:-1], dtype=torch.float64), rtol=0, atol=1e-6)
    must_meet = torch.ones_like(columns, dtype=torch.bool) if tight else balanced.prices > 0
    target = target.expand_as(columns)
    relative = (columns - target) / target
    assert (relative[must_meet].abs() <= tolerance).all()
    assert (relative <= tolerance).all()
    assert (balanced.prices >= 0).all()
    assert balanced.prices.isfinite().all()
    if tight:
        assert (balanced.prices.amin(-1) == 0).all()


class TestAgainstPOT:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("sd", [0.1, 1.0, 5.0])
    def test_equal_columns(self, shape: tuple[int, int], sd: float) -> None:
        n, k = shape
        logits = normal(n, k, sd=sd)
        rows, columns = numpy.full(n, 1 / n), numpy.full(k, 1 / k)
        expected = n * ot.bregman.sinkhorn_log(
            rows, columns, -logits.numpy(), 1.0, numItermax=100_000, stopThr=1e-13, warn=False
        )
        log_p = sinkhorn(logits, tolerance=1e-12).log_p
        torch.testing.assert_close(log_p.exp(), torch.from_numpy(expected), rtol=1e-7, atol=1e-9)

    def test_unequal_columns_without_slack(self) -> None:
        capacity = torch.tensor([1, 7, 2, 10])
        logits = normal(20, 4, sd=2.0)
        expected = 20 * ot.bregman.sinkhorn_log(
            numpy.full(20, 1 / 20), capacity.numpy() / 20, -logits.numpy(), 1.0, numItermax=100_000, stopThr=1e-13
        )
        log_p = sinkhorn(logits, capacity, tolerance=1e-12).log_p
        torch.testing.assert_close(log_p.exp(), torch.from_numpy(expected), rtol=1e-7, atol=1e-9)


class TestColumns:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("sd", [0.1, 3.0, 30.0, 300.0])
    def test_sum_to_rows_over_experts_by_default(self, shape: tuple[int, int], sd: float) -> None:
        n, k = shape
        balanced = sinkhorn(normal(n, k, sd=sd), tolerance=1e-8)
        assert balanced.converged
        assert balanced.error <= 1e-8
        assert_balanced(balanced, torch.tensor(n / k, dtype=torch.float64), tight=True, tolerance=2e-8)

    @pytest.mark.parametrize("sd", [0.1, 1.0, 10.0, 30.0, 1000.0])
    @pytest.mark.parametrize("factor", [1.0, 1.1, 2.0])
    def test_sum_to_at_most_capacity_with_slack(self, sd: float, factor: float) -> None:
        logits = normal(6, 96, 12, sd=sd)
        capacity = math.ceil(96 / 12 * factor)
        balanced = sinkhorn(logits, capacity)
        assert balanced.converged.all()
        target = torch.tensor(capacity, dtype=torch.float64)
        assert_balanced(balanced, target, tight=factor == 1.0, tolerance=2e-6)

    def test_slack_matches_alternating_minimisation(self, plain_sinkhorn: Callable[..., Tensor]) -> None:
        logits = normal(5, 30, 4, sd=2.0)
        capacity = torch.tensor([[9, 8, 10, 8], [30, 30, 30, 30], [12, 3, 9, 9], [1, 1, 1, 30], [8, 8, 7, 7]])
        balanced = sinkhorn(logits, capacity, tolerance=1e-12)
        slack = plain_sinkhorn(logits[:4], capacity[:4].double(), 5000, slack=True)
        tight = plain_sinkhorn(logits[4:], capacity[4:].double(), 5000, slack=False)
        torch.testing.assert_close(balanced.log_p, torch.cat([slack, tight]), rtol=0, atol=1e-9)

    def test_probabilities_follow_from_the_prices(self) -> None:
        logits = normal(50, 6, sd=4.0)
        for capacity in (None, 9, 12, [50, 0, 10, 10, 10, 10]):
            balanced = sinkhorn(logits, capacity)
            torch.testing.assert_close(balanced.log_p, torch.log_softmax(logits - balanced.prices, -1))

    def test_nothing_to_do_leaves_the_softmax(self) -> None:
        logits = normal(3, 10, 4)
        balanced = sinkhorn(logits, 10)
        torch.testing.assert_close(balanced.log_p, torch.log_softmax(logits, -1))
        assert (balanced.prices == 0).all()
        assert (balanced.iterations == 1).all()

    def test_expert_of_capacity_zero_is_empty(self) -> None:
        for dtype in (torch.float32, torch.float64):
            logits = normal(30, 4, sd=50.0, dtype=dtype)
            balanced = sinkhorn(logits, [0, 10, 10, 10])
            assert (balanced.log_p[:, 0].exp() == 0).all()
            assert balanced.prices.isfinite().all()
            reduced = sinkhorn(logits[:, 1:], 10)
            torch.testing.assert_close(balanced.log_p[:, 1:], reduced.log_p, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("capacity", [7, [7, 7, 7], torch.tensor([7, 7, 7]), torch.tensor(7), numpy.int64(7)])
    def test_every_form_of_capacity(self, capacity: object) -> None:
        logits = normal(2, 20, 3, sd=3.0)
        expected = sinkhorn(logits, torch.full((2, 3), 7))
        if isinstance(capacity, numpy.int64):
            capacity = int(capacity)
        assert torch.equal(sinkhorn(logits, capacity).log_p, expected.log_p)  # pyright: ignore[reportArgumentType]


class TestSharpness:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("sd", [0.1, 1.0, 10.0, 30.0, 1e3, 1e4])
    def test_converges_at_any_standard_deviation(self, sd: float, dtype: torch.dtype) -> None:
        balanced = sinkhorn(normal(3, 256, 16, sd=sd, dtype=dtype))
        assert balanced.converged.all()
        assert_balanced(balanced, torch.tensor(16.0, dtype=torch.float64), tight=True, tolerance=2e-6)

    @pytest.mark.parametrize("offset", [-1e4, 1e4])
    def test_offsets_of_rows_and_columns_are_harmless(self, offset: float) -> None:
        logits = normal(200, 8, dtype=torch.float32)
        expected = sinkhorn(logits).log_p
        # float32 keeps 1e-3 of what was added to 1e4, which is all that may differ.
        rounded = logits + offset
        torch.testing.assert_close(sinkhorn(rounded).log_p, sinkhorn(rounded - offset).log_p, rtol=0, atol=1e-5)
        column = logits.clone()
        column[:, 3] += offset
        torch.testing.assert_close(sinkhorn(column).log_p, expected, rtol=0, atol=2e-3)

    def test_a_finite_stand_in_for_minus_infinity(self) -> None:
        logits = normal(64, 8)
        forbidden = torch.rand(64, 8, generator=torch.Generator().manual_seed(1)) < 0.3
        soft = sinkhorn(logits.masked_fill(forbidden, -1e9)).log_p.exp()
        hard = sinkhorn(logits.masked_fill(forbidden, -math.inf)).log_p.exp()
        torch.testing.assert_close(soft, hard, rtol=0, atol=1e-6)

    def test_structured_logits(self) -> None:
        generator = torch.Generator().manual_seed(3)
        rank_two = 100 * normal(120, 2, seed=1) @ normal(2, 10, seed=2)
        identical = normal(1, 10, sd=30.0).expand(120, 10)
        popular = 50.0 * torch.nn.functional.one_hot(torch.randint(0, 3, (120,), generator=generator), 10).double()
        heavy = normal(120, 10) / normal(120, 10, seed=9)
        balanced = sinkhorn(torch.stack([rank_two, identical, popular, heavy]))
        assert balanced.converged.all()
        assert_balanced(balanced, torch.tensor(12.0, dtype=torch.float64), tight=True, tolerance=2e-6)


class TestPattern:
    def test_forbidden_pairs_stay_forbidden(self) -> None:
        logits = normal(30, 5, sd=2.0)
        forbidden = torch.rand(30, 5, generator=torch.Generator().manual_seed(2)) < 0.4
        forbidden[torch.arange(30), torch.arange(30) % 5] = False
        balanced = sinkhorn(logits.masked_fill(forbidden, -math.inf))
        assert torch.equal(balanced.log_p == -math.inf, forbidden)
        assert_balanced(balanced, torch.tensor(6.0, dtype=torch.float64), tight=True, tolerance=2e-6)

    def test_separate_blocks_are_balanced_separately(self) -> None:
        a, b = normal(12, 3), normal(8, 2, seed=1)
        logits = torch.full((20, 5), -math.inf, dtype=torch.float64)
        logits[:12, :3], logits[12:, 3:] = a, b
        p = sinkhorn(logits).log_p.exp()
        torch.testing.assert_close(p[:12, :3], sinkhorn(a).log_p.exp(), rtol=0, atol=1e-6)
        torch.testing.assert_close(p[12:, 3:], sinkhorn(b).log_p.exp(), rtol=0, atol=1e-6)

    def test_pairs_that_only_the_balance_rules_out(self) -> None:
        # Rows 0 and 1 fill expert 0, so rows 2 and 3 cannot use it: their probability falls to 0 with the price.
        logits = torch.tensor([[0.0, -math.inf], [0.0, -math.inf], [0.0, 0.0], [0.0, 0.0]])
        balanced = sinkhorn(logits)
        assert balanced.converged
        torch.testing.assert_close(balanced.log_p.exp()[2:, 0], torch.zeros(2), rtol=0, atol=4e-6)


class TestMask:
    def test_masked_rows_do_not_count(self) -> None:
        logits = normal(3, 40, 6, sd=3.0)
        mask = torch.rand(3, 40, generator=torch.Generator().manual_seed(4)) < 0.6
        logits[~mask] = math.nan
        for capacity in (None, 8):
            balanced = sinkhorn(logits, capacity, mask=mask, tolerance=1e-10)
            assert (balanced.log_p[~mask] == 0).all()
            for i in range(3):
                alone = sinkhorn(logits[i][mask[i]], capacity, tolerance=1e-10)
                torch.testing.assert_close(balanced.log_p[i][mask[i]], alone.log_p, rtol=1e-8, atol=1e-8)
                torch.testing.assert_close(balanced.prices[i], alone.prices, rtol=1e-8, atol=1e-8)

    def test_a_problem_without_rows(self) -> None:
        mask = torch.tensor([[True, True], [False, False]])
        for capacity in (None, 1, [1, 1, 0]):
            balanced = sinkhorn(normal(2, 2, 3), capacity, mask=mask)
            assert balanced.converged.all()
            assert (balanced.log_p[1] == 0).all()
            assert (balanced.prices[1] == 0).all()


class TestShapes:
    def test_batch_dimensions(self) -> None:
        logits = normal(2, 3, 20, 4, sd=3.0)
        batched = sinkhorn(logits)
        assert batched.log_p.shape == (2, 3, 20, 4)
        assert batched.prices.shape == (2, 3, 4)
        for field in (batched.converged, batched.iterations, batched.error):
            assert field.shape == (2, 3)
        for i in range(2):
            for j in range(3):
                alone = sinkhorn(logits[i, j])
                assert alone.error.shape == ()
                assert alone.iterations == batched.iterations[i, j]
                torch.testing.assert_close(batched.log_p[i, j], alone.log_p, rtol=0, atol=1e-12)

    def test_more_problems_than_one_group(self) -> None:
        logits = normal(5, 5000, 20, sd=2.0, dtype=torch.float32)
        batched = sinkhorn(logits)
        assert batched.converged.all()
        for i in range(5):
            torch.testing.assert_close(batched.log_p[i], sinkhorn(logits[i]).log_p, rtol=0, atol=1e-5)

    @pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (0, 5, 3), (3, 0, 4, 2)])
    def test_empty(self, shape: tuple[int, ...]) -> None:
        for capacity in (None, 4):
            balanced = sinkhorn(torch.zeros(shape), capacity)
            assert balanced.log_p.shape == shape
            assert balanced.prices.shape == (*shape[:-2], shape[-1])
            assert balanced.converged.all()

    def test_input_is_not_changed(self) -> None:
        for shape in ((30, 4), (30, 20)):
            logits = normal(*shape, sd=5.0)
            before = logits.clone()
            sinkhorn(logits)
            assert torch.equal(logits, before)

    def test_strided_input(self) -> None:
        logits = normal(20, 30, sd=2.0)
        assert torch.equal(sinkhorn(logits.T).log_p, sinkhorn(logits.T.contiguous()).log_p)


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_result_is_that_of_float64(self, dtype: torch.dtype) -> None:
        logits = normal(2, 60, 5, sd=3.0, dtype=dtype)
        balanced = sinkhorn(logits)
        assert balanced.log_p.dtype == torch.float32
        assert balanced.prices.dtype == balanced.error.dtype == torch.float64
        torch.testing.assert_close(balanced.log_p.double(), sinkhorn(logits.double()).log_p, rtol=1e-5, atol=1e-5)

    def test_large_float32_starts_on_a_sample_of_rows(self) -> None:
        logits = normal(16384, 64, sd=3.0, dtype=torch.float32)
        balanced = sinkhorn(logits)
        assert balanced.converged
        assert_balanced(balanced, torch.tensor(256.0, dtype=torch.float64), tight=True, tolerance=2e-6)

    def test_tolerance_beyond_float32(self) -> None:
        logits = normal(4, 500, 8, sd=5.0, dtype=torch.float32)
        balanced = sinkhorn(logits, tolerance=1e-12)
        assert balanced.converged.all()
        torch.testing.assert_close(
            balanced.prices, sinkhorn(logits.double(), tolerance=1e-12).prices, rtol=0, atol=1e-9
        )

    def test_deterministic(self) -> None:
        logits = normal(3, 300, 20, sd=4.0, dtype=torch.float32)
        first, second = sinkhorn(logits), sinkhorn(logits)
        assert torch.equal(first.log_p, second.log_p)
        assert torch.equal(first.prices, second.prices)


class TestStopping:
    def test_warns_once_with_the_error_reached(self) -> None:
        logits = normal(4, 60, 6, sd=20.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            balanced = sinkhorn(logits, max_iterations=2)
        assert [w.category for w in caught] == [ConvergenceWarning]
        assert f"{float(balanced.error.max()):.1e}" in str(caught[0].message)
        assert not balanced.converged.any()
        assert (balanced.iterations == 2).all()
        assert balanced.log_p.isfinite().all()
        columns = balanced.log_p.exp().sum(-2)
        torch.testing.assert_close(balanced.error, (columns / 10 - 1).abs().amax(-1))
        torch.testing.assert_close(balanced.log_p.exp().sum(-1), torch.ones(4, 60, dtype=torch.float64))

    @pytest.mark.parametrize("cap", [1, 3, 10])
    def test_iterations_are_capped_on_large_matrices_too(self, cap: int) -> None:
        logits = normal(16384, 64, sd=30.0, dtype=torch.float32)
        with pytest.warns(ConvergenceWarning):
            balanced = sinkhorn(logits, max_iterations=cap, tolerance=1e-14)
        assert balanced.iterations <= cap
        assert not balanced.converged

    def test_unreachable_tolerance_ends_before_the_cap(self) -> None:
        with pytest.warns(ConvergenceWarning, match="relative column error of"):
            balanced = sinkhorn(normal(1000, 7, sd=3.0), tolerance=1e-300)
        assert balanced.iterations < 500
        assert balanced.error < 1e-13

    def test_convergence_is_reported_for_each_problem(self) -> None:
        logits = torch.stack([normal(40, 4, sd=0.1), normal(40, 4, sd=50.0)])
        with pytest.warns(ConvergenceWarning, match="in 1 of 2 problems"):
            balanced = sinkhorn(logits, max_iterations=4)
        assert balanced.converged.tolist() == [True, False]
