# SPDX-License-Identifier: Apache-2.0
r"""Is a random vector's mean what it is claimed to be? A test with a declared error rate that survives heavy tails.

Each component of the mean of N independent estimates is held against Bernstein's inequality: with variance sigma^2 and
reach b (the largest distance from its mean that an estimate can have),

.. math::
    P\Big(|\bar d| \ge \sqrt{2 \sigma^2 L / N} + b L / (3 N)\Big) \le 2 e^{-L}, \qquad L = \log(2 m / \alpha),

so that all m components together raise a false alarm with probability at most alpha (Bonferroni). Why not a z-test: at
alpha = 1e-6 its threshold lies where the central limit theorem does not hold for skewed estimates, and importance
weights are skewed. Bernstein's holds for every N, costs 6% in the light-tailed case (6.0 standard errors where the
normal quantile is 5.7, for m = 32), and its term in b grows with the weights. Why not a chi-square statistic: it needs
an inverse covariance, which heavy tails spoil first, and it does not say which component is off.

What is assumed: sigma and b are those of the estimates. They are the larger of what was seen and what `Tails` says
could have been seen, so that a weight too rare to have turned up still counts.

References:
    Boucheron, Lugosi, Massart, Concentration inequalities (2013), section 2.8.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

FALSE_ALARM = 1e-6
"""An unbiased estimate is called biased with at most this probability, over all components."""
POWER = 0.99
"""A bias that the test calls detectable is found with at least this probability."""
CONFIDENCE = 0.95
"""The confidence level of the intervals for the norm of the bias."""
TOLERANCE = 0.1
"""The verdict is "unbiased" only where a bias of this fraction of the gradient's norm would have been found."""

Verdict = Literal["unbiased", "biased", "undecided"]
"""The outcome of an audit; `Judgement` says when each is given."""


