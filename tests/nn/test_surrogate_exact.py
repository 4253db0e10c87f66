# SPDX-License-Identifier: Apache-2.0
"""What the surrogate's docstring says of `weights="all"` and `"none"`, statement by statement, to 1e-12.

Every outcome of every layer's noise is played, see `support.outcomes`. A statement that an estimate is biased is a
negative control: there the difference must be large.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from equipoise.estimators import EMABaseline
from equipoise.nn import ResidualBaseline, Surrogate
from equipoise.nn._capture import Emission
from support.outcomes import (
    BIASED,
    EXACT,
    Model,
    agree,
    all_runs,
    as_captured,
    differ,
    estimate,
    exact,
    gradient,
    nothing_dropped,
    own_noise,
    rows,
)

weighted = partial(Surrogate, weights="all")


pytestmark = pytest.mark.usefixtures("many_tiny_passes")


def moved_average() -> EMABaseline:
    average = EMABaseline()
    average.value = torch.tensor(1.3)
    return average


# --- one layer -------------------------------------------------------------------------------------------------------

BASELINES = {
    "number": lambda: 0.7,
    "token": lambda: torch.tensor([[0.1, -1.0], [2.0, 0.5]]).double(),
    "average": moved_average,
}


@pytest.mark.parametrize(("baseline", "temperature"), [("number", 1.0), ("token", 0.5), ("average", 0.5)])
@pytest.mark.parametrize("router", ["sample", "skip-iw"])
def test_one_layer(router: str, temperature: float, baseline: str) -> None:
    runs = all_runs(router, (2, 2), temperature=temperature)
    agree(estimate(runs, weighted(BASELINES[baseline]())), nothing_dropped((2, 2)))


CRITIC = torch.tensor([[[0.5, 2.0], [-1.0, 0.3]], [[1.5, 0.1], [0.7, 0.7]]]).double()


@pytest.mark.parametrize(("router", "temperature"), [("sample", 0.5), ("skip-iw", 1.0)])
def test_one_layer_with_a_critic(router: str, temperature: float) -> None:
    runs = all_runs(router, (2, 2), temperature=temperature)
    agree(estimate(runs, weighted(0.2), critic=CRITIC), nothing_dropped((2, 2)))


def test_one_layer_with_a_critic_that_is_not_added_back_is_biased() -> None:
    model, played = runs = all_runs("sample", (2, 2))
    mean = torch.zeros(())
    for run in played:
        z = run.outcomes[0].z.reshape(2, 2, 1)
        loss = weighted()(run.losses, as_captured(model, run.emissions), baseline=CRITIC.gather(-1, z).squeeze(-1))
        mean = mean + float(run.probability().detach()) * gradient(model, loss)
    differ((0.0, mean), nothing_dropped((2, 2)))
    assert runs[0] is model


@pytest.mark.parametrize("credit", ["sequence", "batch"])
def test_one_layer_with_more_credit_than_is_due(credit: str) -> None:
    agree(estimate(all_runs("sample", (2, 2)), weighted(0.7, credit)), nothing_dropped((2, 2)))


def test_one_layer_average_over_what_is_left_is_biased() -> None:
    differ(estimate(all_runs("skip", (2, 2)), weighted(0.7)), nothing_dropped((2, 2)))


@pytest.mark.parametrize("router", ["sample", "skip-iw"])
def test_one_layer_without_weights_off_policy_is_biased(router: str) -> None:
    runs = all_runs(router, (2, 2), temperature=0.5)
    differ(estimate(runs, Surrogate(0.7, weights="none")), nothing_dropped((2, 2)))


# --- several token-wise layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("router", "temperature"), [("sample", 1.0), ("sample", 0.5), ("skip-iw", 1.0)])
def test_two_layers(router: str, temperature: float) -> None:
    runs = all_runs(router, (3,), layers=2, temperature=temperature)
    agree(estimate(runs, weighted(0.7)), nothing_dropped((3,), layers=2))


def own_weight(layer: int) -> Callable[[list[Emission]], list[Emission]]:
    """Forgets the other layers' weights."""

    def change(emissions: list[Emission]) -> list[Emission]:
        plain = torch.ones_like(emissions[0].routing.weight)
        return [
            emission if index == layer else emission._replace(routing=replace(emission.routing, weight=plain))
            for index, emission in enumerate(emissions)
        ]

    return change


