# SPDX-License-Identifier: Apache-2.0
"""Monte-Carlo gradients of a strategy, many batches at a time, through the functions that users call.

Legend: n rows (datapoints), k columns (experts).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_shape
from equipoise.estimators import Strategy, get_strategy, leave_one_out_baseline, reinforce
from equipoise.experiments.audit._recipe import Audit, Problem
from equipoise.experiments.audit._statistics import Collector, Evidence, Tails
from equipoise.sampling import Sample

# Entries [draws, n, k] of one call: enough to make its fixed cost vanish, few enough to stay in cache.
_ENTRIES = 2**17
# p/q counts as 1, and a strategy as sampling from the router itself, within rounding.
_ON_POLICY = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the draws of one strategy showed.

    Attributes:
        strategy: which one.
        evidence: about the gradient, router first, then experts.
        claimed: whether the estimate, as it was computed, is claimed to be unbiased.
        effective: effective sample size, (sum w)^2 / sum w^2, as a fraction of all rows.
        largest_weight: the largest weight seen.
        possible_weight: the largest p/q of any pair, drawn or not; None without importance weights.
        dropped: the fraction of rows that no expert processed.
        seconds: time of one draw: noise, sample and weights of one batch of n rows.
    """

    strategy: Strategy
    evidence: Evidence
    claimed: bool
    effective: float
    largest_weight: float
    possible_weight: float | None
    dropped: float
    seconds: float


def measure(
    strategy: Strategy, audit: Audit, problem: Problem, advance: Callable[[int], None] = lambda draws: None
) -> Outcome:
    """Draws a strategy's gradient estimates and collects their statistics.

    Args:
        strategy: the strategy.
        audit: the run.
        problem: its problem.
        advance: told the number of draws made, after each batch.

    Returns:
        The outcome.
    """
    generator = torch.Generator().manual_seed(problem.noise_seed)
    collector = Collector(problem.exact)
    weight_sum = weight_squares = largest = possible = off_policy = kept = seconds = 0.0
    left = audit.draws
    while left:
        draws = min(left, max(_ENTRIES // (audit.n * audit.k), 1))
        start = time.perf_counter()
        s, weight = draw_batch(strategy, audit, problem, draws, generator)
        seconds += time.perf_counter() - start
        ratio = _ratio(problem, s)
        baseline = _baseline(audit, problem, s)
        gradients = _gradients(problem, s, weight, baseline)
        collector.add(gradients, _tails(problem, s, ratio, baseline) if audit.importance else None)
        weight_sum += float(weight.sum())
        weight_squares += float(weight.square().sum())
        largest, possible = max(largest, float(weight.amax())), max(possible, float(ratio.amax()))
        off_policy = max(off_policy, float((ratio - 1.0).abs().amax()))
        kept += float(s.kept.sum())
        left -= draws
        advance(draws)
    rows = audit.draws * audit.n
    on_policy = audit.importance or off_policy < _ON_POLICY
    return Outcome(
        strategy=strategy,
        evidence=collector.evidence(),
        # Where rows compete for capacity, the others' losses depend on a row's own expert, and may not serve it.
        claimed=strategy.unbiased and on_policy and (audit.baseline == "none" or not strategy.balanced),
        effective=weight_sum**2 / (rows * weight_squares) if weight_squares else 0.0,
        largest_weight=largest,
        possible_weight=possible if audit.importance else None,
        dropped=1.0 - kept / rows,
        seconds=seconds / audit.draws,
    )


def prepare(audit: Audit, problem: Problem) -> list[Strategy]:
    """Finds the strategies and draws from each once, so that what one refuses is said before the work begins.

    Args:
        audit: the run.
        problem: its problem.

    Returns:
        The strategies, each once, with their code compiled.
    """
    strategies = [get_strategy(name) for name in dict.fromkeys(audit.strategies)]
    for strategy in strategies:
        try:
            draw_batch(strategy, audit, problem, 2, torch.Generator().manual_seed(0))
        except TypeError as error:
            raise ValueError(
                f"strategy {strategy.name!r} must draw as equipoise.estimators.Strategy says, got {error}: "
                "give an instance whose methods have the protocol's signatures"
            ) from error
    return strategies


def draw_batch(
    strategy: Strategy, audit: Audit, problem: Problem, draws: int, generator: torch.Generator
) -> tuple[Sample, Float[Tensor, "draws n"]]:
    """Draws noise, sample and weights for many batches at once, and checks what a strategy of a user's own returns."""
    shape = [draws, audit.n, audit.k]
    noise = strategy.draw_noise(shape, generator=generator, dtype=torch.float64)
    drawn = strategy.draw(
        problem.logits.log_softmax(-1).expand(shape),
        noise,
        temperature=audit.temperature,
        capacity=audit.capacity,
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
    return torch.where(s.log_q > -torch.inf, (log_p - s.log_q).exp(), 0.0)


def _baseline(audit: Audit, problem: Problem, s: Sample) -> Float[Tensor, "draws n"]:
    if audit.baseline == "none":
        return torch.zeros_like(s.keep_weight)
    return leave_one_out_baseline(s.at_z(problem.losses.expand(s.log_q.shape)), s)


def _gradients(
    problem: Problem, s: Sample, weight: Float[Tensor, "draws n"], baseline: Float[Tensor, "draws n"]
) -> Float[Tensor, "draws m"]:
    """The estimate of each draw, by the logits and by the losses, as the backward of `reinforce` gives it."""
    logits, losses = (x.expand(s.log_q.shape).clone().requires_grad_() for x in (problem.logits, problem.losses))
    surrogate = reinforce(logits.log_softmax(-1), s, s.at_z(losses), baseline=baseline, weight=weight)
    gradients = torch.autograd.grad(surrogate.sum(), [logits, losses])
    return torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)


def _tails(problem: Problem, s: Sample, ratio: Float[Tensor, "draws n k"], baseline: Float[Tensor, "draws n"]) -> Tails:
    """Second moment and reach of each component, over what row i could have drawn given the other rows.

    With probability q_ij' row i draws j', and adds p/q (f - b) (1[j = j'] - p_ij) / n to component ij of the router's
    gradient, p/q / n to component ij' of the experts'. A pair with a huge weight is too rare to turn up; its q shows in
    every draw.
    """
    n, k = problem.logits.shape
    p = problem.logits.softmax(-1)
    advantage = (problem.losses - baseline.unsqueeze(-1)).abs()
    score = (torch.eye(k, dtype=p.dtype) - p.unsqueeze(-2)).abs()  # [n, j', j]
    moment = torch.einsum("ij,ijl->il", (p * ratio * advantage.square()).mean(0), score.square())
    reach = ((ratio * advantage).amax(0).unsqueeze(-1) * score).amax(-2)
    return Tails(
        torch.cat([moment.flatten(), (p * ratio).mean(0).flatten()]) / n**2,
        torch.cat([reach.flatten(), ratio.amax(0).flatten()]) / n,
    )
