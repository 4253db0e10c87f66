# SPDX-License-Identifier: Apache-2.0
"""What the surrogate's docstring says, statement by statement, to 1e-12: every outcome of every layer's noise.

The layers are real ones, with real strategies; only their noise is handed in. Each outcome (experts drawn, rows kept)
has a probability that is worked out here from the logits, and each objective is a sum over outcomes, differentiated by
autograd. A statement that an estimate is biased is a negative control: there the difference must be large.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from jaxtyping import config
from torch import Tensor, nn

from equipoise import reference
from equipoise.estimators import STRATEGIES, EMABaseline, Noise
from equipoise.nn import MoE, Readout, ResidualBaseline, SamplingRule, Surrogate, capture
from equipoise.nn._capture import Emission
from equipoise.nn._routings import Routings
from equipoise.ops import draw_gumbel

EXACT = 1e-12
BIASED = 1e-4
EXPERTS = 2
# Noise that decides a row's expert whatever the logits of these tests, without costing digits.
DECISIVE = 60.0


@pytest.fixture(autouse=True, scope="module")
def _thousands_of_tiny_passes() -> Iterator[None]:
    """Threads would only wait for each other, and signatures are checked in the other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
    torch.set_num_threads(before)


class Played:
    """A strategy of the table whose noise is set from outside."""

    def __init__(self, name: str) -> None:
        self._strategy = STRATEGIES[name]
        self.noise: Noise | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def draw_noise(self, shape: Sequence[int], **how: Any) -> Noise:
        assert self.noise is not None
        return self.noise

    def draw(self, log_p: Tensor, noise: Noise, **how: Any) -> Any:
        return self._strategy.draw(log_p, noise, **how)


class Model(nn.Module):
    """Residual blocks with experts, tokens that see each other or do not, and a loss for each token."""

    def __init__(
        self, router: str, layers: int = 1, see: str = "self", temperature: float = 1.0, capacity_factor: float = 1.0
    ) -> None:
        super().__init__()
        self.played = [Played(router) for _ in range(layers)]
        self.moes = nn.ModuleList(
            MoE(
                2,
                EXPERTS,
                hidden_dim=2,
                router=SamplingRule(played),
                temperature=temperature,
                capacity_factor=capacity_factor,
                dtype=torch.float64,
            )
            for played in self.played
        )
        self.head = nn.Parameter(torch.empty(2, dtype=torch.float64))
        self.see, self.temperature, self.capacity_factor = see, temperature, capacity_factor
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor, without: Sequence[int] = ()) -> Tensor:
        self.inputs: list[Tensor] = []
        for index, moe in enumerate(self.moes):
            self.inputs.append(x.detach())
            x = self.attend(x + moe(x) if index not in without else x)
        return (x @ self.head - 1.0).square()

    def attend(self, x: Tensor) -> Tensor:
        if self.see == "self":
            return x.tanh()
        scores = x @ x.mT
        if self.see == "past":
            positions = torch.arange(x.shape[-2])
            scores = scores.masked_fill(positions > positions[:, None], -torch.inf)
        return (x + scores.softmax(-1) @ x).tanh()


@dataclass(frozen=True)
class Outcome:
    """What one layer's noise does."""

    z: Tensor
    kept: Tensor
    chance: float  # P(kept | z)

    def noise(self) -> Noise:
        gumbel = DECISIVE * torch.nn.functional.one_hot(self.z, EXPERTS).double()
        return Noise(gumbel, torch.where(self.kept, 0.0, 1.0).double())


@dataclass(frozen=True)
class Run:
    """One forward pass, with what the noise of every layer did in it."""

    outcomes: tuple[Outcome, ...]
    losses: Tensor
    emissions: list[Emission]
    inputs: list[Tensor]  # what entered each layer

    def probability(self, temperature: float = 1.0) -> Tensor:
        """Of the outcome, when experts are drawn from softmax(logits / temperature); with gradient."""
        log_probability, chance = torch.zeros(()).double(), 1.0
        for emission, outcome in zip(self.emissions, self.outcomes, strict=True):
            log_q = (emission.routing.logits / temperature).log_softmax(-1)
            log_probability = log_probability + log_q.gather(1, outcome.z[:, None]).sum()
            chance *= outcome.chance
        return chance * log_probability.exp()


@cache
def all_outcomes(n: int, capacity: int) -> list[Outcome]:
    """Every assignment, and every set of rows that may be kept."""
    fair = torch.zeros(n, EXPERTS).double().log_softmax(-1)
    listed = reference.skip_outcomes(fair, capacity)
    chances = (listed.probability * EXPERTS**n).tolist()
    return [Outcome(*entry) for entry in zip(listed.z, listed.kept, chances, strict=True)]


