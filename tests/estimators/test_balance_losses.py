# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses on the router."""

import math

import pytest
import torch
from torch import Tensor

from equipoise.estimators import conditional_entropy_loss, load_balance_loss, marginal_entropy_loss, z_loss
from equipoise.sampling import sample_gumbel_matching, sample_independent, sample_skip


@pytest.fixture
def logits(generator: torch.Generator) -> Tensor:
    return torch.randn(2, 6, 3, generator=generator, dtype=torch.float64).requires_grad_()


LOSSES = (load_balance_loss, marginal_entropy_loss, conditional_entropy_loss, z_loss)
MASK = torch.tensor([[True] * 6, [True, False, True, False, True, True]])


@pytest.mark.parametrize("masked", [False, True])
def test_load_balance_against_the_formula(logits: Tensor, masked: bool) -> None:
    log_p = logits.log_softmax(-1)
    loss = load_balance_loss(log_p, mask=MASK if masked else None)
    for b in range(2):
        rows = logits[b][MASK[b]] if masked else logits[b]
        load = torch.bincount(rows.argmax(-1), minlength=3) / len(rows)
        torch.testing.assert_close(loss[b], 3 * (load.double() * rows.softmax(-1).mean(0)).sum(), rtol=1e-6, atol=0)


def test_load_balance_gradient_flows_through_the_probabilities_alone(logits: Tensor) -> None:
    def loss(x: Tensor) -> Tensor:
        return load_balance_loss(x.log_softmax(-1), mask=MASK)

    assert torch.autograd.gradcheck(loss, (logits,))


def test_load_of_a_sample(logits: Tensor) -> None:
    log_p = logits.log_softmax(-1)
    s = sample_skip(logits, torch.zeros(2, 6, 3), torch.rand(2, 6), temperature=0.0, capacity=1, mask=MASK)
    # The deterministic sample is the argmax, and dropped rows count too.
    torch.testing.assert_close(load_balance_loss(log_p, assigned=s), load_balance_loss(log_p, mask=MASK))


def test_load_of_a_balanced_assignment_is_refused(logits: Tensor) -> None:
    s = sample_gumbel_matching(logits, torch.zeros(2, 6, 3))
    with pytest.raises(ValueError, match=r"assigned must not come from a balanced assignment, .* a constant; leave it"):
        load_balance_loss(logits.log_softmax(-1), assigned=s)


def test_marginal_entropy_against_the_formula(logits: Tensor) -> None:
    mean = logits.softmax(-1).mean(-2)
    loss = marginal_entropy_loss(logits.log_softmax(-1))
    torch.testing.assert_close(loss, (mean * mean.log()).sum(-1), rtol=1e-13, atol=0)
    by_problem = marginal_entropy_loss(logits.log_softmax(-1), mask=MASK)[1]
    torch.testing.assert_close(by_problem, marginal_entropy_loss(logits[1][MASK[1]].log_softmax(-1)))


def test_marginal_entropy_is_least_where_experts_are_equally_likely() -> None:
    assert float(marginal_entropy_loss(torch.zeros(5, 4).log_softmax(-1))) == pytest.approx(-math.log(4))
    assert float(marginal_entropy_loss(torch.tensor([[0.0, -torch.inf]]))) == 0.0


def test_marginal_entropy_gradient(logits: Tensor) -> None:
    def loss(x: Tensor) -> Tensor:
        return marginal_entropy_loss(x.log_softmax(-1), mask=MASK)

    assert torch.autograd.gradcheck(loss, (logits,))


def test_marginal_entropy_gradient_is_finite_where_an_expert_is_out_of_reach() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [0.0, -2000.0, 1.0]], requires_grad=True)
    marginal_entropy_loss(logits.log_softmax(-1)).backward()
    assert logits.grad is not None
    assert bool(logits.grad[1].isfinite().all())


def test_conditional_entropy_against_the_formula(logits: Tensor) -> None:
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(conditional_entropy_loss(logits.log_softmax(-1)), entropies.mean(-1), rtol=1e-13, atol=0)
    by_problem = conditional_entropy_loss(logits.log_softmax(-1), mask=MASK)[1]
    torch.testing.assert_close(by_problem, entropies[1][MASK[1]].mean(), rtol=1e-13, atol=0)
    assert torch.autograd.gradcheck(lambda x: conditional_entropy_loss(x.log_softmax(-1), mask=MASK), (logits,))


def test_entropy_losses_together_are_minus_the_mutual_information() -> None:
    certain = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
    assert float(marginal_entropy_loss(certain) + conditional_entropy_loss(certain)) == pytest.approx(-math.log(2))
    alike = torch.tensor([[0.3, 0.7], [0.3, 0.7]]).log()
    assert float(marginal_entropy_loss(alike) + conditional_entropy_loss(alike)) == pytest.approx(0.0, abs=1e-7)


def test_conditional_entropy_gradient_is_finite_where_an_expert_is_out_of_reach() -> None:
    log_p = torch.tensor([[0.0, -torch.inf], [0.5, 0.5]]).log_softmax(-1).requires_grad_()
    conditional_entropy_loss(log_p).backward()
    assert log_p.grad is not None
    assert bool(log_p.grad.isfinite().all())


def test_z_loss_against_the_formula(logits: Tensor) -> None:
    torch.testing.assert_close(z_loss(logits), logits.logsumexp(-1).square().mean(-1), rtol=1e-13, atol=0)
    torch.testing.assert_close(z_loss(logits, mask=MASK)[1], z_loss(logits[1][MASK[1]]), rtol=1e-13, atol=0)
    assert torch.autograd.gradcheck(lambda x: z_loss(x, mask=MASK), (logits,))


@pytest.mark.parametrize("loss", LOSSES)
def test_masked_rows_may_hold_garbage(logits: Tensor, loss) -> None:
    log_p = logits.log_softmax(-1)
    dirty = torch.where(MASK[..., None], log_p, torch.nan)
    assert torch.equal(loss(dirty, mask=MASK), loss(torch.where(MASK[..., None], log_p, 0.0), mask=MASK))
    assert bool(torch.autograd.grad(loss(dirty, mask=MASK).sum(), logits)[0].isfinite().all())


@pytest.mark.parametrize("loss", LOSSES)
def test_half_precision_is_summed_in_float32(loss) -> None:
    assert loss(torch.zeros(5000, 2, dtype=torch.bfloat16).log_softmax(-1)).dtype == torch.float32


@pytest.mark.parametrize("loss", LOSSES)
def test_no_rows(loss) -> None:
    assert loss(torch.zeros(2, 0, 3)).tolist() == [0.0, 0.0]


@pytest.mark.usefixtures("unchecked")
def test_shapes_must_agree(logits: Tensor) -> None:
    log_p = logits.log_softmax(-1)
    for loss in LOSSES:
        with pytest.raises(ValueError, match=r"mask must have shape \[2, 6\]"):
            loss(log_p, mask=MASK[0])
    with pytest.raises(ValueError, match=r"assigned.z must have shape \[2, 6\]"):
        load_balance_loss(log_p, assigned=sample_independent(logits[0], torch.zeros(6, 3)))
