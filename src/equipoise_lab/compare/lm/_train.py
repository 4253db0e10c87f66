# SPDX-License-Identifier: Apache-2.0
"""Trains and evaluates one run of the language-model comparison.

Legend: B sequences, S positions, V token ids.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from equipoise.nn import MoE, Readouts, Routing, Surrogate, TokenPrior, capture
from equipoise_lab.compare.lm._model import LanguageModel, make_mlp, num_router_ids
from equipoise_lab.compare.lm._recipe import CONTENDERS, LanguageModels, Run
from equipoise_lab.compare.lm._text import Text, gather, pieces

LIMIT = 1.25
"""The capacity factor of the evaluation within a capacity."""
# Streams of a seed.
_ORDER, _EXPERTS, _NOISE = 1 << 30, 2 << 30, 3 << 30
_POINTS = 5
_WARMUP, _LEAST, _CLIP = 100, 0.1, 1.0
_BETAS, _WEIGHT_DECAY = (0.9, 0.95), 0.1
# Steps between readings of the load in training, and sequences of a batch in evaluation.
_EVERY, _EVALUATED = 25, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """How tokens were routed, averaged over layers and batches; zeros without routing."""

    violation: float  # the largest load over the mean load, minus 1
    dropped: float  # the fraction of tokens that no expert processed


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a run found."""

    run: Run  # which one
    curve: tuple[tuple[int, float], ...]  # pairs of step and validation loss, in nats a byte; the last is the end
    test: float | None  # the test loss at the end; None for runs that only choose a setting
    # The same where an expert takes at most `LIMIT` times its share of a batch; the rest is dropped.
    limited_test: float | None
    training: Routed  # the routing of training batches, within the capacity
    evaluation: Routed  # that of validation batches at the end
    step_time: float  # processor time of a training step, in seconds

    @property
    def validation(self) -> float:
        """The validation loss at the end; infinite where the run diverged, so that it is never the least."""
        last = self.curve[-1][1]
        return last if math.isfinite(last) else math.inf

    def write(self) -> dict[str, Any]:
        """Lists everything but the run, as JSON knows it."""
        return {name: value for name, value in asdict(self).items() if name != "run"}


def read_trained(run: Run, content: Any) -> Trained:
    """Makes of JSON what `Trained.write` made of it."""
    return Trained(
        run=run,
        curve=tuple((int(step), float(loss)) for step, loss in content["curve"]),
        test=content["test"],
        limited_test=content.get("limited_test"),
        training=Routed(**content["training"]),
        evaluation=Routed(**content["evaluation"]),
        step_time=content["step_time"],
    )


