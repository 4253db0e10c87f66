# SPDX-License-Identifier: Apache-2.0
"""Trains runs of one contender and one learning rate at once.

A run is a pure function of the recipe, its setting and its seed: rows and noise of a seed are the same streams whatever
else is in the batch.

Legend: r runs, s seeds, n rows, d features, k experts.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equipoise.estimators import Combination, Noise, load_balance_loss, marginal_entropy_loss
from equipoise_lab.compare._contenders import CONTENDERS
from equipoise_lab.compare._evaluate import evaluate, slots
from equipoise_lab.compare._model import MixtureBatch
from equipoise_lab.compare._objectives import Step
from equipoise_lab.compare._recipe import Comparison, Run
from equipoise_lab.compare._task import Task

# Streams of a seed.
_ORDER, _NOISE = 1 << 20, 2 << 20
# Steps whose noise is drawn at once.
_CHUNK = 50
# Points of a validation curve.
_POINTS = 10
# The losses behind the fields of a setting.
_BALANCE: dict[str, Callable[[Tensor], Tensor]] = {
    "balance_loss": load_balance_loss,
    "marginal_entropy": marginal_entropy_loss,
}


@dataclass(frozen=True, slots=True)
class Trained:
    """Models at the end of training.

    Attributes:
        runs: in the order of the rows below.
        parameters: of the `MixtureBatch`, by name.
        steps: where the validation loss was measured; the last is the end.
        validation: that loss, for each of `EVALUATIONS`.
    """

    runs: tuple[Run, ...]
    parameters: dict[str, Tensor]
    steps: tuple[int, ...]
    validation: Float[Tensor, "points 2 r"]


def train(
    runs: Sequence[Run], recipe: Comparison, task: Task, *, progress: Callable[[int], object] | None = None
) -> Trained:
    """Trains runs of one unit.

    Args:
        runs: what to train; they differ in seed and in settings other than the learning rate.
        recipe: the comparison they belong to.
        task: what to learn; the test split is not touched.
        progress: called with a number of steps that are done.

    Returns:
        The models, and the course of their validation loss.
    """
    if len({run.unit for run in runs}) != 1:
        raise ValueError(f"runs must be of one unit, got {sorted({run.unit for run in runs})}: train each on its own")
    batch = _Batch(runs, recipe, task)
    points = measured_at(recipe.steps)
    stream = zip(
        _batches(batch.seeds, recipe, len(task.train)), _noise(batch.seeds, recipe, batch.strategy), strict=False
    )
    curve: list[Tensor] = []
    measured = 0
    for step, (rows, noise) in enumerate(itertools.islice(stream, recipe.steps), start=1):
        batch.step(rows, noise)
        if step in points:
            curve.append(batch.validation())
            if progress is not None:
                progress(step - measured)
            measured = step
    return Trained(
        runs=tuple(runs),
        parameters={name: x.detach().clone() for name, x in batch.model.named_parameters()},
        steps=points,
        validation=torch.stack(curve),
    )


class _Batch:
    """The state of the runs between two steps."""

    def __init__(self, runs: Sequence[Run], recipe: Comparison, task: Task) -> None:
        self.recipe, self.task = recipe, task
        self.contender = CONTENDERS[runs[0].contender]
        self.strategy = self.contender.strategy
        self.seeds = sorted({run.seed for run in runs})
        self.row_seed = torch.tensor([self.seeds.index(run.seed) for run in runs])
        self.model = build_model(runs, recipe, task)
        self.objective = self.contender.make(len(runs), recipe.num_experts, task.num_classes)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=runs[0].setting.learning_rate, fused=True)
        factors = [run.setting.capacity_factor for run in runs]
        self.capacity = torch.tensor([slots(factor, recipe.batch_size, recipe.num_experts) for factor in factors])
        weights = {name: torch.tensor([getattr(run.setting, name) for run in runs]) for name in _BALANCE}
        self.balance = [(weight, _BALANCE[name]) for name, weight in weights.items() if bool(weight.any())]

    def step(self, rows: Int[Tensor, "s n"], noise: Noise | None) -> None:
        """One step of Adam for every run, on the rows and the noise of its seed."""
        rows = rows[self.row_seed]
        log_p, outputs = self.model(self.task.train.x[rows])
        own = None if noise is None else _pick(noise, self.row_seed)
        loss = self.objective(
            Step(log_p=log_p, outputs=outputs, y=self.task.train.y[rows], noise=own, capacity=self.capacity)
        )
        for weight, balance_loss in self.balance:
            loss = loss + weight * balance_loss(log_p)
        self.optimizer.zero_grad()
        loss.sum().backward()  # runs share nothing: the gradient of each is its own
        self.optimizer.step()

    def validation(self) -> Float[Tensor, "2 r"]:
        """The validation loss of every run as it stands, in both evaluations."""
        limits = self.recipe.evaluations()
        found = evaluate(self.model, self.task.validation, gated=self.contender.gated, capacity_factors=limits)
        return torch.stack([evaluation.loss for evaluation in found])


def build_model(runs: Sequence[Run], recipe: Comparison, task: Task) -> MixtureBatch:
    """Builds the models of runs, untrained.

    Args:
        runs: one for each model.
        recipe: the comparison.
        task: for its sizes.

    Returns:
        The models.
    """
    seeds = [run.seed for run in runs]
    return MixtureBatch(seeds, task.dim, recipe.num_experts, recipe.hidden_dim, task.num_classes)


def measured_at(steps: int) -> tuple[int, ...]:
    """Lists the steps at which the validation loss is measured, evenly spaced up to the last."""
    points = min(_POINTS, steps)
    return tuple(round(steps * (i + 1) / points) for i in range(points))


def _batches(seeds: Sequence[int], recipe: Comparison, num_rows: int) -> Iterator[Tensor]:
    """Yields the rows of every step, [s, n]: one permutation after the other, what does not fill a batch left out."""
    n = min(recipe.batch_size, num_rows)
    generators = [torch.Generator().manual_seed(_ORDER + seed) for seed in seeds]
    while True:
        orders = torch.stack([torch.randperm(num_rows, generator=g) for g in generators])
        yield from (orders[:, start : start + n] for start in range(0, num_rows - n + 1, n))


def _noise(seeds: Sequence[int], recipe: Comparison, strategy: Combination | None) -> Iterator[Noise | None]:
    """Yields the noise of every step, [s, ...], one stream a seed; None where nothing is sampled."""
    if strategy is None:
        yield from itertools.repeat(None)
        return
    generators = [torch.Generator().manual_seed(_NOISE + seed) for seed in seeds]
    shape = [_CHUNK, recipe.batch_size, recipe.num_experts]
    while True:
        chunk = [strategy.draw_noise(shape, generator=g) for g in generators]
        for i in range(_CHUNK):
            yield _stack([_pick(noise, i) for noise in chunk])


def _pick(noise: Noise, index: Tensor | int) -> Noise:
    """Takes entries of the first dimension of all parts."""
    parts = (None if x is None else x[index] for x in (noise.priority, noise.coin, noise.pick))
    return Noise(noise.gumbel[index], *parts)


def _stack(noises: Sequence[Noise]) -> Noise:
    """Makes one noise of several, with a new first dimension."""

    def stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
        given = [part for part in parts if part is not None]
        return torch.stack(given) if given else None

    gumbel = torch.stack([noise.gumbel for noise in noises])
    others = zip(*((noise.priority, noise.coin, noise.pick) for noise in noises), strict=True)
    return Noise(gumbel, *(stacked(parts) for parts in others))
