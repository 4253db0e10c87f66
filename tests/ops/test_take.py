# SPDX-License-Identifier: Apache-2.0
"""One entry of each row: values and gradients against `torch.gather`, for two columns and more."""

import pytest
import torch
from torch import Tensor

from equipoise.ops import take_column


def gathered(x: Tensor, column: Tensor) -> Tensor:
    return x.gather(-1, column.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (0,), (2, 0), (0, 7)])
def test_entries_and_gradients_are_those_of_gather(
    shape: tuple[int, ...], dtype: torch.dtype, k: int, generator: torch.Generator
) -> None:
    x = torch.randn(*shape, k, generator=generator).to(dtype)
    column = torch.randint(k, shape, generator=generator)
    for given in (x, x.mT.contiguous().mT):
        ours, theirs = (given.clone().requires_grad_() for _ in range(2))
        assert torch.equal(take_column(given, column), gathered(given, column))
        (take_column(ours, column) ** 2).sum().backward()
        (gathered(theirs, column) ** 2).sum().backward()
        assert torch.equal(ours.grad, theirs.grad)


def test_an_entry_that_was_not_taken_may_be_infinite() -> None:
    x = torch.tensor([[0.5, -torch.inf], [-torch.inf, 2.0]], requires_grad=True)
    taken = take_column(x, torch.tensor([0, 1]))
    taken.sum().backward()
    assert taken.tolist() == [0.5, 2.0]
    assert torch.equal(x.grad, torch.eye(2))


def test_gradients_of_gradients(generator: torch.Generator) -> None:
    x = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    column = torch.randint(2, (3, 4), generator=generator)
    assert torch.autograd.gradcheck(lambda x: take_column(x, column) ** 3, x)
    assert torch.autograd.gradgradcheck(lambda x: take_column(x, column) ** 3, x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's forward mode
def test_within_transforms(generator: torch.Generator) -> None:
    x, column = torch.randn(5, 4, 2, generator=generator), torch.randint(2, (5, 4), generator=generator)
    assert torch.equal(torch.vmap(take_column)(x, column), gathered(x, column))
    grad = torch.func.grad(lambda x: (take_column(x, column) ** 2).sum())(x)
    assert torch.equal(grad, 2 * x * torch.nn.functional.one_hot(column, 2))
    _, tangent = torch.func.jvp(lambda x: take_column(x, column), (x,), (torch.ones_like(x),))
    assert torch.equal(tangent, torch.ones(5, 4))
