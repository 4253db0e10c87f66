# SPDX-License-Identifier: Apache-2.0
"""What a strategy is audited on: a small problem whose gradient is known exactly.

Legend: n rows (datapoints), k columns (experts).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_at_least, check_capacity_factor, check_seed, check_temperature
from equipoise.reference import exact_gradient

# Standard deviation of the noise through which features and residuals show the losses.
_BLUR = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What a strategy is audited on: a small random problem, and how often it is sampled.

    Attributes:
        n: rows.
        k: experts, at least 2.
        capacity: rows an expert may process; None: ceil(n / k), or what `capacity_factor` gives.
        capacity_factor: slack, for a capacity of ceil(capacity_factor * n / k).
        temperature: the temperature of the proposal.
        sharpness: standard deviation of the router's logits.
        row_effect: mean and standard deviation of a loss that a row has at every expert, added to one of standard
            deviation 1 for each pair. It does not change the exact gradient; a baseline can remove it from the
            estimates.
        draws: how many samples of the whole batch are drawn.
        seed: the seed of the problem and the noise.
        sinkhorn_first: balance the proposal in expectation before sampling.
        importance: whether the ratio p/q is part of the weights.

    Example:
        >>> Conditions(n=10, k=4).slots, Conditions(n=10, k=4, capacity_factor=1.5).slots
        (3, 4)
    """

    n: int = 8
    k: int = 2
    capacity: int | None = None
    capacity_factor: float | None = None
    temperature: float = 1.0
    sharpness: float = 1.0
    row_effect: float = 1.0
    draws: int = 500_000
    seed: int = 0
    sinkhorn_first: bool = False
    importance: bool = True

    def __post_init__(self) -> None:
        """Refuses what cannot be audited."""
        for name, least in (("n", 1), ("k", 2), ("draws", 2)):
            check_at_least(name, getattr(self, name), least)
        check_seed("seed", self.seed)
        if self.capacity is not None:
            check_at_least("capacity", self.capacity, 1)
            if self.capacity_factor is not None:
                raise ValueError(
                    f"capacity_factor must not be given beside capacity, got {self.capacity_factor} and "
                    f"{self.capacity}: leave one of them out"
                )
        check_capacity_factor("capacity_factor", self.capacity_factor)
        check_temperature(self.temperature, positive=self.sinkhorn_first)
        for name, remedy in (("sharpness", "1 is usual, 0 is a flat router"), ("row_effect", "0 is none")):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, got {getattr(self, name)}: {remedy}")

    @property
    def slots(self) -> int:
        """Rows that an expert may process."""
        if self.capacity is not None:
            return self.capacity
        return math.ceil((self.capacity_factor or 1.0) * self.n / self.k)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A router and a loss for each pair, both standard normal (the router times the sharpness), in float64.

    The losses of a row have a part in common: normal, of mean and standard deviation `row_effect`.

    Attributes:
        logits: a, the router's.
        losses: f(x_i, j), which also stand for the parameters of the experts.
        exact: the gradient of E[(1/n) sum_i f(x_i, z_i)] by the logits, then by the losses, flattened.
        noise_seed: the seed of the noise, the same for every strategy.
        features: of each row, for a critic: its losses at all experts, plus noise of standard deviation 1/2.
        residual: of each row, for a residual baseline: the mean of its losses over experts, plus such noise. It stands
            for the loss of a row whose expert is left out.

    Example:
        >>> problem = draw_problem(Conditions(n=4, k=2))
        >>> problem.logits.shape, problem.exact.shape  # 4 x 2 logits, then 4 x 2 losses
        (torch.Size([4, 2]), torch.Size([16]))
    """

    logits: Float[Tensor, "n k"]
    losses: Float[Tensor, "n k"]
    exact: Float[Tensor, " m"]
    noise_seed: int
    features: Float[Tensor, "n k"]
    residual: Float[Tensor, " n"]


def draw_problem(conditions: Conditions) -> Problem:
    """Draws router and losses from the seed.

    Args:
        conditions: sizes, sharpness and seed.

    Returns:
        The problem, with its exact gradient: (1/n) p_ij (f_ij - sum_j' p_ij' f_ij') by the logits and p_ij / n by the
        losses.

    Example:
        >>> draw_problem(Conditions(n=4, k=2)).exact.shape
        torch.Size([16])
    """
    generator = torch.Generator().manual_seed(conditions.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits, losses = normal(2, conditions.n, conditions.k).unbind(0)
    noise_seed = int(torch.randint(2**62, (), generator=generator))
    losses = losses + conditions.row_effect * (1.0 + normal(conditions.n, 1))
    features = losses + _BLUR * normal(conditions.n, conditions.k)
    residual = losses.mean(-1) + _BLUR * normal(conditions.n)
    logits = (conditions.sharpness * logits).requires_grad_()
    losses = losses.clone().requires_grad_()
    gradients = exact_gradient(logits.log_softmax(-1), losses, [logits, losses])
    exact = torch.cat([gradient.flatten() for gradient in gradients])
    return Problem(logits.detach(), losses.detach(), exact, noise_seed, features, residual)
