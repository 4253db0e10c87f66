# SPDX-License-Identifier: Apache-2.0
"""`weights="router"`, and gated outputs with the score function: their objectives, by enumeration, to 1e-12."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from equipoise.nn import Surrogate
from equipoise.nn._credit import credited
from support.outcomes import (
    Model,
    agree,
    all_runs,
    as_captured,
    as_decided,
    differ,
    estimate,
    exact,
    gradient,
    nothing_dropped,
    own_noise,
    rows,
)

pytestmark = pytest.mark.usefixtures("many_tiny_passes")


def of(model: Model, part: str) -> Tensor:
    """Which entries of a gradient belong to parameters of that name."""
    names = [name for name, parameter in model.named_parameters() for _ in range(parameter.numel())]
    return torch.tensor([part in name for name in names])


# --- weights on the score-function terms alone ------------------------------------------------------------------------

CASES = [
    ("sample", 0.5, (2, 2), 1, "self", "token", "reinforce"),
    ("skip-iw", 1.0, (2, 2), 1, "self", "token", "gated-reinforce"),
    ("skip-iw", 0.5, (3,), 2, "self", "token", "gated-reinforce"),
    ("sample", 0.5, (1, 3), 2, "past", "sequence", "reinforce"),
    ("skip-iw", 0.5, (2, 2), 1, "past", "sequence", "gated-reinforce"),
    ("skip-iw", 1.0, (2, 2), 1, "all", "batch", "reinforce"),
]


@pytest.mark.parametrize(("router", "temperature", "shape", "layers", "see", "credit", "loss"), CASES)
def test_each_decision_is_as_if_drawn_from_the_router(
    router: str, temperature: float, shape: tuple[int, ...], layers: int, see: str, credit: str, loss: str
) -> None:
    runs = all_runs(router, shape, layers=layers, see=see, temperature=temperature, loss=loss)
    wanted = as_decided(runs, credit)
    agree(estimate(runs, Surrogate(0.7, credit)), wanted)
    for weights in ("all", "none"):
        differ(estimate(runs, Surrogate(0.7, credit, weights=weights)), wanted)


@pytest.mark.parametrize(
    ("router", "temperature", "shape", "see", "loss"),
    [
        ("skip-iw", 0.5, (3,), "self", "reinforce"),
        ("skip-iw", 1.0, (3,), "self", "gated-reinforce"),
        ("sample", 0.5, (1, 3), "past", "gated-reinforce"),
    ],
)
def test_without_upstream_a_decision_trains_its_router_alone(
    router: str, temperature: float, shape: tuple[int, ...], see: str, loss: str
) -> None:
    how = {"layers": 2, "see": see, "temperature": temperature, "loss": loss}
    runs, whole = (all_runs(router, shape, upstream=upstream, **how) for upstream in (False, True))
    found, wanted = estimate(runs, Surrogate(0.7, "sequence")), as_decided(runs, "sequence")
    agree(found, wanted)
    differ(found, as_decided(whole, "sequence"))
    # The last router has nothing after it that could pass something on to others: its own gradient is that of before.
    last = of(runs[0], "moes.1.router")
    assert float((found[1] - as_decided(whole, "sequence")[1])[last].abs().max()) < 1e-12


@pytest.mark.parametrize(("router", "temperature"), [("sample", 0.5), ("skip-iw", 1.0), ("skip-iw", 0.5)])
def test_one_token_wise_layer_trains_the_router_for_the_model_that_drops_nothing(
    router: str, temperature: float
) -> None:
    runs = all_runs(router, (2, 2), temperature=temperature)
    found, wanted = estimate(runs, Surrogate(0.7))[1], nothing_dropped((2, 2))[1]
    gate = of(runs[0], "router")
    assert float((found - wanted)[gate].abs().max()) < 1e-12
    assert float((found - wanted)[~gate].abs().max()) > 1e-4  # the experts: the model as run


@pytest.mark.parametrize("weights", ["router", "all", "none"])
def test_on_policy_with_room_for_all_the_three_agree(weights: str) -> None:
    runs = all_runs("sample", (1, 3), layers=2, see="past")
    agree(estimate(runs, Surrogate(0.7, "sequence", weights=weights)), nothing_dropped((1, 3), layers=2, see="past"))


@pytest.mark.parametrize(
    ("temperature", "credit", "loss"),
    [(1.0, "token", "reinforce"), (0.5, "sequence", "gated-reinforce"), (2.0, "batch", "reinforce")],
)
def test_gumbel_matching_under_attention(temperature: float, credit: str, loss: str) -> None:
    """The terms of one row's decision, over that row's noise: all that it moves, other rows' experts included."""
    model, x = Model("gm-iw", see="past", temperature=temperature, loss=loss), rows(1, 3)
    for row in range(3):
        mean, objective = torch.zeros(()), torch.zeros(()).double()
        for chance, losses, emissions in own_noise(model, x, row):
            routing = emissions[0].routing
            assert routing.sample is not None
            only_row = torch.where(torch.arange(3) == row, routing.weight, 0.0)
            emissions = [emissions[0]._replace(routing=replace(routing, weight=only_row))]
            loss_of_row = Surrogate(0.7, credit)(losses.detach(), as_captured(model, emissions))
            mean = mean + chance * gradient(model, loss_of_row)
            answers = credited(losses.detach().flatten(), losses.shape, credit)[row]
            objective = objective + routing.log_p[row, routing.sample.z[row]].exp() * answers / 3
        assert float((mean - gradient(model, objective)).abs().max()) < 1e-12


# --- gated outputs with the score function ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("router", "temperature", "shape", "layers"),
    [("sample", 0.5, (2, 2), 1), ("skip-iw", 0.5, (2, 2), 1), ("skip-iw", 0.5, (3,), 2)],
)
def test_gated_model(router: str, temperature: float, shape: tuple[int, ...], layers: int) -> None:
    wanted = nothing_dropped(shape, layers=layers, loss="gated-reinforce")
    how = {"layers": layers, "temperature": temperature}
    surrogate = Surrogate(0.7, weights="all")
    agree(estimate(all_runs(router, shape, loss="gated-reinforce", **how), surrogate), wanted)
    differ(estimate(all_runs(router, shape, loss="gating", **how), surrogate), wanted)


@pytest.mark.parametrize("layers", [1, 2])
def test_gated_model_with_gumbel_matching(layers: int) -> None:
    model, x = Model("gm-iw", layers, temperature=0.5, loss="gated-reinforce"), rows(3)
    value, mean = 0.0, torch.zeros(())
    for row in range(3):
        for chance, losses, emissions in own_noise(model, x, row):
            mask = torch.arange(3) == row
            loss = Surrogate(0.7, weights="all")(losses, as_captured(model, emissions), mask=mask) / 3
            value, mean = value + chance * float(loss.detach()), mean + chance * gradient(model, loss)
    agree((value, mean), nothing_dropped((3,), layers=layers, loss="gated-reinforce"))


def test_gated_model_as_run() -> None:
    runs = all_runs("skip-iw", (2, 2), see="past", loss="gated-reinforce")
    agree(estimate(runs, Surrogate(0.7, "batch", weights="none")), exact(runs))
