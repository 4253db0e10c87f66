# SPDX-License-Identifier: Apache-2.0
"""A critic for each layer: the estimate stays what it is, by enumeration to 1e-12, and the critics learn."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.nn import MoE, Readouts, Surrogate, _surrogate, capture
from support.outcomes import (
    Model,
    Run,
    agree,
    all_runs,
    as_captured,
    as_decided,
    differ,
    gradient,
    nothing_dropped,
    own_noise,
    rows,
)

pytestmark = pytest.mark.usefixtures("many_tiny_passes")


def squared(found: Tensor, targets: Tensor) -> Tensor:
    return (found.squeeze(-1) - targets).square()


def with_critics(model: Model, **how: Any) -> Surrogate:
    """Readouts and critics that past batches have taught something."""
    surrogate = Surrogate(Readouts(model, 1, squared, critic=True, dtype=torch.float64), **how).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in surrogate.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return surrogate


def estimate(runs: tuple[Model, list[Run]], surrogate: Surrogate) -> tuple[float, Tensor]:
    model, played = runs
    value, mean = 0.0, torch.zeros(())
    for run in played:
        emissions = [e._replace(inputs=x) for e, x in zip(run.emissions, run.inputs, strict=True)]
        loss = surrogate(run.losses, as_captured(model, emissions), targets=torch.ones_like(run.losses))
        chance = float(run.probability(model.temperature).detach())
        value, mean = value + chance * float(loss.detach()), mean + chance * gradient(model, loss)
    return value, mean


CASES = [("sample", 0.5, "reinforce"), ("skip-iw", 1.0, "reinforce"), ("skip-iw", 0.5, "gated-reinforce")]


@pytest.mark.parametrize(("router", "temperature", "loss"), CASES)
def test_two_layers_with_all_weights(router: str, temperature: float, loss: str) -> None:
    runs = all_runs(router, (3,), layers=2, temperature=temperature, loss=loss)
    agree(estimate(runs, with_critics(runs[0], weights="all")), nothing_dropped((3,), layers=2, loss=loss))


@pytest.mark.parametrize("upstream", [True, False])
@pytest.mark.parametrize(("router", "temperature", "loss"), CASES)
def test_two_layers_with_the_routers_weights(router: str, temperature: float, loss: str, upstream: bool) -> None:
    runs = all_runs(router, (3,), layers=2, temperature=temperature, loss=loss, upstream=upstream)
    agree(estimate(runs, with_critics(runs[0])), as_decided(runs, "token"))


def test_two_layers_without_weights_under_attention() -> None:
    runs = all_runs("sample", (1, 3), layers=2, see="past")
    agree(estimate(runs, with_critics(runs[0], weights="none")), as_decided(runs, "token"))


def test_gumbel_matching() -> None:
    model, x = Model("gm-iw", 2, temperature=0.5), rows(3)
    surrogate = with_critics(model, weights="all")
    value, mean = 0.0, torch.zeros(())
    for row in range(3):
        for chance, losses, emissions in own_noise(model, x, row):
            emissions = [e._replace(inputs=x) for e, x in zip(emissions, model.inputs, strict=True)]
            how = {"mask": torch.arange(3) == row, "targets": torch.ones(3)}
            loss = surrogate(losses, as_captured(model, emissions), **how) / 3
            value, mean = value + chance * float(loss.detach()), mean + chance * gradient(model, loss)
    agree((value, mean), nothing_dropped((3,), layers=2))


@pytest.mark.parametrize("broken", ["not added back", "without the weights of layers before"])
def test_what_is_added_back_matters(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _surrogate.add_back

    def changed(*arguments: Any, product: bool, **how: Any) -> Any:
        return 0.0 if broken == "not added back" else whole(*arguments, product=False, **how)

    monkeypatch.setattr(_surrogate, "add_back", changed)
    runs = all_runs("sample", (3,), layers=2, temperature=0.5)
    differ(estimate(runs, with_critics(runs[0], weights="all")), nothing_dropped((3,), layers=2))


# --- learning ---------------------------------------------------------------------------------------------------------


def test_critics_learn_what_baselines_leave() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MoE(4, 3, hidden_dim=4, router="skip-iw"), MoE(4, 2, hidden_dim=4, router="switch"))
    surrogate = Surrogate(Readouts(model, 1, squared, critic=True))
    optimizer = torch.optim.Adam(surrogate.parameters(), lr=0.05)
    x, targets, errors = torch.randn(64, 4), torch.ones(64), []
    for _ in range(60):
        with capture(model, inputs=True) as routings:
            y = model(x).mean(-1)
        losses = y + 2.0 * x[:, 0] * (routings[0].indices.squeeze(1) == 0)  # by input and expert
        parts = surrogate.parts(losses, routings, targets=targets)
        parts.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert parts.critic is not None
        errors.append(float(parts.critic))
    assert sum(errors[-5:]) < 0.6 * sum(errors[:5])
    assert not surrogate.baseline.critics[1].weight.any()  # of a layer that is gated


def test_refusals() -> None:
    model = MoE(4, 3, hidden_dim=4, router="skip-iw", top_k=2)
    with pytest.raises(ValueError, match=r"credit must be 'token' with Readouts\(\.\.\., critic=True\), got 'batch'"):
        Surrogate(Readouts(model, 1, critic=True), "batch")
    with capture(model, inputs=True) as routings:
        losses = model(torch.randn(6, 4)).mean(-1)
    with pytest.raises(ValueError, match="critic must come with a router that learns by .*, got top_k = 2"):
        Surrogate(Readouts(model, 1, squared, critic=True))(losses, routings, targets=torch.ones(6))
