# SPDX-License-Identifier: Apache-2.0
"""Counting and ranking within groups, and the log-softmax of narrow matrices, against the obvious."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.ops import count_groups, log_softmax, rank_within_groups
from equipoise.ops._groups import _order_by_group, sort_integers


def obvious_ranks(groups: Tensor, keys: Tensor) -> Tensor:
    """For each row, how many rows of its group come before it: by key, then by position."""
    n = len(groups)
    before = (keys[None] < keys[:, None]) | (
        (keys[None] == keys[:, None]) & (torch.arange(n) < torch.arange(n)[:, None])
    )
    return (before & (groups[None] == groups[:, None])).sum(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(data=st.data(), n=st.integers(0, 30), num_groups=st.integers(1, 5))
def test_ranks_against_counting(dtype: torch.dtype, data: st.DataObject, n: int, num_groups: int) -> None:
    groups = torch.tensor(data.draw(st.lists(st.integers(0, num_groups - 1), min_size=n, max_size=n))).long()
    # A few values only, of both signs: ties are common.
    keys = torch.tensor(
        data.draw(st.lists(st.sampled_from([-1e3, -0.5, 0.0, 1e-3, 0.25, 7.0]), min_size=n, max_size=n))
    )
    keys = keys.to(dtype)
    ranks = rank_within_groups(groups, keys, count_groups(groups, num_groups))
    assert torch.equal(ranks, obvious_ranks(groups, keys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_of_a_batch_are_those_of_its_problems(dtype: torch.dtype, generator: torch.Generator) -> None:
    groups = torch.randint(0, 4, (2, 3, 50), generator=generator)
    keys = torch.randn(2, 3, 50, generator=generator, dtype=dtype)
    ranks = rank_within_groups(groups, keys, count_groups(groups, 4))
    for i in range(2):
        for j in range(3):
            assert torch.equal(ranks[i, j], obvious_ranks(groups[i, j], keys[i, j]))


def test_order_is_the_same_when_group_key_and_position_do_not_fit_one_integer(generator: torch.Generator) -> None:
    groups = torch.randint(0, 3, (4, 20), generator=generator)
    keys = torch.rand(4, 20, generator=generator)
    assert torch.equal(_order_by_group(groups, keys, 3), _order_by_group(groups, keys, 2**40))


def test_counts_against_bincount(generator: torch.Generator) -> None:
    groups = torch.randint(0, 5, (3, 40), generator=generator)
    expected = torch.stack([torch.bincount(row, minlength=6) for row in groups])
    assert torch.equal(count_groups(groups, 6), expected)


def test_counts_of_nothing() -> None:
    assert count_groups(torch.zeros(2, 0, dtype=torch.int64), 3).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_sorting_operator_is_well_formed() -> None:
    found = torch.library.opcheck(sort_integers, (torch.tensor([[3, 1, 2], [0, -5, 4]]),))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("k", [1, 2, 7, 8, 20])
def test_log_softmax_is_that_of_torch(k: int, generator: torch.Generator) -> None:
    x = torch.randn(3, 11, k, generator=generator, dtype=torch.float64)
    x[0, 0, : k // 2] = -torch.inf
    torch.testing.assert_close(log_softmax(x), torch.log_softmax(x, -1), rtol=0, atol=1e-14)


@pytest.mark.parametrize("k", [2, 9])
def test_log_softmax_has_the_right_gradient(k: int, generator: torch.Generator) -> None:
    x = torch.randn(2, 3, k, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_softmax, (x,))