def train(run: Run, recipe: LanguageModels, text: Text, *, progress: Callable[[int], object] | None = None) -> Trained:
    """Trains one run, a pure function of the recipe, its setting, its seed and the text.

    The test split is read at the end of final runs only; `progress` is called with a number of steps that are done.
    """
    learner, steps = Learner(run, recipe), recipe.steps
    lengths = text.lengths
    points = sorted({max(steps * (i + 1) // _POINTS, 1) for i in range(_POINTS)})
    validation = pieces(text.validation, recipe.validation_pieces, recipe.context)
    curve: list[tuple[int, float]] = []
    loads: list[Routed] = []
    evaluation, seconds, done = Routed(violation=0.0, dropped=0.0), 0.0, 0
    for step, batch in zip(range(1, steps + 1), _batches(run.seed, recipe, text), strict=False):
        began = time.process_time()
        routings = learner.step(batch, _rate(step - 1, steps))
        seconds += time.process_time() - began
        if step % _EVERY == 0 or step == 1:
            loads.append(_routed(routings))
        if step in points:
            loss, evaluation = learner.evaluate(validation, lengths)
            curve.append((step, loss))
            if progress is not None:
                progress(step - done)
            done = step
    test = pieces(text.test, recipe.test_pieces, recipe.context) if run.final else None
    return Trained(
        run=run,
        curve=tuple(curve),
        test=None if test is None else learner.evaluate(test, lengths)[0],
        limited_test=None if test is None else learner.evaluate(test, lengths, LIMIT)[0],
        training=_mean_routed(loads),
        evaluation=evaluation,
        step_time=seconds / steps,
    )


class Learner:
    """A model, its optimiser, and what it minimises in a step."""

    def __init__(self, run: Run, recipe: LanguageModels) -> None:
        """Builds model and optimiser; parameters outside the experts depend on the seed alone."""
        contender = CONTENDERS[run.contender]
        torch.manual_seed(_EXPERTS + run.seed)
        layers = [make_layer(run, recipe, index) for index in range(recipe.blocks)]
        self.model = LanguageModel(
            recipe.dim,
            recipe.heads,
            recipe.context,
            layers,
            vocabulary=recipe.vocabulary,
            id_length=run.setting.id_length,
            init=lambda: torch.manual_seed(run.seed),
        )
        self.routed = contender.router is not None
        self.scored = scored = contender.options.get("loss") == "gated-reinforce"
        self.surrogate = Surrogate(
            Readouts(self.model, recipe.vocabulary) if scored else None, weights=contender.weights
        )
        groups = _groups(self.model, self.surrogate)
        self.optimizer = torch.optim.AdamW(groups, lr=run.setting.learning_rate, betas=_BETAS, fused=True)
        self.learning_rate = run.setting.learning_rate
        torch.manual_seed(_NOISE + run.seed)

    def step(self, batch: Int[Tensor, "B S"], rate: float) -> Sequence[Routing]:
        """Takes one step of the optimiser, at a fraction of the learning rate; returns the routing of each layer."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * rate
        inputs, targets = batch[:, :-1], batch[:, 1:]
        if not self.routed:
            _token_losses(self.model(inputs), targets).mean().backward()
            self._move()
            return []
        with capture(self.model, self.optimizer, inputs=self.scored) as routings:
            losses = _token_losses(self.model(inputs), targets)
        self.surrogate(losses, routings, targets=targets if self.scored else None).backward()
        self._move()
        return routings

    def _move(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(
        self, sequences: Int[Tensor, "B S"], lengths: Int[Tensor, "V"], limit: float | None = None
    ) -> tuple[float, Routed]:
        """Computes the mean loss in nats a byte, given the bytes of each id, and the routing; None: no capacity."""
        self.model.eval()
        for layer in self.model.modules():
            if isinstance(layer, MoE):
                layer.router.eval_capacity_factor = limit
        losses: list[Tensor] = []
        loads: list[Routed] = []
        for batch in sequences.split(_EVALUATED):
            if self.routed:
                with capture(self.model) as routings:
                    logits = self.model(batch[:, :-1])
                loads.append(_routed(routings))
            else:
                logits = self.model(batch[:, :-1])
            losses.append(_token_losses(logits, batch[:, 1:]))
        self.model.train()
        nats, bytes_ = torch.cat(losses).double().sum(), lengths[sequences[:, 1:]].sum()
        return float(nats / bytes_), _mean_routed(loads)


def make_layer(run: Run, recipe: LanguageModels, index: int) -> nn.Module:
    """Makes the experts, or the dense layer, of a block; hashes and priors differ between blocks."""
    contender = CONTENDERS[run.contender]
    if contender.router is None:
        return make_mlp(recipe.dim, recipe.hidden_dim)
    options: dict[str, Any] = {**contender.options, **run.setting.options}
    if run.setting.strength is not None:
        ids = num_router_ids(recipe.vocabulary, run.setting.id_length)
        options["token_prior"] = TokenPrior(ids, strength=run.setting.strength, seed=index)
    if contender.router == "hash":
        options["seed"] = index  # a hash of its own for each block, as the priors have
    layer = MoE(recipe.dim, recipe.num_experts, hidden_dim=recipe.hidden_dim, router=contender.router, **options)
    if not contender.gate:
        layer.router.weight.requires_grad_(False).zero_()
    return layer


def _token_losses(logits: Float[Tensor, "B S V"], targets: Int[Tensor, "B S"]) -> Float[Tensor, "B S"]:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def _groups(model: nn.Module, surrogate: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices of the model; none for vectors, routers and readouts."""
    of_routers = {id(p) for layer in model.modules() if isinstance(layer, MoE) for p in layer.router.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim > 1 and id(p) not in of_routers]
    plain = [p for p in trained if p.ndim <= 1 or id(p) in of_routers]
    return [
        {"params": decayed, "weight_decay": _WEIGHT_DECAY},
        {"params": [*plain, *surrogate.parameters()], "weight_decay": 0.0},
    ]


def _rate(step: int, steps: int) -> float:
    """A linear warm-up, then a cosine."""
    warm = min(1.0, (step + 1) / min(_WARMUP, steps))
    return warm * (_LEAST + (1 - _LEAST) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _batches(seed: int, recipe: LanguageModels, text: Text) -> Iterator[Int[Tensor, "B S"]]:
    generator = torch.Generator().manual_seed(_ORDER + seed)
    while True:
        starts = torch.randint(len(text.train) - recipe.context, [recipe.batch_size], generator=generator)
        yield gather(text.train, starts, recipe.context)


def _routed(routings: Sequence[Routing]) -> Routed:
    stats = [routing.stats for routing in routings]
    return _mean_routed([Routed(violation=float(s.max_violation), dropped=float(s.fraction_dropped)) for s in stats])


def _mean_routed(each: Sequence[Routed]) -> Routed:
    n = max(len(each), 1)
    return Routed(violation=sum(r.violation for r in each) / n, dropped=sum(r.dropped for r in each) / n)
