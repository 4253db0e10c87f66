# SPDX-License-Identifier: Apache-2.0
"""Independent sampling with capacity: rows beyond it are skipped."""

from collections.abc import Callable
from itertools import combinations, permutations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.ops import draw_gumbel
from equipoise.sampling import sample_independent, sample_skip

Problem = Callable[..., tuple[Tensor, Tensor]]


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(0, 20),
    k=st.integers(1, 5),
    slack=st.integers(1, 4),
    masked=st.booleans(),
    wide=st.booleans(),
)
def test_keeps_the_least_priorities_of_each_expert(
    seed: int, n: int, k: int, slack: int, masked: bool, wide: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, n, k, generator=generator)
    gumbel = draw_gumbel([2, n, k], generator=generator)
    priority = torch.rand(2, n, generator=generator, dtype=torch.float64 if wide else torch.float32)
    capacity = torch.randint(1, slack + 1, [2, k], generator=generator)
    mask = torch.rand(2, n, generator=generator) < 0.7 if masked else None
    s = sample_skip(logits, gumbel, priority, capacity=capacity, mask=mask)
    assert torch.equal(s.z, sample_independent(logits, gumbel, mask=mask).z)
    for b, j in product(range(2), range(k)):
        rows = [i for i in range(n) if s.z[b, i] == j]
        kept = [i for i in rows if s.kept[b, i]]
        limit = int(capacity[b, j])
        assert kept == sorted(sorted(rows, key=lambda i: float(priority[b, i]))[:limit])
        for i in rows:
            assert s.keep_weight[b, i] == torch.tensor(len(rows) / min(len(rows), limit))
    if mask is not None:
        assert bool((s.z[~mask] == k).all())
        assert not bool(s.kept[~mask].any())
        assert bool((s.keep_weight[~mask] == 0).all())
        assert bool((s.log_q[~mask] == 0).all())


def test_every_subset_of_an_experts_rows_is_as_likely() -> None:
    orders = torch.tensor(list(permutations(range(4)))).float() / 4
    logits = torch.tensor([[0.0, -50.0]] * 4).expand(24, 4, 2)
    s = sample_skip(logits, torch.zeros(24, 4, 2), orders, capacity=2)
    kept = [tuple(row.nonzero().flatten().tolist()) for row in s.kept]
    assert {subset: kept.count(subset) for subset in combinations(range(4), 2)} == dict.fromkeys(
        combinations(range(4), 2), 4
    )


@pytest.mark.parametrize(("n", "k", "expected"), [(6, 3, 2), (7, 3, 3), (1, 4, 1)])
def test_capacity_none_is_the_rows_over_the_experts_rounded_up(n: int, k: int, expected: int) -> None:
    s = sample_skip(torch.zeros(n, k), torch.zeros(n, k), torch.zeros(n))
    assert s.capacity is not None
    assert s.capacity.tolist() == [expected] * k


def test_capacity_none_counts_rows_that_are_not_masked() -> None:
    mask = torch.tensor([[True, True, True, False], [False] * 4])
    s = sample_skip(torch.zeros(2, 4, 2), torch.zeros(2, 4, 2), torch.rand(2, 4), mask=mask)
    assert s.capacity is not None
    assert s.capacity.tolist() == [[2, 2], [0, 0]]
    assert not bool(s.kept[1].any())


@pytest.mark.parametrize("capacity", [2, [2, 2], torch.tensor([2, 2]), torch.tensor([[2, 2]] * 3), torch.tensor(2)])
def test_forms_of_capacity(problem: Problem, capacity: object) -> None:
    logits, gumbel = problem(3, 6, 2)
    priority = torch.rand(3, 6, generator=torch.Generator().manual_seed(1))
    s = sample_skip(logits, gumbel, priority, capacity=capacity)
    assert torch.equal(s.kept, sample_skip(logits, gumbel, priority, capacity=2).kept)


def test_each_expert_has_its_own_capacity() -> None:
    logits = torch.tensor([[9.0, 0.0]] * 3 + [[0.0, 9.0]] * 3)
    s = sample_skip(logits, torch.zeros(6, 2), torch.arange(6.0), capacity=[1, 2])
    assert s.kept.tolist() == [True, False, False, True, True, False]
    assert s.keep_weight.tolist() == [3.0] * 3 + [1.5] * 3


def test_rows_may_be_permuted(problem: Problem, generator: torch.Generator) -> None:
    logits, gumbel = problem(9, 3)
    priority, order = torch.rand(9, generator=generator), torch.randperm(9, generator=generator)
    s, t = sample_skip(logits, gumbel, priority), sample_skip(logits[order], gumbel[order], priority[order])
    assert torch.equal(t.z, s.z[order])
    assert torch.equal(t.kept, s.kept[order])
    assert torch.equal(t.keep_weight, s.keep_weight[order])


def test_capacity_too_small_for_all_rows_is_fine(problem: Problem) -> None:
    logits, gumbel = problem(9, 3)
    s = sample_skip(logits, gumbel, torch.rand(9), capacity=1)
    assert int(s.kept.sum()) == int((s.counts > 0).sum())
