# SPDX-License-Identifier: Apache-2.0
"""Trains and evaluates one run: one `equipoise.nn.MoE` as a classifier.

The first C outputs of the layer are the class scores, so that its experts are d -> h -> C. A row that is dropped has no
output, and so the loss log C.

Legend: n rows, d features, k experts, h hidden units of an expert, C classes.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from equipoise.estimators import STRATEGIES, EMABaseline, RegressionCritic, marginal_entropy_loss
from equipoise.nn import Grouped, MoE, Surrogate, capture
from equipoise.ops import log_softmax
from equipoise_lab._tasks import Progress, ignore
from equipoise_lab.compare._recipe import CONTENDERS, Comparison, Run
from equipoise_lab.compare._task import Split, Task

# Streams of a seed.
_ORDER, _NOISE = 1 << 20, 2 << 20
# Points of a validation curve.
_POINTS = 10
# Losses fall by an order of magnitude within a few hundred steps: ten batches are memory enough for a baseline.
_DECAY = 0.9


@dataclass(frozen=True, slots=True)
class Trained:
    """A model at the end of training."""

    run: Run  # which one
    parameters: dict[str, Tensor]  # of the layer, by name
    steps: tuple[int, ...]  # where the validation loss was measured; the last is the end
    validation: Float[Tensor, "points 2"]  # that loss, in each of the evaluations


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How a model does on a split."""

    loss: float  # the mean cross-entropy in nats
    accuracy: float  # the fraction of rows whose largest class score is the label's; a dropped row counts as wrong
    dropped: float  # the fraction of rows that no expert processed


def train(run: Run, recipe: Comparison, task: Task, *, progress: Progress = ignore) -> Trained:
    """Trains one run; the test split is not touched.

    A run is a pure function of the recipe, its setting and its seed. Runs of a seed see the same rows in the same
    order, whatever the contender. `progress` is called with a number of steps that are done.
    """
    learner = _Learner(run, recipe, task)
    optimizer = torch.optim.Adam(learner.layer.parameters(), lr=run.setting.learning_rate, fused=True)
    points, curve, measured = measured_at(recipe.steps), list[list[float]](), 0
    for step, rows in zip(range(1, recipe.steps + 1), _batches(run.seed, recipe, len(task.train)), strict=False):
        optimizer.zero_grad()
        learner.loss(task.train.x[rows], task.train.y[rows]).backward()
        optimizer.step()
        if step in points:
            factors = recipe.evaluations().values()
            curve.append([evaluate(learner.layer, task.validation, task, factor).loss for factor in factors])
            progress(step - measured)
            measured = step
    parameters = {name: x.detach().clone() for name, x in learner.layer.named_parameters()}
    return Trained(run, parameters, points, torch.tensor(curve))


class _Learner:
    """A layer, and what it minimises in a step."""

    def __init__(self, run: Run, recipe: Comparison, task: Task) -> None:
        self.run, self.task = run, task
        self.learns = CONTENDERS[run.contender].learns
        self.layer = build_layer(run, recipe, task)
        self.surrogate = Surrogate(EMABaseline(corrected=False), weights="all")
        self.noise = torch.Generator().manual_seed(_NOISE + run.seed)
        # One label less than there are: the intercept stands for the last.
        self.critic = RegressionCritic(recipe.num_experts, task.num_classes - 1, decay=_DECAY)

    def loss(self, x: Float[Tensor, "n d"], y: Int[Tensor, "n"]) -> Float[Tensor, ""]:
        """The loss of a batch, whose gradient is the contender's."""
        if self.learns == "exact":
            return self._expected(x, y)
        with capture(self.layer) as routings:
            losses = row_losses(self.layer(x, generator=self.noise), y, self.task)
        if self.learns == "surrogate":
            return self.surrogate(losses, routings)
        # b_i = sum_j p_ij c_yj, with c_yj what past batches say of the loss of label y at expert j. Labels differ more
        # than experts do, and a constant leaves that in the score-function term. In training the label is known.
        routing, label = routings[0], F.one_hot(y, self.task.num_classes)[:, :-1].float()
        baseline = (routing.log_p.detach().exp() * self.critic(label)).sum(-1)
        loss = self.surrogate(losses, routings, baseline=baseline)
        assert routing.sample is not None  # contenders with this baseline sample
        self.critic.update(label, routing.sample, losses.detach())
        return loss

    def _expected(self, x: Float[Tensor, "n d"], y: Int[Tensor, "n"]) -> Float[Tensor, ""]:
        """The expected loss under the router, sum_j p_ij f_ij: what the samplers estimate, at k times the work."""
        k = self.layer.num_experts
        groups = Grouped(rows=x.repeat(k, 1), counts=torch.full([k], len(x)), slots=None)
        losses = row_losses(self.layer.experts(groups), y.repeat(k), self.task).view(k, -1).mT
        log_p = log_softmax(self.layer.router.logits(x))
        return (log_p.exp() * losses).sum(-1).mean() + self.run.setting.marginal_entropy * marginal_entropy_loss(log_p)


@torch.no_grad()
def evaluate(layer: MoE, split: Split, task: Task, capacity_factor: float | None) -> Evaluation:
    """Sends each row of a split, as one batch, to its most probable expert, as `MoE` does in evaluation.

    Beyond the capacity rows are dropped, the last of the split first; None: no limit. The layer is in training mode
    afterwards.
    """
    layer.eval()
    layer.router.eval_capacity_factor = capacity_factor
    with capture(layer) as routings:
        outputs = layer(split.x)
    layer.train()
    kept = routings[0].kept
    right = (outputs[:, : task.num_classes].argmax(-1) == split.y) & kept
    loss = row_losses(outputs, split.y, task).mean()
    return Evaluation(float(loss), float(right.float().mean()), float((~kept).float().mean()))


def build_layer(run: Run, recipe: Comparison, task: Task) -> MoE:
    """Builds the layer of a run, untrained; runs of a seed start from the same parameters."""
    options: dict[str, Any] = {**asdict(run.setting), "router": CONTENDERS[run.contender].router}
    del options["learning_rate"]
    if options["router"] in STRATEGIES:
        # The experts' output is the prediction, which a gate would scale; and the balance loss is the only one tuned.
        options |= {"loss": "reinforce", "conditional_entropy": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        return MoE(task.dim, recipe.num_experts, hidden_dim=recipe.hidden_dim, **options)


def row_losses(outputs: Float[Tensor, "n d"], y: Int[Tensor, "n"], task: Task) -> Float[Tensor, "n"]:
    """The cross-entropy of each row, in nats."""
    return F.cross_entropy(outputs[:, : task.num_classes], y, reduction="none")


def measured_at(steps: int) -> tuple[int, ...]:
    """Lists the steps at which the validation loss is measured, evenly spaced up to the last."""
    points = min(_POINTS, steps)
    return tuple(round(steps * (i + 1) / points) for i in range(points))


def _batches(seed: int, recipe: Comparison, num_rows: int) -> Iterator[Int[Tensor, "n"]]:
    """Yields the rows of every step: one permutation after the other, what does not fill a batch left out."""
    n = min(recipe.batch_size, num_rows)
    generator = torch.Generator().manual_seed(_ORDER + seed)
    while True:
        yield from torch.randperm(num_rows, generator=generator).split(n)[: num_rows // n]
