# SPDX-License-Identifier: Apache-2.0
"""What each contender minimises in a step: one number for each run, whose gradient is the contender's.

Legend: r runs, n rows, k experts, C classes.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from equipoise.assignment import assign
from equipoise.estimators import Combination, EMABaseline, Noise, RegressionCritic, reinforce
from equipoise.ops import largest
from equipoise.sampling import Sample
from equipoise_lab.compare._model import at_expert, row_losses, within_capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What there is in a step.

    Attributes:
        log_p: the router's log-probabilities, with gradient.
        outputs: the class scores of all experts, with gradient.
        y: the labels.
        noise: of a sampler; None for contenders that do not sample.
        capacity: rows that an expert of each run may take.
    """

    log_p: Float[Tensor, "r n k"]
    outputs: Float[Tensor, "r k n C"]
    y: Int[Tensor, "r n"]
    noise: Noise | None
    capacity: Int[Tensor, "r"]

    @property
    def slots(self) -> Int[Tensor, "r k"]:
        """The capacity of each expert."""
        return self.capacity.unsqueeze(-1).expand(-1, self.log_p.shape[-1])


@runtime_checkable
class Objective(Protocol):
    """The loss of a step. One that keeps averages is made anew for each batch of runs."""

    def __call__(self, step: Step, /) -> Float[Tensor, "r"]:
        """Computes one number for each run."""
        ...


def exact(step: Step) -> Float[Tensor, "r"]:
    """Computes the expected loss under the router, sum_j p_ij f_ij: what the samplers estimate, at k times the work.

    Args:
        step: what there is.

    Returns:
        One number for each run; its gradient has no variance but that of the batch.
    """
    labels = step.y.unsqueeze(1).expand(step.outputs.shape[:-1])
    return (step.log_p.exp() * row_losses(step.outputs, labels).mT).sum(-1).mean(-1)


def switch(step: Step) -> Float[Tensor, "r"]:
    """Takes the most probable expert, gated; rows beyond its capacity have no output. As Switch transformers have it.

    Args:
        step: what there is.

    Returns:
        The mean loss of each run.
    """
    z = largest(step.log_p.detach())[1]
    kept = within_capacity(z, step.log_p.shape[-1], step.capacity)
    return _gated(step, z, kept)


def base(step: Step) -> Float[Tensor, "r"]:
    """Takes the exact balanced assignment of the logits, gated. As BASE layers have it.

    Args:
        step: what there is.

    Returns:
        The mean loss of each run.
    """
    # Logits and log-probabilities have the same assignments: they differ by a number for each row.
    return _gated(step, assign(step.log_p.detach(), step.slots).z, None)


def _gated(step: Step, z: Tensor, kept: Tensor | None) -> Float[Tensor, "r"]:
    factor = step.log_p.gather(-1, z.unsqueeze(-1)).exp()
    if kept is not None:
        factor = factor * kept.unsqueeze(-1)
    return row_losses(factor * at_expert(step.outputs, z), step.y).mean(-1)


class Sampled:
    """One of the library's strategies, with REINFORCE and the moving average of all losses as baseline.

    Args:
        strategy: samples and weighs.
        runs: r.
    """

    def __init__(self, strategy: Combination, runs: int) -> None:
        self.strategy = strategy
        self.average = EMABaseline(shape=[runs])

    def __call__(self, step: Step) -> Float[Tensor, "r"]:
        """Samples, weighs, and lets the baseline see the losses afterwards."""
        assert step.noise is not None
        s, weight = self.strategy.draw(step.log_p.detach(), step.noise, capacity=step.slots)
        losses = row_losses(at_expert(step.outputs, s.z), step.y)
        loss = reinforce(step.log_p, s, losses, baseline=self.baseline(step), weight=weight)
        self.learn(step, s, losses.detach())
        return loss

    def baseline(self, step: Step) -> Tensor:
        """Reads b, which knows past batches only, and no expert that was drawn in this one."""
        del step
        return self.average.value

    def learn(self, step: Step, s: Sample, losses: Float[Tensor, "r n"]) -> None:
        """Lets the baseline see this batch."""
        del step
        self.average.update(losses, s)


class LabelAware(Sampled):
    r"""The same with a baseline for each row, which knows its label.

    .. math::
        b_i = \sum_j p_{ij} c_{y_i j},

    with c_yj what past batches say of the loss of label y at expert j (`RegressionCritic` on the label, one-hot).
    Labels differ more than experts do, and a constant baseline leaves that in the score-function term. The label is
    known in training, and a baseline is needed only there.

    Args:
        strategy: samples and weighs.
        runs: r.
        num_experts: k.
        num_classes: C.
    """

    # Losses fall by an order of magnitude within a few hundred steps: ten batches are memory enough.
    _DECAY = 0.9

    def __init__(self, strategy: Combination, runs: int, num_experts: int, num_classes: int) -> None:
        super().__init__(strategy, runs)
        self.num_classes = num_classes
        # One label less than there are: the intercept stands for the last.
        self.critic = RegressionCritic(num_experts, num_classes - 1, decay=self._DECAY, shape=[runs])

    def baseline(self, step: Step) -> Tensor:
        """Reads b."""
        with torch.no_grad():
            return (step.log_p.exp() * self.critic(self._features(step))).sum(-1)

    def learn(self, step: Step, s: Sample, losses: Float[Tensor, "r n"]) -> None:
        """Lets the critic see this batch."""
        self.critic.update(self._features(step), s, losses)

    def _features(self, step: Step) -> Float[Tensor, "r n F"]:
        return F.one_hot(step.y, self.num_classes)[..., :-1].to(step.log_p.dtype)
