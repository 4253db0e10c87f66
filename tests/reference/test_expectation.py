# SPDX-License-Identifier: Apache-2.0
"""The exact objective and its gradients: closed form, enumeration, autograd and finite differences."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equipoise import reference

Draw = Callable[..., Tensor]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 4), (4, 2), (5, 3)])
def test_closed_form_equals_enumeration(normal: Draw, n: int, k: int) -> None:
    log_p, losses = normal(n, k).log_softmax(1), normal(n, k)
    closed, listed = reference.exact_expectation(log_p, losses), reference.enumerated_expectation(log_p, losses)
    torch.testing.assert_close(closed, listed, rtol=0, atol=1e-14)


def test_gradient_for_the_logits_is_the_same_in_three_ways(normal: Draw) -> None:
    logits, losses = normal(4, 3).requires_grad_(), normal(4, 3)
    closed = reference.exact_logit_gradient(logits, losses)
    (automatic,) = reference.exact_gradient(logits.log_softmax(1), losses, [logits])
    objective = reference.enumerated_expectation(logits.log_softmax(1), losses)
    (listed,) = torch.autograd.grad(objective, [logits])
    torch.testing.assert_close(automatic, closed, rtol=0, atol=1e-15)
    torch.testing.assert_close(listed, closed, rtol=0, atol=1e-15)


def test_gradient_reaches_router_and_experts(normal: Draw) -> None:
    x, y, router, experts = normal(5, 2), normal(5, 1), normal(2, 3), normal(2, 3)

    def objective(router: Tensor, experts: Tensor) -> Tensor:
        return reference.exact_expectation((x @ router).log_softmax(1), (y - x @ experts) ** 2)

    router.requires_grad_()
    experts.requires_grad_()
    assert torch.autograd.gradcheck(objective, (router, experts))
    log_p, losses = (x @ router).log_softmax(1), (y - x @ experts) ** 2
    found = reference.exact_gradient(log_p, losses, [router, experts])
    for gradient, expected in zip(
        found, torch.autograd.grad(objective(router, experts), (router, experts)), strict=True
    ):
        assert torch.equal(gradient, expected)


def test_parameter_that_does_not_matter_has_gradient_zero(normal: Draw) -> None:
    logits, idle = normal(2, 2).requires_grad_(), normal(3).requires_grad_()
    _, gradient = reference.exact_gradient(logits.log_softmax(1), normal(2, 2), [logits, idle])
    assert torch.equal(gradient, torch.zeros(3).double())
