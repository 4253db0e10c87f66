# SPDX-License-Identifier: Apache-2.0
"""The value's gradient is the assignment, under autograd and the transforms of torch.func; `torch.vmap` is a batch."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import equipoise as eq
from support.methods import EXACT, METHODS

FIELDS = ("z", "counts", "capacity", "mask", "value", "prices", "gap")
# torch itself uses torch.jit.script for the first dual number of a process.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def one_hot(a: eq.Assignment, k: int) -> Tensor:
    return torch.nn.functional.one_hot(a.z, k + 1)[..., :k].double()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(8, 4), (9, 2), (5, 1), (0, 3), (2, 3, 8, 4), (0, 4, 2), (1200, 12)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradient_is_the_assignment(method: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    scores = draw(*shape, dtype=dtype).requires_grad_()
    a = eq.assign(scores, method=method)
    assert {field for field in FIELDS if getattr(a, field).requires_grad} == {"value"}
    assert torch.equal(a.value.detach(), eq.assign(scores.detach(), method=method).value)
    a.value.sum().backward()
    assert scores.grad is not None
    assert scores.grad.dtype == dtype
    assert torch.equal(scores.grad.double(), one_hot(a, shape[-1]))


@pytest.mark.parametrize("method", METHODS)
def test_masked_rows_and_forbidden_pairs_have_no_gradient(method: str) -> None:
    scores = draw(8, 4)
    scores[2, 1], scores[5] = -math.inf, math.nan
    mask = torch.arange(8) != 5
    a = eq.assign(scores.requires_grad_(), mask=mask, method=method)
    a.value.backward()
    assert scores.grad is not None
    assert torch.equal(scores.grad, one_hot(a, 4))
    assert float(scores.grad[5].sum()) == 0


@pytest.mark.parametrize("method", EXACT)
def test_against_finite_differences(method: str) -> None:
    scores = draw(2, 7, 3).requires_grad_()

    def value(x: Tensor) -> Tensor:
        return eq.assign(x, [2, 3, 4], method=method).value

    assert torch.autograd.gradcheck(value, scores, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(value, scores)


def test_no_gradient_where_none_is_wanted() -> None:
    scores = draw(8, 4).requires_grad_()
    with torch.no_grad():
        assert not eq.assign(scores).value.requires_grad
    assert not eq.assign(scores.detach()).value.requires_grad


def test_gradient_of_huge_scores() -> None:
    scores = (draw(8, 4) * 2.0**1018).requires_grad_()
    a = eq.assign(scores)
    a.value.backward()
    assert bool(a.value.isfinite())
    assert scores.grad is not None
    assert torch.equal(scores.grad, one_hot(a, 4))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd])
def test_transforms_of_one_problem(method: str, transform: Callable) -> None:
    scores = draw(8, 4)
    found = transform(lambda x: eq.assign(x, 3, method=method).value)(scores)
    assert torch.equal(found, one_hot(eq.assign(scores, 3, method=method), 4))


@pytest.mark.parametrize("method", METHODS)
def test_nested_transforms(method: str) -> None:
    scores = draw(3, 8, 4)
    expected = one_hot(eq.assign(scores, method=method), 4)

    def value(x: Tensor) -> Tensor:
        return eq.assign(x, method=method).value

    assert torch.equal(torch.vmap(torch.func.grad(value))(scores), expected)
    assert torch.equal(torch.func.grad(lambda x: torch.vmap(value)(x).sum())(scores), expected)
    assert torch.equal(torch.func.hessian(value)(scores[0]), torch.zeros(8, 4, 8, 4, dtype=torch.float64))
    _, tangent = torch.func.jvp(torch.vmap(value), (scores,), (scores.cos(),))
    torch.testing.assert_close(tangent, (expected * scores.cos()).sum((-2, -1)))


@pytest.mark.parametrize("method", METHODS)
def test_vmap_is_a_batch(method: str) -> None:
    scores, mask = draw(8, 3, 4), torch.arange(8) != 2
    prices, capacity = draw(3, 4).abs(), torch.tensor([[2, 2, 2, 2], [3, 2, 1, 4], [8, 0, 0, 1]])

    def solve(x: Tensor, c: Tensor, m: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        a = eq.assign(x, c, mask=m, prices=p, method=method)
        return tuple(getattr(a, field) for field in FIELDS)

    mapped = torch.vmap(solve, in_dims=(1, 0, None, 0))(scores, capacity, mask, prices)
    together = solve(scores.transpose(0, 1), capacity, mask.expand(3, 8), prices)
    assert all(torch.equal(x, y) for x, y in zip(mapped, together, strict=True))
    # Levels nest, and what is mapped over need not be the scores.
    twice = torch.vmap(torch.vmap(lambda x: eq.assign(x, method=method).z))(draw(2, 3, 8, 4))
    assert torch.equal(twice, eq.assign(draw(2, 3, 8, 4), method=method).z)
    one = draw(8, 4)
    several = torch.vmap(lambda c: eq.assign(one, c, method=method).z)(torch.tensor([2, 3, 8]))
    assert torch.equal(several[1], eq.assign(one, 3, method=method).z)


def test_errors_within_vmap_name_the_problem() -> None:
    scores = draw(3, 8, 4)
    scores[2, 5, 0] = math.nan
    with pytest.raises(ValueError, match="got NaN in row 5 of problem 2"):
        torch.vmap(lambda x: eq.assign(x).value)(scores)
