# SPDX-License-Identifier: Apache-2.0
"""Implicit differentiation against finite differences and against the unrolled iteration."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from equipoise.balancing import sinkhorn

CAPACITIES = [None, 4, 5, [2, 3, 9], [4, 4, 4], [0, 6, 9]]


def normal(*shape: int, sd: float = 1.0, seed: int = 0) -> Tensor:
    return sd * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_gradcheck(capacity: int | list[int] | None) -> None:
    logits = normal(12, 3, sd=2.0).requires_grad_()
    assert gradcheck(lambda x: sinkhorn(x, capacity, tolerance=1e-13).log_p.exp(), (logits,))


def test_gradcheck_of_a_batch() -> None:
    logits = normal(2, 2, 3, 2).requires_grad_()
    capacity = torch.tensor([[2, 2], [1, 2]])[:, None].expand(2, 2, 2)
    assert gradcheck(lambda x: sinkhorn(x, capacity, tolerance=1e-13).log_p, (logits,))


def test_gradcheck_with_mask_and_forbidden_pairs() -> None:
    logits = normal(10, 3)
    forbidden = torch.zeros(10, 3, dtype=torch.bool)
    forbidden[0, 0] = forbidden[3, 1] = forbidden[3, 2] = forbidden[7, 2] = True
    mask = torch.ones(10, dtype=torch.bool)
    mask[[2, 5]] = False

    def balance(x: Tensor) -> Tensor:
        return sinkhorn(x.masked_fill(forbidden, -math.inf), mask=mask, tolerance=1e-13).log_p.exp()

    assert gradcheck(balance, (logits.requires_grad_(),))
    balance(logits).square().sum().backward()
    assert logits.grad is not None
    assert (logits.grad[[2, 5]] == 0).all()


def test_separate_blocks() -> None:
    # Two null directions: a constant may be added to the prices of each block.
    forbidden = torch.ones(9, 5, dtype=torch.bool)
    forbidden[:6, :3] = forbidden[6:, 3:] = False
    logits = normal(9, 5).requires_grad_()

    def balance(x: Tensor) -> Tensor:
        capacity = [2, 2, 2, 1, 2]
        return sinkhorn(x.masked_fill(forbidden, -math.inf), capacity, tolerance=1e-13).log_p.exp()

    assert gradcheck(balance, (logits,))


def test_second_derivative() -> None:
    logits = normal(5, 3).requires_grad_()
    assert gradgradcheck(lambda x: sinkhorn(x, tolerance=1e-13).log_p, (logits,))


@pytest.mark.parametrize("sd", [0.3, 3.0])
@pytest.mark.parametrize("capacity", [None, 8, [4, 5, 20, 9]])
def test_equals_the_unrolled_gradient(
    sd: float, capacity: int | list[int] | None, plain_sinkhorn: Callable[..., Tensor]
) -> None:
    n, k = 30, 4
    target = torch.full((k,), n / k) if capacity is None else torch.as_tensor(capacity).expand(k)
    logits = normal(n, k, sd=sd).requires_grad_()
    weight = normal(n, k, seed=1)
    (ours,) = torch.autograd.grad((sinkhorn(logits, capacity, tolerance=1e-13).log_p * weight).sum(), logits)
    unrolled = plain_sinkhorn(logits, target.double(), 1000, slack=capacity is not None)
    (expected,) = torch.autograd.grad((unrolled * weight).sum(), logits)
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("sd", [1.0, 10.0, 30.0])
def test_float32_follows_float64(sd: float) -> None:
    logits, weight = normal(4, 200, 20, sd=sd), normal(4, 200, 20, seed=1)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        x = logits.float().to(dtype).requires_grad_()
        (sinkhorn(x).log_p.exp() * weight.to(dtype)).sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
        gradients.append(x.grad.double())
    scale = float(gradients[1].abs().max())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-4 * scale)


def test_half_precision_gets_a_gradient_of_its_own_dtype() -> None:
    logits = normal(20, 4).to(torch.bfloat16).requires_grad_()
    sinkhorn(logits).log_p[:, 0].sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_moving_all_of_a_tight_column_changes_nothing() -> None:
    logits = normal(20, 4, sd=2.0).requires_grad_()
    (sinkhorn(logits, tolerance=1e-12).log_p * normal(20, 4, seed=1)).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.sum(0), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(logits.grad.sum(1), torch.zeros(20, dtype=torch.float64), rtol=0, atol=1e-9)


def test_equal_logits_still_have_the_balanced_gradient() -> None:
    # All prices are 0, and all columns are tight all the same.
    logits = torch.zeros(6, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: sinkhorn(x, 2, tolerance=1e-13).log_p, (logits,))


def test_only_log_p_carries_a_gradient() -> None:
    balanced = sinkhorn(normal(6, 3).requires_grad_())
    assert balanced.log_p.requires_grad
    assert not balanced.prices.requires_grad
    assert not balanced.error.requires_grad