@cache
def all_runs(router: str, shape: tuple[int, ...], **how: Any) -> tuple[Model, list[Run]]:
    """Plays every outcome of every layer. Graphs are kept: what is estimated from them is many things."""
    model, x = Model(router, **how), rows(*shape)
    n = x.shape[:-1].numel()
    capacity = model.moes[0].router.capacity(n) or n
    played: list[Run] = []
    for outcomes in product(all_outcomes(n, capacity), repeat=len(model.moes)):
        for strategy, outcome in zip(model.played, outcomes, strict=True):
            strategy.noise = outcome.noise()
        with capture(model) as routings:
            losses = model(x)
        for routing, outcome in zip(routings, outcomes, strict=True):
            assert routing.sample is not None
            assert torch.equal(routing.sample.z, outcome.z)
            assert torch.equal(routing.kept, outcome.kept)
        played.append(Run(outcomes, losses, routings.consume(), model.inputs))
    return model, played


def rows(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 1.5 * torch.randn(*shape, 2, generator=generator, dtype=torch.float64)


def gradient(model: Model, objective: Tensor) -> Tensor:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(objective, parameters, allow_unused=True, retain_graph=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(gradients, parameters, strict=True)]
    )


def as_captured(model: Model, emissions: Sequence[Emission]) -> Routings:
    """Records of a forward pass, as a capture yields them; they may be used again."""
    names = [str(index) for index in range(len(model.moes))]
    return Routings(names, list(model.moes), [[emission] for emission in emissions])


def estimate(
    runs: tuple[Model, list[Run]],
    surrogate: Surrogate,
    change: Callable[[list[Emission]], list[Emission]] = list,
    without: Sequence[int] | None = None,
    read: Sequence[int] | None = None,
    critic: Tensor | None = None,
) -> tuple[float, Tensor]:
    """The expectation of the surrogate's value and gradient; `read`: the layers whose inputs give r."""
    model, played = runs
    surrogate.eval()
    x = rows(*played[0].losses.shape)
    value, mean = 0.0, torch.zeros(())
    for run in played:
        for strategy, outcome in zip(model.played, run.outcomes, strict=True):
            strategy.noise = outcome.noise()
        residual: Any = None if without is None else lambda: model(x, without)
        if read is not None:
            residual = [readout(run.inputs[layer]) for layer in read]
        loss = surrogate(run.losses, as_captured(model, change(run.emissions)), residual=residual, critic=critic)
        chance = float(run.probability(model.temperature).detach())
        value, mean = value + chance * float(loss.detach()), mean + chance * gradient(model, loss)
    return value, mean


@cache
def how_often_kept(z: tuple[int, ...]) -> Tensor:
    """The fraction of the kept sets of z, all equally likely, that has each row."""
    sets = [outcome.kept for outcome in all_outcomes(len(z), 2) if tuple(outcome.z.tolist()) == z]
    return torch.stack(sets).double().mean(0)


def exact(runs: tuple[Model, list[Run]], kept_row: bool = False) -> tuple[float, Tensor]:
    """The mean loss of the model as it was played, with experts from the router, and its gradient.

    With `kept_row`, the loss of row i is its mean over those outcomes in which every layer keeps row i.
    """
    model, played = runs
    objective = torch.zeros(()).double()
    for run in played:
        share = torch.ones(run.losses.numel()).double()
        if kept_row:
            for outcome in run.outcomes:
                share = share * outcome.kept / how_often_kept(tuple(outcome.z.tolist()))
        objective = objective + run.probability() * (share * run.losses.flatten()).mean()
    return float(objective.detach()), gradient(model, objective)


@cache
def nothing_dropped(shape: tuple[int, ...], **how: Any) -> tuple[float, Tensor]:
    """The mean loss when experts come from the router and take every row, and its gradient."""
    return exact(all_runs("sample", shape, **how))


def agree(found: tuple[float, Tensor], wanted: tuple[float, Tensor]) -> None:
    assert abs(found[0] - wanted[0]) < EXACT
    assert float((found[1] - wanted[1]).abs().max()) < EXACT


def differ(found: tuple[float, Tensor], wanted: tuple[float, Tensor]) -> None:
    assert float((found[1] - wanted[1]).abs().max()) > BIASED


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
    agree(estimate(runs, Surrogate(BASELINES[baseline]())), nothing_dropped((2, 2)))