@dataclass(frozen=True, slots=True, eq=False)
class Tails:
    """Bounds on estimates that were possible in a batch and did not occur.

    Attributes:
        second_moment: of each component, averaged over the batch.
        reach: the largest absolute value that each component could have taken.

    Example:
        Estimates that are 100 with probability 1e-6, else 0. Ten of them were all 0; the tails still count.

        >>> collector = Collector(torch.zeros(1))
        >>> tails = Tails(second_moment=torch.tensor([0.01]), reach=torch.tensor([100.0]))
        >>> collector.add(torch.zeros(10, 1), tails)
        >>> collector.evidence().variance, collector.evidence().reach
        (tensor([0.0100]), tensor([100.]))
    """

    second_moment: Float[Tensor, " m"]
    reach: Float[Tensor, " m"]


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Statistics of N estimates of a random vector.

    Attributes:
        estimates: N.
        exact: the mean that is claimed.
        mean: the mean that was found.
        variance: the variance of one estimate.
        reach: b, the largest distance from the claimed mean.

    Example:
        >>> collector = Collector(torch.tensor([1.0]).double())
        >>> collector.add(torch.tensor([[0.0], [2.0], [4.0]]).double())
        >>> collector.evidence().mean, collector.evidence().error
        (tensor([2.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """

    estimates: int
    exact: Float[Tensor, " m"]
    mean: Float[Tensor, " m"]
    variance: Float[Tensor, " m"]
    reach: Float[Tensor, " m"]

    @property
    def error(self) -> Float[Tensor, " m"]:
        """Mean minus exact: the bias, with noise."""
        return self.mean - self.exact

    def half_width(self, rate: float) -> Float[Tensor, " m"]:
        """Bernstein's bound on |mean - E mean| of one component and one side, which fails with at most this rate."""
        log_rate = -math.log(rate)
        gaussian = (2.0 * log_rate * self.variance / self.estimates).sqrt()
        return gaussian + self.reach * log_rate / (3.0 * self.estimates)

    def threshold(self, rate: float = FALSE_ALARM) -> Float[Tensor, " m"]:
        """The same for all components and both sides at once; the half-width of a simultaneous interval too."""
        return self.half_width(rate / (2 * len(self.mean)))

    def detectable(self, rate: float = FALSE_ALARM, power: float = POWER) -> Float[Tensor, " m"]:
        """The bias of a component that the test finds with at least this power."""
        return self.threshold(rate) + self.half_width(1.0 - power)


class Collector:
    """Collects estimates, batch by batch, into `Evidence`; holds sums only.

    Args:
        exact: the mean that is claimed; estimates are centred on it, so that sums of squares lose no digits.

    Example:
        >>> collector = Collector(torch.zeros(2).double())
        >>> for _ in range(3):
        ...     collector.add(torch.randn(100, 2).double())
        >>> collector.evidence().estimates
        300
    """

    def __init__(self, exact: Float[Tensor, " m"]) -> None:
        self._exact = exact
        self._estimates = 0
        self._sum, self._squares, self._reach = (torch.zeros_like(exact) for _ in range(3))
        self._possible_moment = torch.zeros_like(exact)

    def add(self, estimates: Float[Tensor, "estimates m"], tails: Tails | None = None) -> None:
        """Takes in a batch of estimates."""
        deviation = estimates - self._exact
        self._estimates += len(estimates)
        self._sum += deviation.sum(0)
        self._squares += deviation.square().sum(0)
        self._reach = torch.maximum(self._reach, deviation.abs().amax(0))
        if tails is not None:
            self._possible_moment += len(estimates) * tails.second_moment
            self._reach = torch.maximum(self._reach, tails.reach + self._exact.abs())

    def evidence(self) -> Evidence:
        """The statistics of all estimates so far; it takes at least 2 of them."""
        shift = self._sum / self._estimates
        seen = (self._squares - self._estimates * shift.square()) / (self._estimates - 1)
        possible = self._possible_moment / self._estimates - self._exact.square()
        variance = torch.maximum(seen, possible).clamp_min(0.0)
        return Evidence(self._estimates, self._exact, self._exact + shift, variance, self._reach)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Judgement:
    """The outcome of the test.

    Attributes:
        verdict: "biased": some component is off by more than its threshold. "unbiased": none is, unbiasedness was
            claimed, and a bias of `TOLERANCE` times the norm would have been found. Else "undecided".
        z: |mean - exact| in standard errors, at the component that comes closest to its threshold or exceeds it most.
        z_limit: the threshold there.
        component: its index.
        detectable: bias that would be found with `POWER`, as a fraction of the norm; the largest over groups.
        more_estimates: how many more estimates a decision needs; 0 unless undecided, None if no number would decide.

    Example:
        >>> collector = Collector(torch.ones(1).double())
        >>> noise = torch.randn(10_000, 1, generator=torch.Generator().manual_seed(0)).double()
        >>> collector.add(1.0 + noise)
        >>> judged = judge(collector.evidence())
        >>> judged.verdict, judged.z < judged.z_limit, judged.more_estimates
        ('unbiased', True, 0)
    """

    verdict: Verdict
    z: float
    z_limit: float
    component: int
    detectable: float
    more_estimates: int | None


def judge(evidence: Evidence, groups: int = 1, *, claimed: bool = True, rate: float = FALSE_ALARM) -> Judgement:
    """Compares the mean that was found with the one that is claimed.

    A bias vector longer than that of `detectable` exceeds it in some component, and so is found with `POWER`.

    Args:
        evidence: the estimates.
        groups: how many equal parts the vector has, each measured by its own norm (gradients of router and experts).
        claimed: whether unbiasedness is claimed. Without a claim, finding no bias decides nothing.
        rate: probability of a false alarm, over all components.

    Returns:
        The judgement.

    Example:
        >>> collector = Collector(torch.zeros(1).double())
        >>> collector.add(torch.randn(10_000, 1, generator=torch.Generator().manual_seed(0)).double() + 0.1)
        >>> judge(collector.evidence()).verdict
        'biased'
    """
    # A component that never varies counts as off only beyond rounding.
    rounding = 1e-12 * evidence.exact.norm()
    threshold = evidence.threshold(rate) + rounding
    worst = int((evidence.error.abs() / threshold).argmax())
    error, limit = float(evidence.error[worst].abs()), float(threshold[worst])
    standard_error = float((evidence.variance[worst] / evidence.estimates).sqrt() + rounding)
    detectable = float(relative_norm(evidence.detectable(rate), evidence, groups).max())
    verdict: Verdict = "undecided"
    if error > limit:
        verdict = "biased"
    elif claimed and detectable <= TOLERANCE:
        verdict = "unbiased"
    return Judgement(
        verdict=verdict,
        z=error / standard_error,
        z_limit=limit / standard_error,
        component=worst,
        detectable=detectable,
        more_estimates=_more_estimates(evidence, groups, None if claimed else worst, rate)
        if verdict == "undecided"
        else 0,
    )


def relative_norm(vector: Float[Tensor, " m"], evidence: Evidence, groups: int = 1) -> Float[Tensor, " groups"]:
    """The norm of each part of a vector, in units of the norm of the same part of the exact mean."""
    return vector.view(groups, -1).norm(dim=1) / evidence.exact.view(groups, -1).norm(dim=1)


def _more_estimates(evidence: Evidence, groups: int, component: int | None, rate: float) -> int | None:
    """Solves a / sqrt(N) + b / N = target for the N with which the detectable bias is the target.

    The target is the tolerance for every group, or, without a claim, the bias that the component now shows.
    """
    logs = [-math.log(rate / (2 * len(evidence.mean))), -math.log(1.0 - POWER)]
    a = sum((2.0 * log) ** 0.5 for log in logs) * evidence.variance.sqrt()
    b = sum(logs) / 3.0 * evidence.reach
    if component is None:
        a, b, target = relative_norm(a, evidence, groups), relative_norm(b, evidence, groups), TOLERANCE
    else:
        a, b, target = a[component], b[component], float(evidence.error[component].abs())
    if target == 0.0:
        return None
    needed = float(((a + (a.square() + 4.0 * target * b).sqrt()) / (2.0 * target)).square().max())
    # Infinite where the exact mean is zero and a fraction of it cannot be resolved.
    return max(math.ceil(needed) - evidence.estimates, 1) if math.isfinite(needed) else None
