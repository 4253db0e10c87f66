# SPDX-License-Identifier: Apache-2.0
"""Monte-Carlo gradients of a strategy, many batches at a time, through the functions that users call.

Legend: n rows (datapoints), k columns (experts), D draws that one estimate averages.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_shape
from equipoise.estimators import Combination, Strategy, get_strategy, reinforce
from equipoise.experiments._timing import num_threads
from equipoise.experiments.audit._baselines import Control, make_control
from equipoise.experiments.audit._recipe import Audit, Baseline, Problem
from equipoise.experiments.audit._statistics import Collector, Evidence
from equipoise.experiments.audit._tails import Subtracted, possible_tails
from equipoise.sampling import Sample

# Entries [draws, n, k] of one call: enough to make its fixed cost vanish, few enough to stay in cache.
_ENTRIES = 2**17
# p/q counts as 1, and a strategy as sampling from the router itself, within rounding.
_ON_POLICY = 1e-9
# Past batches that a baseline has learnt from when it is first used: updates, and batches of n rows in each.
_PAST = (30, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the draws of one strategy with one baseline showed.

    Attributes:
        strategy: which one.
        baseline: with what baseline.
        evidence: about the gradient, router first, then experts.
        claimed: whether the estimate, as it was computed, is claimed to be unbiased.
        draws: samples of the whole batch; an estimate may take several.
        effective: effective sample size, (sum w)^2 / sum w^2, as a fraction of all rows.
        largest_weight: the largest weight seen.
        possible_weight: the largest p/q of any pair, drawn or not; None without importance weights.
        dropped: the fraction of rows that no expert processed.
        seconds: processor time of one draw: noise, sample and weights of one batch of n rows.
        step_seconds: processor time of one estimate: its draws, its baseline and what that learns, the surrogate and
            its backward.
    """

    strategy: Strategy
    baseline: Baseline = "none"
    evidence: Evidence
    claimed: bool
    draws: int
    effective: float
    largest_weight: float
    possible_weight: float | None
    dropped: float
    seconds: float
    step_seconds: float

    @property
    def name(self) -> str:
        """The strategy's name, and the baseline's."""
        return self.strategy.name if self.baseline == "none" else f"{self.strategy.name} + {self.baseline}"


