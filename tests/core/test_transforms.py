# SPDX-License-Identifier: Apache-2.0
"""A tensor tells which transform it is in."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from equipoise._core import check_no_tangent, check_not_batched, has_tangent, in_transform, is_batched

# torch itself still scripts its rules for forward mode, when it first needs one.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

Outcome = tuple[bool, bool, bool]


def seen_by(transform: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]) -> list[Outcome]:
    """What a function sees of its argument and of a constant, when it is transformed."""
    seen: list[Outcome] = []
    constant = torch.ones(2)

    def look(x: Tensor) -> Tensor:
        seen.append((in_transform(), is_batched(None, x), has_tangent(x, None)))
        assert not is_batched(constant)
        assert not has_tangent(constant)
        return x.sum()

    transform(look)(torch.ones(3, 2))
    return seen


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (lambda f: f, (False, False, False)),
        (torch.func.grad, (True, False, False)),
        (torch.func.jacrev, (True, False, False)),
        (torch.vmap, (True, True, False)),
        (torch.func.jacfwd, (True, False, True)),
        (torch.func.hessian, (True, False, True)),
        (lambda f: torch.vmap(torch.func.grad(f)), (True, True, False)),
        (lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).sum()), (True, True, False)),
        (lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1], (True, False, True)),
        (lambda f: lambda x: torch.func.jvp(torch.vmap(f), (x,), (x,))[1], (True, True, True)),
        (lambda f: lambda x: torch.func.jvp(lambda y: f(y.detach()), (x,), (x,))[1], (True, False, False)),
        (lambda f: torch.func.hessian(lambda x: f(x.detach())), (True, False, False)),
    ],
)
def test_transforms_are_told_apart(transform: Callable, expected: Outcome) -> None:
    assert seen_by(transform) == [expected]


def test_dual_numbers_have_a_tangent() -> None:
    x = torch.ones(2)
    with forward_ad.dual_level():
        assert has_tangent(forward_ad.make_dual(x, x))
        assert not has_tangent(x)
    assert not has_tangent(x)


def test_mapped_tensor_is_refused() -> None:
    def refuse(x: Tensor) -> Tensor:
        check_not_batched("x", x, remedy="loop")
        return x

    with pytest.raises(ValueError, match=r"x must not be mapped over by torch\.vmap, got a tensor within a vmap: loop"):
        torch.vmap(refuse)(torch.ones(2))
    assert refuse(torch.ones(2)).shape == (2,)


def test_tangent_is_refused() -> None:
    def refuse(x: Tensor) -> Tensor:
        check_no_tangent("x", x, remedy="use jacrev")
        return x

    with pytest.raises(ValueError, match=r"x must not be differentiated in forward mode .* tangent: use jacrev"):
        torch.func.jacfwd(refuse)(torch.ones(2))
    assert refuse(torch.ones(2)).shape == (2,)
