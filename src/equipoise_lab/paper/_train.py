# SPDX-License-Identifier: Apache-2.0
"""Trains many runs of the toy experiment at once: seeds, temperatures and settings are batch dimensions.

The sampling, the weights and the losses are the library's own. A run is a pure function of the recipe and its own row
of the table: the noise of seed s is the same stream whatever else is in the batch, so runs that differ in the method or
the temperature are paired, and a small experiment gives the numbers that the large one gives for the same runs.

Legend: r runs, n rows (datapoints), 2 experts.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise.balancing import sinkhorn
from equipoise.estimators import (
    Noise,
    RegressionCritic,
    WeightedSampler,
    ema_update,
    gate,
    gated_loss,
    load_balance_loss,
    probability_ratio,
    reinforce,
)
from equipoise.ops import draw_gumbel
from equipoise.sampling import Sample
from equipoise_lab.paper._kernels._model import predict, pull_back, route
from equipoise_lab.paper._methods import METHOD_TABLE
from equipoise_lab.paper._recipe import Paper
from equipoise_lab.paper._results import Result, Run
from equipoise_lab.paper._task import draw_datasets, draw_parameters, errors

# Streams of noise: what every method needs, and what only those beyond the paper do.
_NOISE, _FURTHER = 3 << 20, 4 << 20
# Steps whose noise is drawn at once.
_CHUNK = 100
# The last steps that the second measure of the error averages over.
_AVERAGED = 200
# Progress is reported every so many steps.
_REPORT = 50


@dataclass(frozen=True, slots=True)
class Trained:
    """Models at the end of training.

    Attributes:
        runs: in the order of the columns below.
        parameters: [r, 6], see `_task`; those before the step that made them infinite, where a run diverged.
        mse: squared error of the expert of largest probability, at the last step and averaged over the last 200;
            infinite where the run diverged.
        mse_expected: the same in expectation under the router.
        snapshots: parameters at the steps that were asked for.
    """

    runs: tuple[Run, ...]
    parameters: Float[Tensor, "r 6"]
    mse: Float[Tensor, "2 r"]
    mse_expected: Float[Tensor, "2 r"]
    snapshots: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def results(self, recipe: Paper) -> list[Result]:
        """Reads off what the recipe wants to know about each run."""
        at = 0 if recipe.measured_at == "last" else 1
        mse, expected = self.mse[at].tolist(), self.mse_expected[at].tolist()
        decisive = mse if recipe.measure == "argmax" else expected
        return [
            Result(**asdict(run), mse=mse[i], mse_expected=expected[i], solved=decisive[i] < recipe.threshold)
            for i, run in enumerate(self.runs)
        ]


def train(
    runs: Sequence[Run],
    recipe: Paper,
    *,
    snapshots: Collection[int] = (),
    progress: Callable[[int], object] | None = None,
) -> Trained:
    """Trains runs that sample alike, all at once; those that only differ in name once for all of them.

    Args:
        runs: what to train.
        recipe: the experiment they belong to.
        snapshots: steps (0: before the first) whose parameters to keep.
        progress: called with a number of steps that are done.

    Returns:
        The models and their errors, in the order of `runs`.
    """
    if len({run.unit for run in runs}) != 1:
        raise ValueError(f"runs must sample alike, got {sorted({run.unit for run in runs})}: train each on its own")
    trained_as = [run.trained_as for run in runs]
    distinct = sorted(dict.fromkeys(trained_as), key=_group)
    batch = _Batch(distinct, recipe)
    kept: dict[int, Tensor] = {0: batch.theta.clone()} if 0 in snapshots else {}
    last, total = torch.zeros(2, len(distinct)), torch.zeros(2, len(distinct))
    for step, noise in enumerate(_noise(batch.seeds, recipe, batch.method.strategy), start=1):
        batch.step(noise)
        if step in snapshots:
            kept[step] = batch.theta.clone()
        if step > recipe.steps - _AVERAGED:
            last = torch.stack(batch.errors())
            total += last
        if progress is not None and (step % _REPORT == 0 or step == recipe.steps):
            progress((step - 1) % _REPORT + 1)
    mse, mse_expected = torch.stack([last, total / min(_AVERAGED, recipe.steps)], 1)
    place = {run: i for i, run in enumerate(distinct)}
    back = torch.tensor([place[run] for run in trained_as])
    return Trained(
        runs=tuple(runs),
        parameters=batch.theta[back],
        mse=mse[:, back],
        mse_expected=mse_expected[:, back],
        snapshots={step: theta[back] for step, theta in kept.items()},
    )


def _group(run: Run) -> int:
    """Orders runs so that those of one loss are neighbours, and those with a balance loss too."""
    gated, balanced = run.loss == "gating", run.balance_weight > 0
    return 2 * gated + (balanced != gated)


def _noise(seeds: Sequence[int], recipe: Paper, strategy: WeightedSampler) -> Iterator[Noise]:
    """Yields the noise of every step, [s, ...], one stream a seed; the paper's methods all have the same."""
    generators = [torch.Generator().manual_seed(_NOISE + seed) for seed in seeds]
    further = [torch.Generator().manual_seed(_FURTHER + seed) for seed in seeds]
    n, m = recipe.num_points, strategy.solves
    each = [m, n] if strategy.averages else [n]
    for start in range(0, recipe.steps, _CHUNK):
        # Rows last in memory, as in `router`.
        gumbel = torch.stack([draw_gumbel([_CHUNK, 2, n], generator=g) for g in generators], 1).mT
        priority = torch.stack([torch.rand([_CHUNK, n], generator=g) for g in generators], 1)
        coin = torch.stack([torch.rand([_CHUNK, *each], generator=g) for g in further], 1) if strategy.mixes else None
        for i in range(min(_CHUNK, recipe.steps - start)):
            yield Noise(
                torch.stack([draw_gumbel([m, 2, n], generator=g) for g in further]).mT
                if strategy.averages
                else gumbel[i],
                priority[i] if strategy.skips else None,
                coin=None if coin is None else coin[i],
                pick=torch.cat([torch.rand(1, generator=g) for g in further]) if strategy.averages else None,
            )