@pytest.mark.parametrize(
    ("router", "temperature", "layer"), [("sample", 0.5, 0), ("sample", 0.5, 1), ("skip-iw", 1.0, 0)]
)
def test_two_layers_each_with_its_own_weight_is_biased(router: str, temperature: float, layer: int) -> None:
    runs = all_runs(router, (3,), layers=2, temperature=temperature)
    found = estimate(runs, weighted(0.7), own_weight(layer))[1]
    names = [name for name, parameter in runs[0].named_parameters() for _ in range(parameter.numel())]
    gate = torch.tensor([name == f"moes.{layer}.router.weight" for name in names])
    assert int(gate.sum()) == 4
    error = (found - nothing_dropped((3,), layers=2)[1])[gate].abs().max()
    # The last layer's own draws are corrected; it is the first layer's that its loss and its inputs depend on.
    assert float(error) > BIASED


def fitted() -> ResidualBaseline:
    """A residual baseline that has seen another batch."""
    baseline = ResidualBaseline()
    past = torch.linspace(0.0, 2.0, 7).double()
    baseline.update(1.5 * past + torch.tensor([0.3, -0.2, 0.1, 0.0, -0.1, 0.2, 0.4]).double(), past)
    return baseline


@pytest.mark.parametrize(("without", "unbiased"), [((0, 1), True), ((1,), False)])
def test_two_layers_with_the_residual_as_baseline(without: tuple[int, ...], unbiased: bool) -> None:
    runs = all_runs("sample", (3,), layers=2)
    found = estimate(runs, weighted(fitted()), without=without)
    (agree if unbiased else differ)(found, nothing_dropped((3,), layers=2))


READ = pytest.mark.parametrize(("read", "unbiased"), [((0, 1), True), ((0, 0), True), ((1, 1), False)])


@READ
@pytest.mark.parametrize(("router", "temperature"), [("sample", 0.5), ("skip-iw", 1.0)])
def test_two_layers_with_readouts_as_baselines(
    router: str, temperature: float, read: tuple[int, ...], unbiased: bool
) -> None:
    """What enters a layer may serve that layer and those after it, not those before it."""
    runs = all_runs(router, (3,), layers=2, temperature=temperature)
    found = estimate(runs, weighted([fitted(), fitted()]), read=read)
    (agree if unbiased else differ)(found, nothing_dropped((3,), layers=2))


@READ
def test_readouts_as_baselines_under_attention(read: tuple[int, ...], unbiased: bool) -> None:
    runs = all_runs("sample", (1, 3), layers=2, see="past")
    found = estimate(runs, weighted([fitted(), fitted()], "sequence"), read=read)
    (agree if unbiased else differ)(found, nothing_dropped((1, 3), layers=2, see="past"))


# --- attention -------------------------------------------------------------------------------------------------------

ATTENTION = pytest.mark.parametrize(("shape", "layers"), [((2, 2), 1), ((1, 3), 2)])


@ATTENTION
@pytest.mark.parametrize(("credit", "unbiased"), [("token", False), ("sequence", True), ("batch", True)])
def test_causal_attention(credit: str, unbiased: bool, shape: tuple[int, ...], layers: int) -> None:
    found = estimate(all_runs("sample", shape, layers=layers, see="past"), weighted(0.7, credit))
    (agree if unbiased else differ)(found, nothing_dropped(shape, layers=layers, see="past"))


@pytest.mark.parametrize(("credit", "unbiased"), [("token", False), ("sequence", False), ("batch", True)])
def test_attention_that_looks_ahead(credit: str, unbiased: bool) -> None:
    found = estimate(all_runs("sample", (2, 2), see="all"), weighted(0.7, credit))
    (agree if unbiased else differ)(found, nothing_dropped((2, 2), see="all"))


