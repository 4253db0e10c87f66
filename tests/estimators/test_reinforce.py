# SPDX-License-Identifier: Apache-2.0
"""The surrogate: its value, its gradient against the formula, and what may not reach either."""

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.estimators import (
    STRATEGIES,
    RegressionCritic,
    expected_critic,
    gate,
    importance_weight,
    reinforce,
    score_function,
)
from equipoise.ops import draw_gumbel
from equipoise.sampling import Sample, sample_independent, sample_rounds, sample_skip

N, K, BATCH = 7, 3, 2


@pytest.fixture
def logits(generator: torch.Generator) -> Tensor:
    return torch.randn(BATCH, N, K, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.fixture
def parameter(generator: torch.Generator) -> Tensor:
    return torch.randn(BATCH, N, K, generator=generator, dtype=torch.float64).requires_grad_()


def draw(logits: Tensor, *, mask: Tensor | None = None, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    gumbel = draw_gumbel(logits.shape, generator=generator, dtype=torch.float64)
    priority = torch.rand(logits.shape[:-1], generator=generator, dtype=torch.float64)
    return sample_skip(logits, gumbel, priority, temperature=0.6, capacity=2, mask=mask)


@pytest.mark.parametrize(
    "baseline",
    [0.0, 2, torch.tensor(1.5).double(), torch.tensor([1.0, -1.0]).double(), torch.arange(14.0).double().view(2, 7)],
)
@pytest.mark.parametrize("masked", [False, True])
def test_value_and_gradient_against_the_formula(
    logits: Tensor, parameter: Tensor, baseline: float | Tensor, masked: bool
) -> None:
    mask = torch.tensor([[True] * 7, [True, False, True, True, True, False, True]]) if masked else None
    log_p = logits.log_softmax(-1)
    s = draw(logits, mask=mask)
    losses = s.at_z(parameter**2)
    loss = reinforce(log_p, s, losses, baseline=baseline)
    router, experts = torch.autograd.grad(loss.sum(), [logits, parameter])

    b = torch.as_tensor(baseline).double()
    b = b.unsqueeze(-1) if b.shape == (BATCH,) else b
    b = b.expand(BATCH, N)
    weight = importance_weight(log_p, s)
    by_hand, expert_by_hand, value = torch.zeros_like(logits), torch.zeros_like(logits), torch.zeros(BATCH).double()
    for p in range(BATCH):
        n = N if mask is None else int(mask[p].sum())
        for i in range(N):
            if not s.kept[p, i]:
                continue
            z, w = int(s.z[p, i]), weight[p, i]
            f = parameter[p, i, z].detach() ** 2
            score = torch.nn.functional.one_hot(s.z[p, i], K) - logits[p, i].detach().softmax(-1)
            by_hand[p, i] += w * (f - b[p, i]) * score / n
            expert_by_hand[p, i, z] += w * 2 * parameter[p, i, z].detach() / n
            value[p] += w * f / n
    torch.testing.assert_close(loss.detach(), value, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(router, by_hand, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(experts, expert_by_hand, rtol=1e-13, atol=1e-14)


def test_losses_need_not_carry_a_gradient(logits: Tensor) -> None:
    s = draw(logits)
    loss = reinforce(logits.log_softmax(-1), s, torch.ones(BATCH, N).double())
    loss.sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_weights_and_baseline_are_detached(logits: Tensor, parameter: Tensor) -> None:
    s = draw(logits)
    weight = torch.rand(BATCH, N, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    baseline = torch.ones(BATCH).double().requires_grad_()
    loss = reinforce(logits.log_softmax(-1), s, s.at_z(parameter), baseline=baseline, weight=weight)
    gradients = torch.autograd.grad(loss.sum(), [weight, baseline], allow_unused=True)
    assert gradients == (None, None)


def test_weights_of_ones_over_kept_rows_are_the_plain_sum(logits: Tensor, parameter: Tensor) -> None:
    s = draw(logits)
    losses = s.at_z(parameter)
    loss = reinforce(logits.log_softmax(-1), s, losses, weight=torch.ones(BATCH, N).double())
    torch.testing.assert_close(loss, torch.where(s.kept, losses, 0.0).sum(-1) / N)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("explicit", [False, True])
def test_rows_that_are_dropped_or_masked_may_hold_garbage(
    logits: Tensor, parameter: Tensor, garbage: float, explicit: bool
) -> None:
    mask = torch.tensor([[True] * 7, [True, False, True, True, True, False, True]])
    s = draw(logits, mask=mask)
    log_p = torch.where(mask[..., None], logits.log_softmax(-1), garbage)
    assert not bool(s.kept.all())
    weight = torch.ones(BATCH, N).double() if explicit else None
    results = []
    for filler in (garbage, 0.0):
        losses = torch.where(s.kept, s.at_z(parameter**2), filler)
        loss = reinforce(log_p, s, losses, weight=weight, baseline=0.5)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), [logits, parameter], retain_graph=True)))
    for with_garbage, without in zip(*results, strict=True):
        assert bool(with_garbage.isfinite().all())
        assert torch.equal(with_garbage, without)


def test_an_expert_that_the_router_forbids_adds_nothing() -> None:
    logits = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]).double().requires_grad_()
    s = sample_independent(torch.zeros(2, 2).double(), torch.tensor([[0.0, 9.0], [9.0, 0.0]]).double())
    loss = reinforce(logits.log_softmax(-1), s, torch.tensor([5.0, 1.0]).double())
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.5)
    assert logits.grad is not None
    assert logits.grad[1].tolist() == pytest.approx([0.25, -0.25], rel=1e-15)  # to the last bit but one
    assert bool(logits.grad.isfinite().all())