def _of_runs(noise: Noise, seed: Tensor) -> Noise:
    """Hands every run the noise of its seed."""
    parts = (noise.priority, noise.coin, noise.pick)
    priority, coin, pick = (None if x is None else x.index_select(0, seed) for x in parts)
    return Noise(noise.gumbel.mT.index_select(0, seed).mT, priority, coin=coin, pick=pick)


class _Batch:
    """The state of the runs between two steps; they are in the order of `_group`."""

    def __init__(self, runs: Sequence[Run], recipe: Paper) -> None:
        self.recipe = recipe
        scored, first = (sum(_group(run) < end for run in runs) for end in (2, 1))
        self.scored, self.gated = slice(0, scored), slice(scored, len(runs))
        self.balanced = slice(first, sum(_group(run) < 3 for run in runs))
        self.method = METHOD_TABLE[runs[0].method]
        self.capacity = self.method.capacity(recipe.num_points)
        self.sinkhorn_first = runs[0].variant == "sinkhorn"
        self.unweighted = torch.tensor([i for i, run in enumerate(runs) if run.variant == "no-iw"], dtype=torch.int64)
        self.seeds = sorted({run.seed for run in runs})
        self.row_seed = torch.tensor([self.seeds.index(run.seed) for run in runs])
        self.temperature = torch.tensor([run.temperature for run in runs])
        self.balance_weight = torch.tensor([run.balance_weight for run in runs])
        self.x, labels = draw_datasets(recipe.data_seeds(self.seeds), recipe.num_points, recipe.noise_sd)
        self.label = labels[self.row_seed]
        starts = torch.stack([draw_parameters(seed, recipe.initialisation) for seed in self.seeds])
        self.theta = starts[self.row_seed]
        self.adam = _Adam(self.theta, torch.tensor([run.learning_rate for run in runs]))
        self.diverged = torch.zeros(len(runs), dtype=torch.bool)
        self.averaged = torch.tensor([run.baseline == "ema" for run in runs[self.scored]])
        self.average = torch.zeros(scored)  # the paper's: starts at 0, and nothing corrects for that
        self.critic = RegressionCritic(2, 5, shape=[scored]) if self.method.critic else None

    def step(self, noise: Noise) -> None:
        """One step of Adam on the estimate of the gradient, for every run."""
        grad = self.gradient(_of_runs(noise, self.row_seed))
        # A run whose weights overflow has no gradient any more. It stops there; the others go on.
        self.diverged |= ~grad.isfinite().all(-1)
        self.adam.step(grad.masked_fill(self.diverged[:, None], 0.0), ~self.diverged)

    def gradient(self, noise: Noise) -> Float[Tensor, "r 6"]:
        """Estimates the gradient with the noise of each run: the library's estimate, pulled back through the model."""
        (r, _), n = self.theta.shape, self.x.shape[1]
        rows_last, p, prediction = torch.empty(r, 2, n), torch.empty(r, n), torch.empty(r, n)
        theta, x, dataset = (v.numpy() for v in (self.theta, self.x, self.row_seed))
        route(theta, x, dataset, rows_last.numpy(), p.numpy())
        with torch.no_grad():
            s, weight = self._draw(rows_last.mT, noise)
        predict(theta, x, dataset, s.z.numpy(), prediction.numpy())
        found = [
            _gradients(estimate, rows_last[b], prediction[b], self.label[b], _take(s, b), weight[b])
            for estimate, b in ((self._reinforce, self.scored), (_gating, self.gated))
            if b.start < b.stop
        ]
        by_log_p, by_prediction = (torch.cat(parts) for parts in zip(*found, strict=True))
        self._add_balance(by_log_p, rows_last, s)
        grad = torch.empty_like(self.theta)
        pull_back(x, dataset, s.z.numpy(), p.numpy(), by_log_p.numpy(), by_prediction.numpy(), grad.numpy())
        return grad

    def _draw(self, log_p: Tensor, noise: Noise) -> tuple[Sample, Tensor]:
        first, proposal = self.sinkhorn_first, log_p
        if first and self.recipe.sinkhorn_order == "sinkhorn-first":
            first, proposal = False, sinkhorn(log_p).log_p
        s, weight = self.method.strategy.draw(
            proposal,
            noise,
            temperature=self.temperature,
            capacity=self.capacity,
            sinkhorn_first=first,
            importance=False,
        )
        return s, weight * probability_ratio(log_p, s).index_fill_(0, self.unweighted, 1.0)

    def _add_balance(self, by_log_p: Tensor, rows_last: Tensor, s: Sample) -> None:
        """Adds the gradient of the balance loss for the runs that have one; on its own, since they are few."""
        counted, b = self.recipe.balance_load == "sampled", self.balanced
        if b.start == b.stop or (counted and s.respects_capacity and s.assigns_all):  # none, or a constant
            return
        own = rows_last[b].requires_grad_()
        penalty = self.balance_weight[b] * load_balance_loss(own.mT, assigned=_take(s, b) if counted else None)
        by_log_p[b] += torch.autograd.grad(penalty.sum(), own)[0]

    def _reinforce(self, log_p: Tensor, prediction: Tensor, label: Tensor, s: Sample, weight: Tensor) -> Tensor:
        """The estimate, with what past steps say of the losses; then they take this one in."""
        losses = (label - prediction) ** 2
        if self.critic is not None:
            x = self.x[self.row_seed[self.scored]]
            inputs = torch.stack([x, label, x * x, x * label, label * label], -2).mT
            loss = reinforce(log_p, s, losses, critic=self.critic(inputs), weight=weight)
            self.critic.update(inputs, s, losses.detach())
            return loss
        loss = reinforce(log_p, s, losses, baseline=self.average * self.averaged, weight=weight)
        self.average = ema_update(self.average, losses.detach(), s, self.recipe.baseline_decay)
        return loss

    def errors(self) -> tuple[Tensor, Tensor]:
        """The errors of every run as it stands; infinite where it diverged."""
        gated = torch.arange(len(self.diverged)) >= self.gated.start
        first, second = errors(self.theta, self.x[self.row_seed], self.label, gated)
        return first.masked_fill(self.diverged, torch.inf), second.masked_fill(self.diverged, torch.inf)


