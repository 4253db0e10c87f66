# SPDX-License-Identifier: Apache-2.0
"""The audit of one strategy."""

from collections.abc import Callable
from statistics import median

import torch

from equipoise._core import num_threads
from equipoise.audit._baselines import Control, make_control
from equipoise.audit._conditions import Conditions, Problem, draw_problem
from equipoise.audit._draws import collect, draw_batch, learn_from_the_past
from equipoise.audit._result import AuditResult
from equipoise.estimators import Strategy, get_strategy

# p/q counts as 1, and a strategy as sampling from the router itself, within rounding.
_ON_POLICY = 1e-9


def audit(
    strategy: str | Strategy,
    conditions: Conditions | None = None,
    *,
    baseline: str | Control = "none",
    advance: Callable[[int], object] | None = None,
) -> AuditResult:
    r"""Compares the mean of a strategy's gradient estimates with the exact gradient, on a small random problem.

    The problem has logits and a loss f_ij for every row and expert, so that the gradient of

    .. math::
        E\Big[\frac{1}{n} \sum_i f(x_i, z_i)\Big]

    is known exactly, by the logits (the router) and by the losses, which stand for the experts' parameters. Each
    estimate is made by the strategy's own `draw` and by `equipoise.reinforce`, as in training. A baseline that learns
    is read before each batch of estimates and updated after it.

    The verdict has declared error rates, which hold for heavy-tailed weights too. "biased": some component of the mean
    is further off than an unbiased estimate would be with probability 1e-6, over all components. "unbiased": none is,
    the strategy claims to be unbiased, and a bias of a tenth of the norm of the gradient would have been found with
    probability 0.99. "undecided": more estimates are needed (`judgement.more_estimates` says how many), or nothing
    is claimed.

    Args:
        strategy: any object that meets `equipoise.Strategy`, a name in `equipoise.STRATEGIES`, or
            "package.module:name".
        conditions: sizes, temperature, number of draws, seed; None: the defaults.
        baseline: one of `BASELINES`, or an object of your own.
        advance: called with a number of draws, after each batch of them.

    Returns:
        The verdict, with the evidence. All noise comes from the seed; torch's global stream is not used.

    Raises:
        ValueError: the strategy does not draw as the protocol says.

    Example:
        In a test of your own estimator, `assert audit(mine).verdict == "unbiased"`. Here, skipping with the weights
        that correct for it, and without:

        >>> conditions = Conditions(n=4, draws=100_000, row_effect=0.0)
        >>> audit("skip-iw", conditions).verdict, audit("skip", conditions).verdict
        ('unbiased', 'biased')
    """
    conditions = Conditions() if conditions is None else conditions
    chosen = get_strategy(strategy) if isinstance(strategy, str) else strategy
    problem = draw_problem(conditions)
    control = make_control(baseline, problem) if isinstance(baseline, str) else baseline
    check_strategy(chosen, conditions, problem)
    estimates = max(conditions.draws // control.draws, 2)
    with num_threads(1):  # so that the time of this thread is the cost, whatever else the machine does
        learn_from_the_past(control, chosen, conditions, problem)
        evidence, tally = collect(control, chosen, conditions, problem, estimates, advance or _ignore)
    on_policy = conditions.importance or tally.off_policy < _ON_POLICY
    return AuditResult(
        strategy=chosen,
        baseline=control.name,
        conditions=conditions,
        evidence=evidence,
        # Where rows compete for capacity, the others' losses depend on a row's own expert, and may not serve it.
        claimed=chosen.unbiased and on_policy and (control.name != "leave-one-out" or not chosen.respects_capacity),
        draws=estimates * control.draws,
        effective=tally.effective,
        largest_weight=tally.largest,
        possible_weight=tally.possible if conditions.importance else None,
        dropped=1.0 - tally.kept / tally.rows,
        seconds=median(tally.draw_seconds),
        step_seconds=median(tally.step_seconds),
    )


def check_strategy(strategy: Strategy, conditions: Conditions, problem: Problem | None = None) -> None:
    """Draws from a strategy once, so that errors appear before the long work begins, and kernels are compiled.

    Args:
        strategy: the strategy.
        conditions: the conditions of the audit.
        problem: the problem of these conditions; None: it is drawn.

    Raises:
        ValueError: the strategy does not draw as the protocol says.

    Example:
        >>> import equipoise as eq
        >>> check_strategy(eq.STRATEGIES["gm-iw"], Conditions(n=4))
    """
    problem = draw_problem(conditions) if problem is None else problem
    try:
        draw_batch(strategy, conditions, problem, [2], torch.Generator().manual_seed(0))
    except TypeError as error:
        raise ValueError(
            f"strategy {strategy.name!r} must draw as equipoise.estimators.Strategy says, got {error}: "
            "give an instance whose methods have the protocol's signatures"
        ) from error


def _ignore(draws: int) -> None:
    del draws