def test_no_rows() -> None:
    s = sample_independent(torch.zeros(2, 0, 3), torch.zeros(2, 0, 3))
    assert reinforce(torch.zeros(2, 0, 3), s, torch.zeros(2, 0)).tolist() == [0.0, 0.0]


def test_all_rows_masked(logits: Tensor) -> None:
    s = draw(logits, mask=torch.zeros(BATCH, N, dtype=torch.bool))
    assert reinforce(logits.log_softmax(-1), s, torch.full([BATCH, N], torch.nan).double()).tolist() == [0.0, 0.0]


def test_half_precision_losses_are_averaged_in_float32() -> None:
    s = sample_independent(torch.zeros(4, 2), torch.zeros(4, 2))
    assert reinforce(torch.zeros(4, 2).log_softmax(-1), s, torch.ones(4, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("masked", [False, True])
def test_critic_against_the_formula(
    logits: Tensor, parameter: Tensor, generator: torch.Generator, masked: bool
) -> None:
    mask = torch.tensor([[True] * 7, [True, False, True, True, True, False, True]]) if masked else None
    critic = torch.randn(BATCH, N, K, generator=generator, dtype=torch.float64).requires_grad_()
    log_p, s = logits.log_softmax(-1), draw(logits, mask=mask)
    losses = s.at_z(parameter**2)
    plain = reinforce(log_p, s, losses, baseline=0.3)
    loss = reinforce(log_p, s, losses, baseline=0.3, critic=critic)
    assert torch.equal(loss, plain)
    shift = torch.autograd.grad((loss - plain).sum(), [logits, parameter, critic], allow_unused=True, retain_graph=True)
    assert shift[2] is None
    assert not bool(shift[1].any())

    weight, p = importance_weight(log_p, s), logits.detach().softmax(-1)
    by_hand = torch.zeros_like(logits)
    for b in range(BATCH):
        n = N if mask is None else int(mask[b].sum())
        for i in range(N):
            if mask is not None and not mask[b, i]:
                continue
            c = critic[b, i].detach()
            by_hand[b, i] += p[b, i] * (c - p[b, i] @ c) / n  # dropped rows have their expectation too
            if s.kept[b, i]:
                score = torch.nn.functional.one_hot(s.z[b, i], K) - p[b, i]
                by_hand[b, i] -= weight[b, i] * c[s.z[b, i]] * score / n
    torch.testing.assert_close(shift[0], by_hand, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["sample", "skip-iw", "gm-iw"])
def test_critic_that_is_right_leaves_no_variance_in_the_router(
    logits: Tensor, generator: torch.Generator, name: str
) -> None:
    f = torch.rand(BATCH, N, K, generator=generator, dtype=torch.float64)
    strategy, log_p = STRATEGIES[name], logits.log_softmax(-1)
    noise = strategy.draw_noise(logits.shape, generator=generator, dtype=torch.float64)
    s, weight = strategy.draw(log_p, noise, temperature=0.6)
    (router,) = torch.autograd.grad(reinforce(log_p, s, s.at_z(f), weight=weight, critic=f).sum(), logits)
    (exact,) = torch.autograd.grad((logits.softmax(-1) * f).sum() / N, logits)
    torch.testing.assert_close(router, exact, rtol=1e-12, atol=1e-14)


def test_critic_of_masked_rows_may_hold_garbage_and_forbidden_experts_count_nothing(logits: Tensor) -> None:
    mask = torch.tensor([[True] * 7, [True, False, True, True, True, False, True]])
    s = draw(logits, mask=mask)
    router = logits.detach().clone()
    router[0, 0, (int(s.z[0, 0]) + 1) % K] = -torch.inf
    router.requires_grad_()
    log_p = torch.where(mask[..., None], router.log_softmax(-1), torch.nan)
    gradients = []
    for filler in (torch.nan, 0.0):
        critic = torch.ones(BATCH, N, K).double().masked_fill(~mask[..., None], filler)
        loss = reinforce(log_p, s, torch.ones(BATCH, N).double(), weight=s.keep_weight, critic=critic)
        gradients.append(torch.autograd.grad(loss.sum(), router, retain_graph=True)[0])
    assert bool(gradients[0].isfinite().all())
    assert torch.equal(*gradients)


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    s = sample_independent(torch.zeros(2, 4, 3), torch.zeros(2, 4, 3))
    log_p = torch.zeros(2, 4, 3).log_softmax(-1)

    @pytest.mark.parametrize("shape", [(4,), (2,), (2, 4, 1), (2, 3)])
    def test_losses_of_the_wrong_shape(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"losses must have shape \[2, 4\] \(one loss a row, f\(x_i, z_i\)\), got"):
            reinforce(self.log_p, self.s, torch.zeros(shape))

    def test_losses_that_are_integers(self) -> None:
        with pytest.raises(ValueError, match=r"losses must be floating point, got torch.int64: convert it"):
            reinforce(self.log_p, self.s, torch.zeros(2, 4, dtype=torch.int64))

    @pytest.mark.parametrize("shape", [(4,), (1,), (2, 1), (3,)])
    def test_baseline_of_the_wrong_shape(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"baseline must be a number, or have shape \[2\] .* or \[2, 4\] .*, got"):
            reinforce(self.log_p, self.s, torch.zeros(2, 4), baseline=torch.zeros(shape))

    @pytest.mark.parametrize("baseline", [None, [0.0], np.zeros(2), "0"])
    def test_baseline_that_is_no_number(self, baseline: object) -> None:
        with pytest.raises(ValueError, match=r"baseline must be a number or a torch.Tensor, got (NoneT|list|nda|str)"):
            reinforce(self.log_p, self.s, torch.zeros(2, 4), baseline=baseline)  # pyright: ignore[reportArgumentType]

    def test_baseline_that_is_not_finite(self) -> None:
        with pytest.raises(ValueError, match=r"baseline must be finite, got nan: look for an overflow"):
            reinforce(self.log_p, self.s, torch.zeros(2, 4), baseline=float("nan"))

    def test_weights_of_the_wrong_shape(self) -> None:
        with pytest.raises(ValueError, match=r"weight must have shape \[2, 4\] \(one weight a row\), got \[4\]"):
            reinforce(self.log_p, self.s, torch.zeros(2, 4), weight=torch.zeros(4))

    def test_log_p_of_the_wrong_shape(self) -> None:
        with pytest.raises(ValueError, match=r"log_p must have shape \[2, 4, 3\]"):
            reinforce(self.log_p[0], self.s, torch.zeros(2, 4))

    @pytest.mark.parametrize("shape", [(2, 4), (4, 3), (3,), (2, 4, 1), (2, 4, 4), (1, 4, 3)])
    def test_critic_of_the_wrong_shape(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(
            ValueError, match=r"critic must have shape \[2, 4, 3\] .*, got .* one number a row is a base"
        ):
            reinforce(self.log_p, self.s, torch.zeros(2, 4), critic=torch.zeros(shape))

    def test_critic_that_is_no_floating_point_tensor(self) -> None:
        with pytest.raises(ValueError, match=r"critic must be floating point, got torch.int64"):
            reinforce(self.log_p, self.s, torch.zeros(2, 4), critic=torch.zeros(2, 4, 3, dtype=torch.int64))
        with pytest.raises(
            ValueError, match=r"critic must be a torch.Tensor, got RegressionCritic: pass what a critic"
        ):
            reinforce(self.log_p, self.s, torch.zeros(2, 4), critic=RegressionCritic(3))  # pyright: ignore[reportArgumentType]

    def test_losses_of_this_sample_as_their_own_baseline(self) -> None:
        losses = torch.rand(2, 4, requires_grad=True)
        for baseline in (losses, losses.detach(), losses.view(2, 4)):
            with pytest.raises(ValueError, match=r"baseline must not depend on the experts .*, got the losses of this"):
                reinforce(self.log_p, self.s, losses, baseline=baseline)
        reinforce(self.log_p, self.s, losses, baseline=losses.detach().clone())  # equal values, from elsewhere


def test_score_function_has_no_value_and_the_gradient_of_log_p() -> None:
    log_prob = torch.tensor([-1.0, -torch.inf, -2.0], requires_grad=True)
    terms = score_function(log_prob, torch.tensor([3.0, 0.0, 5.0]), torch.tensor([True, False, True]))
    assert terms.tolist() == [0.0, 0.0, 0.0]
    terms.sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [3.0, 0.0, 5.0]


def test_expected_critic_has_no_value_and_the_gradient_of_the_expectation() -> None:
    logits = torch.tensor([[1.0, 2.0], [0.0, 3.0], [torch.nan, 0.0]], requires_grad=True)
    critic = torch.tensor([[1.0, 5.0], [2.0, 4.0], [torch.nan, 1.0]], requires_grad=True)
    counted = torch.tensor([True, True, False])
    log_p = logits.log_softmax(-1)
    log_p.retain_grad()
    terms = expected_critic(log_p, critic, counted)
    assert terms.tolist() == [0.0, 0.0, 0.0]
    terms.sum().backward()
    assert log_p.grad is not None
    torch.testing.assert_close(log_p.grad[:2], (log_p.exp() * critic).detach()[:2])
    assert log_p.grad[2].tolist() == [0.0, 0.0]
    assert critic.grad is None


class TestSeveralExpertsARow:
    """`sample_rounds` gives one sample with all its rounds, and the weights that go with it."""

    def drawn(self, logits: Tensor) -> tuple[Sample, Tensor]:
        strategy, generator = STRATEGIES["gm-iw"], torch.Generator().manual_seed(3)
        noises = [strategy.draw_noise(logits.shape, generator=generator, dtype=logits.dtype) for _ in range(2)]
        return sample_rounds(logits.detach().log_softmax(-1), strategy, noises)

    def test_the_score_is_that_of_all_experts(self, logits: Tensor) -> None:
        s, weight = self.drawn(logits)
        losses = torch.rand(s.z.shape, dtype=torch.float64)
        log_p = logits.log_softmax(-1)
        (found,) = torch.autograd.grad(reinforce(log_p, s, losses, baseline=0.3, weight=weight).sum(), logits)
        by_hand = (weight * (losses - 0.3) * s.log_prob(logits.log_softmax(-1))).sum() / N
        torch.testing.assert_close(found, torch.autograd.grad(by_hand, logits)[0])

    def test_what_knows_one_expert_only_is_refused(self, logits: Tensor) -> None:
        s, weight = self.drawn(logits)
        log_p, losses = logits.log_softmax(-1), torch.zeros(s.z.shape, dtype=torch.float64)
        message = (
            "must come with a sample of one expert a row, got 2 rounds: give the weights that sample_rounds returned"
        )
        for refused in (
            lambda: reinforce(log_p, s, losses),
            lambda: reinforce(log_p, s, losses, weight=weight, critic=torch.zeros_like(log_p)),
            lambda: gate(log_p, s),
            lambda: RegressionCritic(K).update(torch.zeros(BATCH, N, 0), s, losses),
        ):
            with pytest.raises(ValueError, match=message):
                refused()