def measure(
    strategy: Strategy,
    audit: Audit,
    problem: Problem,
    advance: Callable[[int], None] = lambda draws: None,
    *,
    baseline: Baseline = "none",
    draws: int | None = None,
) -> Outcome:
    """Draws a strategy's gradient estimates and collects their statistics.

    A baseline that learns is read before each batch of estimates and updated after it, as in training. Given the past,
    the estimates of a batch are independent and their mean is the exact gradient, which is what the test needs.

    Args:
        strategy: the strategy.
        audit: the run.
        problem: its problem.
        advance: told the number of draws made, after each batch.
        baseline: what is subtracted from the losses.
        draws: in place of those of the run.

    Returns:
        The outcome.
    """
    control = make_control(baseline, problem)
    estimates = max((audit.draws if draws is None else draws) // control.draws, 2)
    with num_threads(1):  # so that the time of this thread is the cost, whatever else the machine does
        _learn_from_the_past(control, strategy, audit, problem)
        evidence, tally = _collect(control, strategy, audit, problem, estimates, advance)
    on_policy = audit.importance or tally.off_policy < _ON_POLICY
    return Outcome(
        strategy=strategy,
        baseline=baseline,
        evidence=evidence,
        # Where rows compete for capacity, the others' losses depend on a row's own expert, and may not serve it.
        claimed=strategy.unbiased and on_policy and (baseline != "leave-one-out" or not strategy.balanced),
        draws=estimates * control.draws,
        effective=tally.effective,
        largest_weight=tally.largest,
        possible_weight=tally.possible if audit.importance else None,
        dropped=1.0 - tally.kept / tally.rows,
        seconds=median(tally.draw_seconds),
        step_seconds=median(tally.step_seconds),
    )


def _collect(
    control: Control,
    strategy: Strategy,
    audit: Audit,
    problem: Problem,
    estimates: int,
    advance: Callable[[int], None],
) -> tuple[Evidence, "_Tally"]:
    """Makes the estimates, in batches."""
    generator = torch.Generator().manual_seed(problem.noise_seed)
    tally, collector, left = _Tally(), Collector(problem.exact), estimates
    while left:
        count = min(left, max(_ENTRIES // (audit.n * audit.k * control.draws), 1))
        batch = [count] if control.draws == 1 else [control.draws, count]
        start = time.thread_time()
        s, weight = draw_batch(strategy, audit, problem, batch, generator)
        drawn = time.thread_time()
        losses = s.at_z(problem.losses.expand(s.log_q.shape))
        baseline, critic = control.read(s, losses, weight)
        gradients = _gradients(problem, s, weight, baseline, critic)
        control.update(s, losses)
        tally.time(drawn - start, time.thread_time() - start, count, control.draws)
        ratio = _ratio(problem, s)
        subtracted = Subtracted(baseline, critic, control.draws)
        collector.add(gradients, possible_tails(problem, ratio, subtracted) if audit.importance else None)
        tally.add(s, weight, ratio)
        left -= count
        advance(count * control.draws)
    return collector.evidence(), tally


class _Tally:
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


def _learn_from_the_past(control: Control, strategy: Strategy, audit: Audit, problem: Problem) -> None:
    """Shows a baseline some batches, with noise of their own, so that it is measured as it is after a while."""
    if not control.learns:
        return
    generator = torch.Generator().manual_seed(problem.noise_seed ^ 1)
    updates, batches = _PAST
    for _ in range(updates):
        s, _ = draw_batch(strategy, audit, problem, [batches], generator)
        control.update(s, s.at_z(problem.losses.expand(s.log_q.shape)))


def prepare(audit: Audit, problem: Problem) -> dict[str, Strategy]:
    """Finds the strategies and draws from each once, so that what one refuses is said before the work begins.

    Args:
        audit: the run.
        problem: its problem.

    Returns:
        The strategies by the names that the run calls them, with their code compiled.
    """
    found = {name: get_strategy(name) for name in audit.strategies}
    for option, value, has in (("eps", audit.eps, "mixes"), ("solves", audit.solves, "averages")):
        if value is not None and not any(getattr(strategy, has, False) for strategy in found.values()):
            raise ValueError(f"{option} must be left out where no strategy {has}, got {value}: add one that does")
    strategies = {name: _with_options(strategy, audit) for name, strategy in found.items()}
    for strategy in strategies.values():
        try:
            draw_batch(strategy, audit, problem, [2], torch.Generator().manual_seed(0))
        except TypeError as error:
            raise ValueError(
                f"strategy {strategy.name!r} must draw as equipoise.estimators.Strategy says, got {error}: "
                "give an instance whose methods have the protocol's signatures"
            ) from error
    return strategies


def _with_options(strategy: Strategy, audit: Audit) -> Strategy:
    if not isinstance(strategy, Combination):
        return strategy
    return strategy.with_options(
        eps=audit.eps if strategy.mixes else None, draws=audit.solves if strategy.averages else None
    )


def draw_batch(
    strategy: Strategy, audit: Audit, problem: Problem, batch: Sequence[int], generator: torch.Generator
) -> tuple[Sample, Float[Tensor, "*batch n"]]:
    """Draws noise, sample and weights for many batches at once, and checks what a strategy of a user's own returns."""
    shape = [*batch, audit.n, audit.k]
    noise = strategy.draw_noise(shape, generator=generator, dtype=torch.float64)
    drawn = strategy.draw(
        problem.logits.log_softmax(-1).expand(shape),
        noise,
        temperature=audit.temperature,
        capacity=audit.slots,
        sinkhorn_first=audit.sinkhorn_first,
        importance=audit.importance,
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
