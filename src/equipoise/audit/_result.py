# SPDX-License-Identifier: Apache-2.0
"""What an audit found.

Biases and standard deviations are given in units of the norm of the exact gradient, router and experts each for itself.

Legend: m components, the gradient of n x k logits (the router), then that of n x k losses (the experts).
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from equipoise.audit._conditions import Conditions
from equipoise.audit._statistics import (
    CONFIDENCE,
    FALSE_ALARM,
    POWER,
    TOLERANCE,
    Evidence,
    Judgement,
    Verdict,
    judge,
    relative_norm,
)
from equipoise.estimators import Strategy

GROUPS = ("router", "experts")
"""The two parts of the gradient, in the order of its components."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Bias and deviation of the gradient of the router, or of the experts, in units of the norm of the exact one.

    Attributes:
        bias: norm of mean - exact, less what noise alone would add on average.
        bias_interval: simultaneous confidence interval for the norm of the bias, at `CONFIDENCE`.
        detectable: norm of a bias that would have been found with `POWER`.
        deviation: standard deviation of one estimate, the root of the total variance.

    Example:
        >>> import equipoise as eq
        >>> found = eq.audit.audit("skip-iw", eq.audit.Conditions(n=4, draws=50_000, row_effect=0.0)).findings["router"]
        >>> low, high = found.bias_interval
        >>> low, found.bias < high, found.detectable < eq.audit.TOLERANCE
        (0.0, True, True)
    """

    bias: float
    bias_interval: tuple[float, float]
    detectable: float
    deviation: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditResult:
    """What the draws of one strategy with one baseline showed.

    Attributes:
        strategy: the name of the strategy.
        baseline: the name of its baseline.
        conditions: what it was audited on.
        evidence: about the gradient, router first, then experts: `exact`, `mean`, `variance` of one estimate.
        claimed: whether the estimate, as it was computed, is claimed to be unbiased.
        draws: samples of the whole batch; an estimate may take several.
        effective: effective sample size, (sum w)^2 / sum w^2, as a fraction of all rows.
        largest_weight: the largest weight seen.
        possible_weight: the largest p/q of any pair, drawn or not; None without importance weights.
        dropped: the fraction of rows that no expert processed.
        seconds: processor time of one draw: noise, sample and weights of one batch of n rows.
        step_seconds: processor time of one estimate: its draws, its baseline and what that learns, the surrogate and
            its backward.
        false_alarm: the probability that an unbiased estimate is called biased is at most this.
        power: a bias of `tolerance` is found with at least this probability wherever the verdict is "unbiased".
        tolerance: a fraction of the norm of the exact gradient, router and experts each.
        confidence: the confidence level of the intervals in `findings`.

    Example:
        >>> import equipoise as eq
        >>> found = eq.audit.audit("skip", eq.audit.Conditions(n=4, draws=50_000, row_effect=0.0))
        >>> found.name, found.verdict, found.findings["router"].bias_interval[0] > 0
        ('skip', 'biased', True)
    """

    strategy: Strategy
    baseline: str
    conditions: Conditions
    evidence: Evidence
    claimed: bool
    draws: int
    effective: float
    largest_weight: float
    possible_weight: float | None
    dropped: float
    seconds: float
    step_seconds: float
    false_alarm: float = FALSE_ALARM
    power: float = POWER
    tolerance: float = TOLERANCE
    confidence: float = CONFIDENCE

    def __str__(self) -> str:
        """Says in a few lines what was found: for a terminal, or the message of a failed test.

        Example:
            >>> from equipoise.audit import Conditions, audit
            >>> print(audit("skip-iw", Conditions(n=4, draws=50_000, row_effect=0.0)))
            skip-iw: unbiased
              router:  bias ... of the gradient's norm (95% interval ... to ...), one estimate deviates by ...
              experts: bias ...
              worst component ... standard errors off (limit ...); a bias of ... would have been found
        """
        judged = self.judgement
        lines = [f"{self.name}: {judged.verdict}"]
        for group, found in self.findings.items():
            low, high = found.bias_interval
            interval = f"{self.confidence:.0%} interval {low:.3f} to {high:.3f}"
            lines.append(
                f"  {group + ':':8} bias {found.bias:.3f} of the gradient's norm ({interval}), "
                f"one estimate deviates by {found.deviation:.2f}"
            )
        lines.append(
            f"  worst component {judged.z:.1f} standard errors off (limit {judged.z_limit:.1f}); a bias of "
            f"{judged.detectable:.3f} would have been found"
        )
        if judged.more_estimates:
            lines.append(f"  a decision takes {judged.more_estimates:,} more estimates")
        return "\n".join(lines)

    @property
    def name(self) -> str:
        """The strategy's name, and the baseline's."""
        return self.strategy.name if self.baseline == "none" else f"{self.strategy.name} + {self.baseline}"

    @property
    def judgement(self) -> Judgement:
        """The outcome of the test: the verdict, and how close the worst component comes to its limit."""
        return judge(self.evidence, len(GROUPS), claimed=self.claimed)

    @property
    def verdict(self) -> Verdict:
        """One of "biased", "unbiased" and "undecided"; see `Judgement`."""
        return self.judgement.verdict

    @property
    def bias(self) -> Float[Tensor, " m"]:
        """Mean minus exact gradient, component by component: the bias, with noise."""
        return self.evidence.error

    @property
    def z_scores(self) -> Float[Tensor, " m"]:
        """The bias in standard errors of the mean; 0 for a component that never varies."""
        error = (self.evidence.variance / self.evidence.estimates).sqrt()
        return (self.bias / error).where(error > 0, 0.0)

    @property
    def variance(self) -> Float[Tensor, " m"]:
        """The variance of one estimate, component by component."""
        return self.evidence.variance

    @property
    def findings(self) -> dict[str, Finding]:
        """Bias, detectable bias and standard deviation, for each of `GROUPS`."""
        evidence = self.evidence

        def norm(vector: Tensor) -> list[float]:
            return relative_norm(vector, evidence, len(GROUPS)).tolist()

        half_width, error = evidence.threshold(1.0 - CONFIDENCE), evidence.error.abs()
        biases, noise = norm(error), norm((evidence.variance / evidence.estimates).sqrt())
        lower, upper = norm((error - half_width).clamp_min(0.0)), norm(error + half_width)
        detectable, deviation = norm(evidence.detectable()), norm(evidence.variance.sqrt())
        return {
            group: Finding(
                bias=max(biases[i] ** 2 - noise[i] ** 2, 0.0) ** 0.5,
                bias_interval=(lower[i], upper[i]),
                detectable=detectable[i],
                deviation=deviation[i],
            )
            for i, group in enumerate(GROUPS)
        }
