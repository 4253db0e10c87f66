# SPDX-License-Identifier: Apache-2.0
"""`torch.func` and forward mode: reverse mode and vmap agree with autograd, forward mode is refused."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from equipoise import sinkhorn

CASES = ({}, {"capacity": 3}, {"mask": torch.tensor([True] * 6 + [False])})

# torch says that it maps over an operator of ours one by one; and scripts its rules for forward mode.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def objective(logits: Tensor, options: dict) -> Tensor:
    weights = torch.linspace(-1.0, 1.0, 21, dtype=torch.float64).reshape(7, 3)
    return (weights * sinkhorn(logits, tolerance=1e-12, **options).log_p).sum()


@pytest.mark.parametrize("options", CASES)
def test_reverse_mode_is_that_of_autograd(options: dict) -> None:
    logits = draw(7, 3)

    def log_p(x: Tensor) -> Tensor:
        return sinkhorn(x, tolerance=1e-12, **options).log_p

    expected = torch.autograd.functional.jacobian(log_p, logits)
    torch.testing.assert_close(torch.func.jacrev(log_p)(logits), expected)
    twice = torch.func.jacrev(torch.func.grad(objective))(logits, options)
    torch.testing.assert_close(twice, torch.autograd.functional.hessian(lambda x: objective(x, options), logits))


@pytest.mark.parametrize("options", CASES)
def test_vmap_is_a_loop(options: dict) -> None:
    logits = draw(4, 7, 3)
    for function in (objective, torch.func.grad(objective)):
        found = torch.vmap(function, in_dims=(0, None))(logits, options)
        torch.testing.assert_close(found, torch.stack([function(x, options) for x in logits]))


def test_forward_mode_is_refused() -> None:
    message = r"logits must not be differentiated in forward mode .*: use reverse mode \(torch\.func\.grad, jacrev\)"
    for transform in (torch.func.jacfwd, torch.func.hessian):
        with pytest.raises(ValueError, match=message):
            transform(objective)(draw(7, 3), {})
    with forward_ad.dual_level(), pytest.raises(ValueError, match=message):
        objective(forward_ad.make_dual(draw(7, 3), draw(7, 3)), {})


def test_what_is_detached_may_be_balanced_in_forward_mode() -> None:
    found = torch.func.jacfwd(lambda x: x * objective(x.detach(), {}))(draw(7, 3))
    assert float(found[0, 0, 0, 0]) == pytest.approx(float(objective(draw(7, 3), {})))
