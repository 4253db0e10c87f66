# SPDX-License-Identifier: Apache-2.0
"""`ResidualBaseline`: least squares on past batches, and what it is worth."""

from collections.abc import Iterator

import pytest
import torch
from jaxtyping import config
from torch import Tensor

from equipoise.nn import MoE, ResidualBaseline, Surrogate, capture


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Hundreds of tiny passes: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switches the run-time check of signatures off, to see what users see."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def batch(seed: int, rows: int = 50) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    r = torch.rand(rows, generator=generator, dtype=torch.float64)
    return 2.0 * r - 0.5 + 0.1 * torch.randn(rows, generator=generator, dtype=torch.float64), r


def test_starts_with_the_residual_itself() -> None:
    _, r = batch(0)
    assert torch.equal(ResidualBaseline()(r), r)


def test_coefficients_are_those_of_weighted_least_squares_over_past_batches() -> None:
    decay, batches = 0.8, [batch(seed, rows) for seed, rows in ((0, 50), (1, 20), (2, 90))]
    baseline = ResidualBaseline(decay)
    for f, r in batches:
        baseline.update(f, r)
    # Every batch has weight (1 - decay) decay^age, shared evenly by its rows.
    weight = torch.cat(
        [torch.full_like(f, decay**age / len(f)) for age, (f, _) in zip((2, 1, 0), batches, strict=True)]
    )
    f, r = (torch.cat(parts) for parts in zip(*batches, strict=True))
    design = torch.stack([torch.ones_like(r), r], 1) * weight.sqrt()[:, None]
    solution = torch.linalg.lstsq(design, (f * weight.sqrt())[:, None]).solution.flatten()
    torch.testing.assert_close(torch.stack(baseline.coefficients), solution, rtol=1e-9, atol=1e-9)


def test_rows_that_do_not_count() -> None:
    f, r = batch(0)
    counted = torch.arange(50) < 20
    all_rows, some = ResidualBaseline(), ResidualBaseline()
    all_rows.update(f[:20], r[:20])
    some.update(torch.where(counted, f, torch.nan), torch.where(counted, r, torch.inf), counted)
    torch.testing.assert_close(some.moments, all_rows.moments)
    some.update(f, r, torch.zeros_like(counted))
    torch.testing.assert_close(some.moments, all_rows.moments)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_left_out(bad: float) -> None:
    f, r = batch(0)
    baseline, without = ResidualBaseline(), ResidualBaseline()
    baseline.update(torch.cat([f, f[:2]]), torch.cat([r, torch.tensor([bad, -bad])]))
    baseline.update(torch.cat([f, torch.tensor([bad])]), torch.cat([r, r[:1]]), torch.arange(51) >= 10)
    without.update(f, r)
    without.update(f[10:], r[10:])
    torch.testing.assert_close(baseline.moments, without.moments)
    before = baseline.moments.clone()
    baseline.update(torch.full_like(f, bad), r)
    assert torch.equal(baseline.moments, before)


def test_a_loss_that_is_not_finite_leaves_later_gradients_finite() -> None:
    torch.manual_seed(0)
    moe = MoE(6, 4, hidden_dim=5)
    surrogate = Surrogate()
    for bad in (True, False):
        moe.zero_grad()
        with capture(moe) as routings:
            losses = moe(torch.randn(8, 6)).square().mean(-1)
        if bad:
            losses = losses * torch.where(torch.arange(8) == 3, torch.inf, 1.0)
        surrogate(losses, routings).backward()
    assert moe.router.weight.grad is not None
    assert bool(moe.router.weight.grad.isfinite().all())


def test_a_residual_without_spread_gives_the_mean() -> None:
    baseline = ResidualBaseline()
    baseline.update(torch.tensor([1.0, 3.0]), torch.tensor([5.0, 5.0]))
    torch.testing.assert_close(baseline(torch.tensor([5.0, 7.0])), torch.tensor([2.0, 2.0]))


def test_no_gradient_and_at_least_single_precision() -> None:
    baseline = ResidualBaseline()
    b = baseline(torch.ones(3, dtype=torch.bfloat16, requires_grad=True))
    assert not b.requires_grad
    assert b.dtype == torch.float32
    assert baseline.bfloat16().moments.dtype == torch.float64


@pytest.mark.usefixtures("unchecked")
def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), got 1.0"):
        ResidualBaseline(1.0)
    with pytest.raises(ValueError, match=r"residual must have shape \[2\]"):
        ResidualBaseline().update(torch.zeros(2), torch.zeros(3))


def test_the_current_batch_is_read_before_it_is_taken_in() -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    moe, baseline = MoE(4, 2, loss="reinforce"), ResidualBaseline()
    surrogate = Surrogate(baseline)
    before = baseline(x[:, 0])
    with capture(moe) as routings:
        losses = (x + moe(x)).square().mean(-1)
    loss = surrogate(losses, routings, residual=lambda: x[:, 0])
    with capture(moe) as again:
        moe(x)
    assert not torch.equal(baseline(x[:, 0]), before)
    score = torch.autograd.grad(loss, moe.router.weight, retain_graph=True)[0]
    routing = routings[0]
    assert routing.sample is not None
    coefficient = routing.weight * (losses.detach() - before) / 16
    plain = (coefficient * routing.sample.at_z(routing.log_p)).sum() + sum(routing.balance_losses.values())
    torch.testing.assert_close(torch.autograd.grad(plain, moe.router.weight)[0], score)
    assert len(again) == 1


def test_it_leaves_less_noise_than_a_constant() -> None:
    """Tokens differ by up to 10, experts by 0.1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(64, 4, generator=generator)
    spread = []
    for kind in (ResidualBaseline, type(None)):
        torch.manual_seed(0)
        moe, surrogate = MoE(4, 2, router="sample", marginal_entropy=0.0), Surrogate(kind())
        r = 10 * x[:, 0]
        gradients = []
        for _ in range(25):
            with capture(moe) as routings:
                moe(x)
            assert routings[0].sample is not None
            losses = r + 0.1 * routings[0].sample.z
            how = {"residual": lambda r=r: r} if kind is ResidualBaseline else {}
            gradients.append(torch.autograd.grad(surrogate(losses, routings, **how), moe.router.weight)[0])
        spread.append(float(torch.stack(gradients[5:]).std(0).norm()))
    assert spread[0] < 0.1 * spread[1]