def _gradients(
    estimate: Callable[..., Tensor], rows_last: Tensor, prediction: Tensor, label: Tensor, s: Sample, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of an estimate for log p, rows last, and for the predictions."""
    inputs = (rows_last.requires_grad_(), prediction.requires_grad_())
    loss = estimate(rows_last.mT, prediction, label, s, weight)
    by_log_p, by_prediction = torch.autograd.grad(loss.sum(), inputs)
    return by_log_p, by_prediction


def _gating(log_p: Tensor, prediction: Tensor, label: Tensor, s: Sample, weight: Tensor) -> Tensor:
    return gated_loss(log_p, s, (label - gate(log_p, s) * prediction) ** 2, weight=weight)


def _take(s: Sample, rows: slice) -> Sample:
    """Returns the samples of some runs, as views."""
    values = {f.name: getattr(s, f.name) for f in fields(s)}
    return replace(s, **{name: x[rows] for name, x in values.items() if isinstance(x, Tensor)})


class _Adam:
    """Adam (Kingma and Ba, 2015) with a learning rate for each row; equal to `torch.optim.Adam` for each."""

    def __init__(self, theta: Float[Tensor, "r p"], rate: Float[Tensor, "r"]) -> None:
        self.theta = theta
        self.rate = rate[:, None]
        self.mean = torch.zeros_like(theta, requires_grad=False)
        self.square = torch.zeros_like(theta, requires_grad=False)
        self.steps = 0

    @torch.no_grad()
    def step(self, grad: Float[Tensor, "r p"], alive: Bool[Tensor, "r"]) -> None:
        self.steps += 1
        self.mean.lerp_(grad, 1 - 0.9)
        self.square.mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
        scale = (self.square / (1 - 0.999**self.steps)).sqrt_().add_(1e-8)
        step = self.mean * self.rate / (scale * (1 - 0.9**self.steps))
        self.theta -= step * alive[:, None]
