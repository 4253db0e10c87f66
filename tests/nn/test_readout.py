# SPDX-License-Identifier: Apache-2.0
"""`Readout`, and a baseline for each layer. What is unbiased is in test_surrogate_exact."""

import copy
from collections.abc import Iterator

import pytest
import torch
from jaxtyping import config
from torch import Tensor, nn

from equipoise.estimators import EMABaseline
from equipoise.nn import MoE, Readout, ResidualBaseline, Surrogate, capture
from equipoise.nn._routings import Routings


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small batches only wait for a second thread."""
    torch.set_num_threads(1)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switches the run-time check of signatures off, to see what users see."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def test_losses_are_those_of_the_head_and_train_it_alone() -> None:
    torch.manual_seed(0)
    readout, hidden = Readout(4, 3), torch.randn(2, 5, 4, requires_grad=True)
    targets = torch.randint(3, [2, 5])
    mask = torch.rand(2, 5) > 0.3
    found = readout(hidden, targets, mask=mask)
    expected = -readout.head(hidden).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(found.residual, expected.detach())
    assert not found.residual.requires_grad
    torch.testing.assert_close(found.loss, expected[mask].mean())
    found.loss.backward()
    assert hidden.grad is None
    assert all(parameter.grad is not None for parameter in readout.parameters())


def test_head_and_loss_of_your_own() -> None:
    head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    readout = Readout(4, head, lambda found, targets: (found.squeeze(-1) - targets).abs())
    hidden, targets = torch.randn(6, 4).bfloat16(), torch.randn(6)
    found = readout.bfloat16()(hidden, targets)
    assert found.residual.dtype == torch.float32
    assert readout(hidden[:0], targets[:0]).loss.item() == 0.0


@pytest.mark.usefixtures("unchecked")
def test_bad_input() -> None:
    with pytest.raises(ValueError, match="head must be an integer >= 1, got 0"):
        Readout(4, 0)
    with pytest.raises(ValueError, match=r"x must have shape \[\.\.\., 4\], got \[3, 5\]"):
        Readout(4, 2)(torch.randn(3, 5), torch.zeros(3).long())
    with pytest.raises(ValueError, match=r"loss\(head\(hidden\), targets\) must have shape \[3\] .*, got \[3, 2\]"):
        Readout(4, 2, lambda found, targets: found)(torch.randn(3, 4), torch.zeros(3))


# --- one baseline for each layer -------------------------------------------------------------------------------------


def forward(layers: int = 2) -> tuple[nn.Sequential, Tensor, Routings]:
    torch.manual_seed(0)
    model = nn.Sequential(*(MoE(4, 2, router="sample", loss="reinforce", marginal_entropy=0.0) for _ in range(layers)))
    x = torch.randn(8, 4)
    with capture(model) as routings:
        losses = model(x).square().mean(-1)
    return model, losses, routings


def test_each_layer_learns_with_its_own_baseline() -> None:
    gradients: list[list[Tensor]] = []
    for baseline in (0.3, 1.5, [0.3, 1.5]):
        model, losses, routings = forward()
        Surrogate(baseline)(losses, routings).backward()
        gradients.append([moe.router.weight.grad for moe in model])
    (low_first, _), (_, high_second), both = gradients
    torch.testing.assert_close(both, [low_first, high_second])
    assert not torch.equal(low_first, gradients[1][0])


def test_what_learns_moves_once_and_is_part_of_the_state() -> None:
    def build() -> Surrogate:
        return Surrogate([ResidualBaseline(), EMABaseline()])

    surrogate, r = build(), torch.rand(8)
    _, losses, routings = forward()
    surrogate(losses, routings, residual=[r, None])
    alone = ResidualBaseline()
    alone.update(losses.detach(), r)
    first, second = surrogate.baseline.each
    torch.testing.assert_close(first.moments, alone.moments)
    assert float(second.value) == pytest.approx(float(losses.detach().mean()), rel=1e-5)
    other = build()
    other.load_state_dict(copy.deepcopy(surrogate.state_dict()))
    assert torch.equal(other.baseline.each[0].moments, first.moments)
    assert torch.equal(other.baseline.each[1].value, second.value)
    assert torch.equal(copy.deepcopy(surrogate).baseline.each[0].moments, first.moments)

    shared = ResidualBaseline()
    _, losses, routings = forward()
    Surrogate([shared, shared])(losses, routings, residual=[r, r])
    torch.testing.assert_close(shared.moments, alone.moments)


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_baselines_and_residuals() -> None:
    _, losses, routings = forward()
    with pytest.raises(ValueError, match="baseline must hold one for each of the 2 layers that were captured, got 3"):
        Surrogate([0.0, 0.0, 0.0])(losses, routings)
    with pytest.raises(ValueError, match="residual must be a list of 2, as baseline is, got one"):
        Surrogate([ResidualBaseline(), 0.0])(losses, routings, residual=losses)
    with pytest.raises(ValueError, match="residual must be a list of 2, as baseline is, got a list of 1"):
        Surrogate([ResidualBaseline(), 0.0])(losses, routings, residual=[losses])
    with pytest.raises(ValueError, match="residual must be one for all layers, as baseline is, got a list of 2"):
        Surrogate(ResidualBaseline())(losses, routings, residual=[losses, losses])
    with pytest.raises(ValueError, match="residual must be given with a ResidualBaseline, got None"):
        Surrogate([0.0, ResidualBaseline()])(losses, routings, residual=[None, None])
    with pytest.raises(ValueError, match="residual must come with a ResidualBaseline, got another baseline"):
        Surrogate([0.0, ResidualBaseline()])(losses, routings, residual=[losses, losses])
    Surrogate([0.0, ResidualBaseline()])(losses, routings, residual=[None, losses])  # nothing was used up


def test_a_readout_predicts_better_than_a_constant() -> None:
    """Tokens differ by noise that no expert can help; a target of the same noise tells how much."""
    torch.manual_seed(0)
    moe = MoE(4, 2, hidden_dim=4, router="sample", marginal_entropy=0.0)
    readout = Readout(4, 1, lambda found, target: (found.squeeze(-1) - target).square())
    surrogate, optimizer = Surrogate([ResidualBaseline(0.9)]), torch.optim.Adam(readout.parameters(), lr=0.1)
    left: list[float] = []
    for _ in range(40):
        x, noise = torch.randn(64, 4), torch.randn(64)
        with capture(moe) as routings:
            losses = (noise + 0.1 * moe(x).sum(-1)).square()
        r = readout(x, x[:, 0] + noise)
        advantage = losses.detach() - surrogate.baseline.each[0](r.residual)
        (surrogate(losses, routings, residual=[r.residual]) + r.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        left.append(float(advantage.var() / losses.detach().var()))
    assert sum(left[-10:]) / 10 < 0.2  # a constant leaves all of it
