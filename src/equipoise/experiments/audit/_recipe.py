# SPDX-License-Identifier: Apache-2.0
"""What an audit is: a small problem whose gradient is known exactly, and the strategies that estimate it.

Legend: n rows (datapoints), k columns (experts).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_iterations, check_one_of, check_temperature
from equipoise.estimators import STRATEGIES
from equipoise.reference import exact_gradient

Baseline = Literal["none", "leave-one-out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """One run of the audit.

    Attributes:
        strategies: names in `STRATEGIES`, or package.module:name.
        n: rows.
        k: experts, at least 2.
        capacity: rows an expert may process; None: ceil(n / k).
        temperature: of the proposal.
        sharpness: standard deviation of the router's logits.
        draws: samples of the whole batch, for each strategy.
        seed: of the problem and the noise.
        sinkhorn_first: balance the proposal in expectation before sampling.
        importance: whether the ratio p/q is part of the weights.
        baseline: "none", or the mean loss of the other rows that were kept.
    """

    strategies: tuple[str, ...] = tuple(STRATEGIES)
    n: int = 8
    k: int = 2
    capacity: int | None = None
    temperature: float = 1.0
    sharpness: float = 1.0
    draws: int = 500_000
    seed: int = 0
    sinkhorn_first: bool = False
    importance: bool = True
    baseline: Baseline = "none"

    def __post_init__(self) -> None:
        """Refuses a run that cannot be made."""
        for name, least in (("n", 1), ("k", 2), ("draws", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}: raise it")
        if self.capacity is not None:
            check_iterations("capacity", self.capacity)
        check_temperature(self.temperature, positive=self.sinkhorn_first)
        if not 0 <= self.sharpness < math.inf:
            raise ValueError(f"sharpness must be finite and >= 0, got {self.sharpness}: 1 is usual, 0 is a flat router")
        check_one_of("baseline", self.baseline, get_args(Baseline))
        if not self.strategies:
            raise ValueError(f"strategies must name at least one, got none: choose from {', '.join(STRATEGIES)}")


@dataclass(frozen=True, slots=True)
class Problem:
    """A router and a loss for each pair, both standard normal (the router times the sharpness), in float64.

    Attributes:
        logits: a, the router's.
        losses: f(x_i, j), which stand for the parameters of the experts too.
        exact: the gradient of E[(1/n) sum_i f(x_i, z_i)] by the logits, then by the losses, flattened.
        noise_seed: where every strategy's noise starts, the same for all.
    """

    logits: Float[Tensor, "n k"]
    losses: Float[Tensor, "n k"]
    exact: Float[Tensor, " m"]
    noise_seed: int


def draw_problem(audit: Audit) -> Problem:
    """Draws router and losses from the seed.

    Args:
        audit: the run.

    Returns:
        The problem, with its exact gradient: (1/n) p_ij (f_ij - sum_j' p_ij' f_ij') by the logits and p_ij / n by the
        losses.

    Example:
        >>> draw_problem(Audit(n=4, k=2)).exact.shape
        torch.Size([16])
    """
    generator = torch.Generator().manual_seed(audit.seed)
    logits, losses = torch.randn(2, audit.n, audit.k, generator=generator, dtype=torch.float64).unbind(0)
    logits = (audit.sharpness * logits).requires_grad_()
    losses = losses.clone().requires_grad_()
    gradients = exact_gradient(logits.log_softmax(-1), losses, [logits, losses])
    exact = torch.cat([gradient.flatten() for gradient in gradients])
    noise_seed = int(torch.randint(2**62, (), generator=generator))
    return Problem(logits.detach(), losses.detach(), exact, noise_seed)