@pytest.mark.parametrize("weights", ["all", "none"])
@pytest.mark.parametrize("credit", ["sequence", "batch"])
def test_attention_off_policy_is_biased(credit: str, weights: str) -> None:
    runs = all_runs("sample", (2, 2), see="past", temperature=0.5)
    differ(estimate(runs, Surrogate(0.7, credit, weights=weights)), nothing_dropped((2, 2), see="past"))


@pytest.mark.parametrize(
    ("credit", "unbiased", "shape", "layers"),
    [
        ("token", False, (2, 2), 1),
        ("sequence", False, (2, 2), 1),
        ("batch", True, (2, 2), 1),
        ("batch", True, (1, 3), 2),
    ],
)
def test_attention_and_dropping_for_the_model_as_run(
    credit: str, unbiased: bool, shape: tuple[int, ...], layers: int
) -> None:
    runs = all_runs("skip-iw", shape, layers=layers, see="past")
    found = estimate(runs, Surrogate(0.7, credit, weights="none"))
    (agree if unbiased else differ)(found, exact(runs))


def test_attention_and_dropping_without_weights_is_the_same_for_skip() -> None:
    runs = all_runs("skip", (2, 2), see="past")
    agree(estimate(runs, Surrogate(0.7, "batch", weights="none")), exact(runs))
    differ(estimate(runs, weighted(0.7, "batch")), exact(runs, kept_row=True))


@ATTENTION
def test_attention_and_dropping_with_weights(shape: tuple[int, ...], layers: int) -> None:
    runs = all_runs("skip-iw", shape, layers=layers, see="past")
    found = estimate(runs, weighted(0.7, "batch"))
    agree(found, exact(runs, kept_row=True))
    differ(found, exact(runs))
    differ(found, nothing_dropped(shape, layers=layers, see="past"))
    if layers == 1:
        differ(estimate(runs, weighted(0.7, "sequence")), exact(runs, kept_row=True))


@pytest.mark.parametrize("weights", ["all", "none"])
def test_attention_with_room_for_all_is_that_of_sample(weights: str) -> None:
    runs = all_runs("skip-iw", (2, 2), see="past", capacity_factor=2.0)
    agree(estimate(runs, Surrogate(0.7, "sequence", weights=weights)), nothing_dropped((2, 2), see="past"))


# --- Gumbel-Matching: for each row's term, that row's noise alone is redrawn ------------------------------------------


@pytest.mark.parametrize(("layers", "temperature"), [(1, 1.0), (1, 0.5), (2, 1.0), (2, 2.0)])
def test_gumbel_matching_token_wise(layers: int, temperature: float) -> None:
    model, x, surrogate = Model("gm-iw", layers, temperature=temperature), rows(3), weighted(0.7)
    value, mean = 0.0, torch.zeros(())
    for row in range(3):
        for chance, losses, emissions in own_noise(model, x, row):
            mask = torch.arange(3) == row
            loss = surrogate(losses, as_captured(model, emissions), mask=mask) / 3
            value, mean = value + chance * float(loss.detach()), mean + chance * gradient(model, loss)
    agree((value, mean), nothing_dropped((3,), layers=layers))


def test_gumbel_matching_under_attention_balances_the_context_around_a_token() -> None:
    """Two rows, one slot each: the other row is always where this one is not, whatever its own router says."""
    model, x, surrogate = Model("gm-iw", see="past"), rows(1, 2), weighted(0.7)
    value = 0.0
    for row in range(2):
        for chance, losses, emissions in own_noise(model, x, row):
            loss = surrogate(losses, as_captured(model, emissions), mask=torch.arange(2)[None] == row)
            value += chance * float(loss.detach()) / 2
    balanced = 0.0
    for run in all_runs("sample", (1, 2), see="past")[1]:
        z = run.outcomes[0].z
        if int(z[0]) != int(z[1]):
            p = run.emissions[0].routing.log_p.detach().exp()
            balanced += float((p[[0, 1], z] * run.losses.detach().flatten()).sum()) / 2
    assert value == pytest.approx(balanced, abs=EXACT)
    assert abs(value - nothing_dropped((1, 2), see="past")[0]) > BIASED
