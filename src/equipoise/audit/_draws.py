# SPDX-License-Identifier: Apache-2.0
"""Monte-Carlo gradients of a strategy, many batches at a time, through the functions that users call.

Legend: n rows (datapoints), k columns (experts), D draws that one estimate averages.
"""

import time
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_shape
from equipoise.audit._baselines import Control
from equipoise.audit._conditions import Conditions, Problem
from equipoise.audit._statistics import Collector, Evidence
from equipoise.audit._tails import Subtracted, possible_tails
from equipoise.estimators import Strategy, reinforce
from equipoise.sampling import Sample

# Entries [draws, n, k] of one call: enough to make its fixed cost vanish, few enough to stay in cache.
_ENTRIES = 2**17
# Past batches that a baseline has learnt from when it is first used: updates, and batches of n rows in each.
_PAST = (30, 64)


def collect(
    control: Control,
    strategy: Strategy,
    conditions: Conditions,
    problem: Problem,
    estimates: int,
    advance: Callable[[int], object],
) -> tuple[Evidence, "Tally"]:
    """Makes the estimates, in batches."""
    generator = torch.Generator().manual_seed(problem.noise_seed)
    tally, collector, left = Tally(), Collector(problem.exact), estimates
    while left:
        count = min(left, max(_ENTRIES // (conditions.n * conditions.k * control.draws), 1))
        batch = [count] if control.draws == 1 else [control.draws, count]
        start = time.thread_time()
        s, weight = draw_batch(strategy, conditions, problem, batch, generator)
        drawn = time.thread_time()
        losses = s.at_z(problem.losses.expand(s.log_q.shape))
        baseline, critic = control.read(s, losses, weight)
        gradients = _gradients(problem, s, weight, baseline, critic)
        control.update(s, losses)
        tally.time(drawn - start, time.thread_time() - start, count, control.draws)
        ratio = _ratio(problem, s)
        subtracted = Subtracted(baseline, critic, control.draws)
        collector.add(gradients, possible_tails(problem, ratio, subtracted) if conditions.importance else None)
        tally.add(s, weight, ratio)
        left -= count
        advance(count * control.draws)
    return collector.evidence(), tally


class Tally:
    """What is counted besides the gradient."""

    def __init__(self) -> None:
        self.rows, self.weight_sum, self.weight_squares, self.kept = 0, 0.0, 0.0, 0.0
        self.largest, self.possible, self.off_policy = 0.0, 0.0, 0.0
        self.draw_seconds: list[float] = []
        self.step_seconds: list[float] = []

    def time(self, draw: float, step: float, estimates: int, draws: int) -> None:
        """Takes in the times of a batch of estimates, of some draws each."""
        self.draw_seconds.append(draw / (estimates * draws))
        self.step_seconds.append(step / estimates)

    def add(self, s: Sample, weight: Tensor, ratio: Tensor) -> None:
        """Takes in the weights of a batch, and p/q of all pairs."""
        self.rows += weight.numel()
        self.weight_sum += float(weight.sum())
        self.weight_squares += float(weight.square().sum())
        self.largest, self.possible = max(self.largest, float(weight.amax())), max(self.possible, float(ratio.amax()))
        self.off_policy = max(self.off_policy, float((ratio - 1.0).abs().amax()))
        self.kept += float(s.kept.sum())

    @property
    def effective(self) -> float:
        """(sum w)^2 / sum w^2, as a fraction of the rows."""
        return self.weight_sum**2 / (self.rows * self.weight_squares) if self.weight_squares else 0.0


def learn_from_the_past(control: Control, strategy: Strategy, conditions: Conditions, problem: Problem) -> None:
    """Shows a baseline some batches, with noise of their own, so that it is measured as it is after a while."""
    if not control.learns:
        return
    generator = torch.Generator().manual_seed(problem.noise_seed ^ 1)
    updates, batches = _PAST
    for _ in range(updates):
        s, _ = draw_batch(strategy, conditions, problem, [batches], generator)
        control.update(s, s.at_z(problem.losses.expand(s.log_q.shape)))


def draw_batch(
    strategy: Strategy, conditions: Conditions, problem: Problem, batch: Sequence[int], generator: torch.Generator
) -> tuple[Sample, Float[Tensor, "*batch n"]]:
    """Draws noise, sample and weights for many batches at once, and checks what a strategy of a user's own returns."""
    shape = [*batch, conditions.n, conditions.k]
    noise = strategy.draw_noise(shape, generator=generator, dtype=torch.float64)
    drawn = strategy.draw(
        problem.logits.log_softmax(-1).expand(shape),
        noise,
        temperature=conditions.temperature,
        capacity=conditions.slots,
        sinkhorn_first=conditions.sinkhorn_first,
        importance=conditions.importance,
    )
    who = f"strategy {strategy.name!r}"
    if not (isinstance(drawn, tuple) and len(drawn) == 2 and isinstance(drawn[0], Sample)):  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
        raise ValueError(
            f"{who} must return (Sample, weight) from draw, got {type(drawn).__name__}: "
            "see equipoise.estimators.Strategy"
        )
    s, weight = drawn
    check_shape(f"z of {who}", s.z, shape[:-1], "one expert a row")
    check_shape(f"log_q of {who}", s.log_q, shape, "one log-probability a pair")
    check_shape(f"weight of {who}", weight, shape[:-1], "one weight a row")
    if not bool(weight.isfinite().all()):
        raise ValueError(f"weight of {who} must be finite, got NaN or infinity: look for pairs with q = 0")
    return s, weight


def _ratio(problem: Problem, s: Sample) -> Float[Tensor, "draws n k"]:
    """p/q of every pair, drawn or not; 0 where q is, because such a pair is never drawn."""
    log_p = problem.logits.log_softmax(-1)
    return torch.where(s.log_q > -torch.inf, (log_p - s.log_q).exp(), 0.0).flatten(0, -3)


def _gradients(
    problem: Problem, s: Sample, weight: Tensor, baseline: float | Tensor, critic: Tensor | None
) -> Float[Tensor, "estimates m"]:
    """The estimates, by the logits and by the losses, as the backward of `reinforce` gives them."""
    logits, losses = (x.expand(s.log_q.shape).clone().requires_grad_() for x in (problem.logits, problem.losses))
    surrogate = reinforce(logits.log_softmax(-1), s, s.at_z(losses), baseline=baseline, weight=weight, critic=critic)
    gradients = torch.autograd.grad(surrogate.sum(), [logits, losses])
    by_draw = torch.cat([gradient.flatten(-2) for gradient in gradients], dim=-1)
    return by_draw if by_draw.ndim == 2 else by_draw.mean(0)
