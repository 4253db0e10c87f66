# SPDX-License-Identifier: Apache-2.0
"""Two experts on the CPU: estimates in one pass against the general estimators, values and gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equipoise import STRATEGIES, gate, gated_loss, reinforce
from equipoise.estimators import _gating, _reinforce
from equipoise.sampling import Sample

Estimate = Callable[[Tensor, Sample, Tensor, Tensor], Tensor]

ESTIMATES: dict[str, Estimate] = {
    "reinforce": lambda p, s, f, w: reinforce(p, s, f, weight=w),
    "a baseline": lambda p, s, f, w: reinforce(p, s, f, weight=w, baseline=0.3),
    "a baseline a problem": lambda p, s, f, w: reinforce(p, s, f, weight=w, baseline=torch.arange(4.0).to(f)),
    "a baseline a row": lambda p, s, f, w: reinforce(p, s, f, weight=w, baseline=torch.linspace(0, 1, 9).expand(4, 9)),
    "a critic": lambda p, s, f, w: reinforce(p, s, f, weight=w, critic=torch.arange(72.0).reshape(4, 9, 2).to(f)),
    "own weights": lambda p, s, f, _: reinforce(p, s, f),
    "gating": lambda p, s, f, w: gated_loss(p, s, (gate(p, s) * f) ** 2, weight=w),
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Switches the compiled estimate off."""

    def switch_off() -> None:
        for module in (_reinforce, _gating):
            monkeypatch.setattr(module, "weighted_mean", lambda *_: None)

    return switch_off


def problem(method: str, generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Sample, Tensor, Tensor]:
    log_p = torch.log_softmax(2 * torch.randn(4, 9, 2, generator=generator, dtype=dtype), -1)
    strategy = STRATEGIES[method]
    noise = strategy.draw_noise(log_p.shape, generator=generator, dtype=dtype)
    s, weight = strategy.draw(log_p, noise, temperature=1.5)
    losses = torch.rand(4, 9, generator=generator, dtype=dtype)
    return log_p.requires_grad_(), s, losses.requires_grad_(), weight


@pytest.mark.parametrize("name", ESTIMATES)
@pytest.mark.parametrize("method", ["sample", "skip-iw", "skip", "gm-iw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_pass_gives_the_general_estimate(
    name: str, method: str, dtype: torch.dtype, generator: torch.Generator, slow: Callable[[], None]
) -> None:
    given = problem(method, generator, dtype)
    leaves, direction = (given[0], given[2]), torch.linspace(-1, 2, 4, dtype=dtype)
    fast = ESTIMATES[name](*given)
    gradients = torch.autograd.grad(fast, leaves, direction)
    assert "WeightedMean" in str(fast.grad_fn) or name == "a critic"
    slow()
    expected = ESTIMATES[name](*given)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-13, "atol": 1e-13}
    torch.testing.assert_close(fast, expected, **close)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, leaves, direction), strict=True):
        torch.testing.assert_close(ours, theirs, **close)


def test_rows_that_were_dropped_may_hold_garbage(generator: torch.Generator) -> None:
    log_p, s, losses, weight = problem("skip-iw", generator, torch.float64)
    assert not bool(s.kept.all())
    spoilt = torch.where(s.kept, losses.detach(), torch.nan).requires_grad_()
    found, expected = (reinforce(log_p, s, f, weight=weight, baseline=0.2) for f in (spoilt, losses))
    assert torch.equal(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found.sum(), (log_p, spoilt)),
        torch.autograd.grad(expected.sum(), (log_p, losses)),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_a_loss_that_is_not_a_number_shows() -> None:
    log_p = torch.full((2, 2), 0.5).log()
    s = Sample(torch.tensor([0, 1]), log_p, torch.ones(2, dtype=torch.bool), torch.ones(2))
    assert reinforce(log_p, s, torch.tensor([torch.nan, 1.0])).isnan()


def test_gradients_of_gradients_agree(generator: torch.Generator, slow: Callable[[], None]) -> None:
    given = problem("gm-iw", generator, torch.float64)

    def squared_norm() -> Tensor:
        loss = reinforce(given[0], given[1], given[2] ** 3, weight=given[3], baseline=0.1)
        gradients = torch.autograd.grad(loss.sum(), (given[0], given[2]), create_graph=True)
        return sum((g**2).sum() for g in gradients)

    (fast,) = torch.autograd.grad(squared_norm(), given[2])
    slow()
    (expected,) = torch.autograd.grad(squared_norm(), given[2])
    torch.testing.assert_close(fast, expected, rtol=1e-12, atol=1e-14)
    assert fast.abs().max() > 0