CRITIC = torch.tensor([[[0.5, 2.0], [-1.0, 0.3]], [[1.5, 0.1], [0.7, 0.7]]]).double()


@pytest.mark.parametrize(("router", "temperature"), [("sample", 0.5), ("skip-iw", 1.0)])
def test_one_layer_with_a_critic(router: str, temperature: float) -> None:
    runs = all_runs(router, (2, 2), temperature=temperature)
    agree(estimate(runs, Surrogate(0.2), critic=CRITIC), nothing_dropped((2, 2)))


def test_one_layer_with_a_critic_that_is_not_added_back_is_biased() -> None:
    model, played = runs = all_runs("sample", (2, 2))
    mean = torch.zeros(())
    for run in played:
        z = run.outcomes[0].z.reshape(2, 2, 1)
        loss = Surrogate()(run.losses, as_captured(model, run.emissions), baseline=CRITIC.gather(-1, z).squeeze(-1))
        mean = mean + float(run.probability().detach()) * gradient(model, loss)
    differ((0.0, mean), nothing_dropped((2, 2)))
    assert runs[0] is model


@pytest.mark.parametrize("credit", ["sequence", "batch"])
def test_one_layer_with_more_credit_than_is_due(credit: str) -> None:
    agree(estimate(all_runs("sample", (2, 2)), Surrogate(0.7, credit)), nothing_dropped((2, 2)))


def test_one_layer_average_over_what_is_left_is_biased() -> None:
    differ(estimate(all_runs("skip", (2, 2)), Surrogate(0.7)), nothing_dropped((2, 2)))


@pytest.mark.parametrize("router", ["sample", "skip-iw"])
def test_one_layer_without_weights_off_policy_is_biased(router: str) -> None:
    runs = all_runs(router, (2, 2), temperature=0.5)
    differ(estimate(runs, Surrogate(0.7, weighted=False)), nothing_dropped((2, 2)))


# --- several token-wise layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("router", "temperature"), [("sample", 1.0), ("sample", 0.5), ("skip-iw", 1.0)])
def test_two_layers(router: str, temperature: float) -> None:
    runs = all_runs(router, (3,), layers=2, temperature=temperature)
    agree(estimate(runs, Surrogate(0.7)), nothing_dropped((3,), layers=2))


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
    found = estimate(runs, Surrogate(0.7), own_weight(layer))[1]
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
    found = estimate(runs, Surrogate(fitted()), without=without)
    (agree if unbiased else differ)(found, nothing_dropped((3,), layers=2))


def readout(hidden: Tensor) -> Tensor:
    """A readout that has learnt something, from past batches."""
    head = nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.8, -0.5]]))
        head.bias.fill_(0.2)
    module = Readout(2, head, lambda found, target: (found.squeeze(-1) - target).square())
    return module(hidden, torch.ones(hidden.shape[:-1])).residual


READ = pytest.mark.parametrize(("read", "unbiased"), [((0, 1), True), ((0, 0), True), ((1, 1), False)])


@READ
@pytest.mark.parametrize(("router", "temperature"), [("sample", 0.5), ("skip-iw", 1.0)])
def test_two_layers_with_readouts_as_baselines(
    router: str, temperature: float, read: tuple[int, ...], unbiased: bool
) -> None:
    """What enters a layer may serve that layer and those after it, not those before it."""
    runs = all_runs(router, (3,), layers=2, temperature=temperature)
    found = estimate(runs, Surrogate([fitted(), fitted()]), read=read)
    (agree if unbiased else differ)(found, nothing_dropped((3,), layers=2))


@READ
def test_readouts_as_baselines_under_attention(read: tuple[int, ...], unbiased: bool) -> None:
    runs = all_runs("sample", (1, 3), layers=2, see="past")
    found = estimate(runs, Surrogate([fitted(), fitted()], "sequence"), read=read)
    (agree if unbiased else differ)(found, nothing_dropped((1, 3), layers=2, see="past"))


# --- attention -------------------------------------------------------------------------------------------------------

ATTENTION = pytest.mark.parametrize(("shape", "layers"), [((2, 2), 1), ((1, 3), 2)])


@ATTENTION
@pytest.mark.parametrize(("credit", "unbiased"), [("token", False), ("sequence", True), ("batch", True)])
def test_causal_attention(credit: str, unbiased: bool, shape: tuple[int, ...], layers: int) -> None:
    found = estimate(all_runs("sample", shape, layers=layers, see="past"), Surrogate(0.7, credit))
    (agree if unbiased else differ)(found, nothing_dropped(shape, layers=layers, see="past"))


