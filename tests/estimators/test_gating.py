# SPDX-License-Identifier: Apache-2.0
"""Differentiable gating."""

import pytest
import torch
from torch import Tensor

from equipoise.estimators import gate, gated_loss, importance_weight
from equipoise.ops import draw_gumbel
from equipoise.sampling import sample_independent, sample_skip


@pytest.fixture
def logits(generator: torch.Generator) -> Tensor:
    return torch.randn(2, 6, 3, generator=generator, dtype=torch.float64).requires_grad_()


def test_gate_is_the_routers_probability_of_the_expert_drawn(logits: Tensor, generator: torch.Generator) -> None:
    mask = torch.tensor([[True] * 6, [True, True, False, True, True, True]])
    gumbel = draw_gumbel([2, 6, 3], generator=generator, dtype=torch.float64)
    s = sample_skip(logits, gumbel, torch.rand(2, 6, generator=generator), temperature=4.0, capacity=1, mask=mask)
    p_z = gate(logits.log_softmax(-1), s)
    p = logits.softmax(-1)
    for b in range(2):
        for i in range(6):
            expected = p[b, i, int(s.z[b, i])] if mask[b, i] else torch.zeros(()).double()
            torch.testing.assert_close(p_z[b, i], expected, rtol=1e-14, atol=0)


def test_gate_at_test_time_is_the_largest_probability(logits: Tensor) -> None:
    s = sample_independent(logits, torch.zeros(2, 6, 3), temperature=0.0)
    torch.testing.assert_close(gate(logits.log_softmax(-1), s), logits.softmax(-1).amax(-1))


@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_is_that_of_the_weighted_mean(logits: Tensor, generator: torch.Generator, weighted: bool) -> None:
    gumbel = draw_gumbel([2, 6, 3], generator=generator, dtype=torch.float64)
    s = sample_skip(logits, gumbel, torch.rand(2, 6, generator=generator), temperature=0.5, capacity=2)
    output = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    weight = torch.rand(2, 6, generator=generator).double().requires_grad_() if weighted else None
    log_p = logits.log_softmax(-1)
    loss = gated_loss(log_p, s, (gate(log_p, s) * output - 1) ** 2, weight=weight)
    (router,) = torch.autograd.grad(loss.sum(), logits)

    w = (importance_weight(log_p, s) if weight is None else weight.detach() * s.kept).detach()
    p_z = s.at_z(logits.detach().softmax(-1))
    value = (w * (p_z * output - 1) ** 2).sum(-1) / 6
    torch.testing.assert_close(loss.detach(), value, rtol=1e-13, atol=0)
    # d p_z / d a_j = p_z (1[z = j] - p_j)
    slope = w * 2 * (p_z * output - 1) * output * p_z / 6
    by_hand = slope[..., None] * (torch.nn.functional.one_hot(s.z, 3) - logits.detach().softmax(-1))
    torch.testing.assert_close(router, by_hand, rtol=1e-12, atol=1e-15)


def test_dropped_rows_may_hold_garbage(logits: Tensor) -> None:
    s = sample_skip(logits, torch.zeros(2, 6, 3).double(), torch.rand(2, 6), capacity=1)
    assert not bool(s.kept.all())
    log_p = logits.log_softmax(-1)
    losses = torch.where(s.kept, gate(log_p, s), torch.nan)
    loss = gated_loss(log_p, s, losses)
    assert bool(loss.isfinite().all())
    assert bool(torch.autograd.grad(loss.sum(), logits)[0].isfinite().all())


@pytest.mark.usefixtures("unchecked")
def test_losses_of_the_wrong_shape(logits: Tensor) -> None:
    s = sample_independent(logits, torch.zeros(2, 6, 3))
    with pytest.raises(ValueError, match=r"losses must have shape \[2, 6\]"):
        gated_loss(logits.log_softmax(-1), s, torch.zeros(6))
