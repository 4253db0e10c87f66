# SPDX-License-Identifier: Apache-2.0
"""Every outcome of every layer's noise in a small model, with its probability: what the exact tests of layers sum over.

The layers are real ones, with real strategies; only their noise is handed in. Each outcome (experts drawn, rows kept)
has a probability that is worked out here from the logits, and each objective is a sum over outcomes, differentiated by
autograd.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from equipoise import reference
from equipoise.estimators import STRATEGIES, Noise
from equipoise.nn import MoE, Readout, SamplingRule, Surrogate, capture
from equipoise.nn._capture import Emission
from equipoise.nn._credit import credited
from equipoise.nn._routings import Routings
from equipoise.ops import draw_gumbel

EXACT = 1e-12
BIASED = 1e-4
EXPERTS = 2
# Noise that decides a row's expert whatever the logits of these tests, without costing digits.
DECISIVE = 60.0


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
        self,
        router: str,
        layers: int = 1,
        see: str = "self",
        temperature: float = 1.0,
        capacity_factor: float = 1.0,
        loss: str = "reinforce",
        upstream: bool = True,
    ) -> None:
        super().__init__()
        self.played = [Played(router) for _ in range(layers)]
        self.moes = nn.ModuleList(
            MoE(
                2,
                EXPERTS,
                hidden_dim=2,
                router=SamplingRule(played, loss=loss),
                temperature=temperature,
                capacity_factor=capacity_factor,
                upstream=upstream,
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


def as_decided(runs: tuple[Model, list[Run]], credit: str) -> tuple[float, Tensor]:
    """The mean loss of the model as run; its gradient with the draws fixed, and what each decision adds to it.

    For each token and layer: the losses that the decision answers for, when it comes from the router and the token is
    kept, while all other draws and kept sets have the chances that they have in the run. Written with probabilities.
    Without `upstream`, a decision adds this to its router's own parameters alone.
    """
    model, played = runs
    value, objective = 0.0, torch.zeros(()).double()
    for run in played:
        chance, n = run.probability(model.temperature).detach(), run.losses.numel()
        value += float(chance * run.losses.detach().mean())
        objective = objective + chance * run.losses.mean()
        answers = credited(run.losses.detach().flatten(), run.losses.shape, credit)
        for emission, outcome, moe, x in zip(run.emissions, run.outcomes, model.moes, run.inputs, strict=True):
            z = outcome.z.unsqueeze(1)
            logits = emission.routing.logits if moe.router.upstream else x.reshape(-1, 2) @ moe.router.weight.T
            p = logits.softmax(-1).gather(1, z).squeeze(1)
            q = (emission.routing.logits.detach() / model.temperature).softmax(-1).gather(1, z).squeeze(1)
            kept = outcome.kept / how_often_kept(tuple(outcome.z.tolist())) if has_capacity(model) else 1.0
            objective = objective + (chance / q * p * kept * answers).sum() / n
    return value, gradient(model, objective)


def has_capacity(model: Model) -> bool:
    return model.moes[0].router.traits.limited


@cache
def nothing_dropped(shape: tuple[int, ...], **how: Any) -> tuple[float, Tensor]:
    """The mean loss when experts come from the router and take every row, and its gradient."""
    return exact(all_runs("sample", shape, **how))


def agree(found: tuple[float, Tensor], wanted: tuple[float, Tensor]) -> None:
    assert abs(found[0] - wanted[0]) < EXACT
    assert float((found[1] - wanted[1]).abs().max()) < EXACT


def differ(found: tuple[float, Tensor], wanted: tuple[float, Tensor]) -> None:
    assert float((found[1] - wanted[1]).abs().max()) > BIASED


def readout(hidden: Tensor) -> Tensor:
    """A readout that has learnt something, from past batches."""
    head = nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.8, -0.5]]))
        head.bias.fill_(0.2)
    module = Readout(2, head, lambda found, target: (found.squeeze(-1) - target).square())
    return module(hidden, torch.ones(hidden.shape[:-1])).residual


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