@pytest.mark.parametrize(("credit", "unbiased"), [("token", False), ("sequence", False), ("batch", True)])
def test_attention_that_looks_ahead(credit: str, unbiased: bool) -> None:
    found = estimate(all_runs("sample", (2, 2), see="all"), Surrogate(0.7, credit))
    (agree if unbiased else differ)(found, nothing_dropped((2, 2), see="all"))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("credit", ["sequence", "batch"])
def test_attention_off_policy_is_biased(credit: str, weighted: bool) -> None:
    runs = all_runs("sample", (2, 2), see="past", temperature=0.5)
    differ(estimate(runs, Surrogate(0.7, credit, weighted=weighted)), nothing_dropped((2, 2), see="past"))


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
    found = estimate(runs, Surrogate(0.7, credit, weighted=False))
    (agree if unbiased else differ)(found, exact(runs))


def test_attention_and_dropping_without_weights_is_the_same_for_skip() -> None:
    runs = all_runs("skip", (2, 2), see="past")
    agree(estimate(runs, Surrogate(0.7, "batch", weighted=False)), exact(runs))
    differ(estimate(runs, Surrogate(0.7, "batch")), exact(runs, kept_row=True))


@ATTENTION
def test_attention_and_dropping_with_weights(shape: tuple[int, ...], layers: int) -> None:
    runs = all_runs("skip-iw", shape, layers=layers, see="past")
    found = estimate(runs, Surrogate(0.7, "batch"))
    agree(found, exact(runs, kept_row=True))
    differ(found, exact(runs))
    differ(found, nothing_dropped(shape, layers=layers, see="past"))
    if layers == 1:
        differ(estimate(runs, Surrogate(0.7, "sequence")), exact(runs, kept_row=True))


@pytest.mark.parametrize("weighted", [True, False])
def test_attention_with_room_for_all_is_that_of_sample(weighted: bool) -> None:
    runs = all_runs("skip-iw", (2, 2), see="past", capacity_factor=2.0)
    agree(estimate(runs, Surrogate(0.7, "sequence", weighted=weighted)), nothing_dropped((2, 2), see="past"))


# --- Gumbel-Matching: for each row's term, that row's noise alone is redrawn ------------------------------------------


def own_noise(model: Model, x: Tensor, row: int) -> Iterator[tuple[float, Tensor, list[Emission]]]:
    """Every way that row i's noise can turn out in all layers, given the noise of the other rows, with its chance."""
    n = x.shape[:-1].numel()
    generator = torch.Generator().manual_seed(2)
    others = [draw_gumbel([n, EXPERTS], generator=generator, dtype=torch.float64) for _ in model.moes]
    for choices in product(range(EXPERTS), repeat=len(model.moes)):
        for strategy, noise, choice in zip(model.played, others, choices, strict=True):
            gumbel = noise.clone()
            gumbel[row] = DECISIVE * torch.eye(EXPERTS).double()[choice]
            strategy.noise = Noise(gumbel)
        with capture(model) as routings:
            losses = model(x)
        chance = 1.0
        for routing, noise, choice in zip(routings, others, choices, strict=True):
            assert routing.sample is not None
            assert int(routing.sample.z[row]) == choice
            capacity = model.moes[0].router.capacity(n)
            q = reference.gumbel_matching_conditional(
                routing.log_p, noise, row, temperature=model.temperature, capacity=capacity
            )
            chance *= float(q[choice])
        yield chance, losses, routings.consume()


@pytest.mark.parametrize(("layers", "temperature"), [(1, 1.0), (1, 0.5), (2, 1.0), (2, 2.0)])
def test_gumbel_matching_token_wise(layers: int, temperature: float) -> None:
    model, x, surrogate = Model("gm-iw", layers, temperature=temperature), rows(3), Surrogate(0.7)
    value, mean = 0.0, torch.zeros(())
    for row in range(3):
        for chance, losses, emissions in own_noise(model, x, row):
            mask = torch.arange(3) == row
            loss = surrogate(losses, as_captured(model, emissions), mask=mask) / 3
            value, mean = value + chance * float(loss.detach()), mean + chance * gradient(model, loss)
    agree((value, mean), nothing_dropped((3,), layers=layers))


def test_gumbel_matching_under_attention_balances_the_context_around_a_token() -> None:
    """Two rows, one slot each: the other row is always where this one is not, whatever its own router says."""
    model, x, surrogate = Model("gm-iw", see="past"), rows(1, 2), Surrogate(0.7)
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
