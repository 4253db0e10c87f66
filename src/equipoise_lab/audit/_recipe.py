# SPDX-License-Identifier: Apache-2.0
"""A run of the audit: several strategies and baselines under the same conditions.

Legend: n rows (datapoints).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_at_least, check_one_of
from equipoise.audit import BASELINES as NAMED
from equipoise.audit import AuditResult, Conditions, NoBaseline, audit, check_strategy, draw_problem
from equipoise.estimators import STRATEGIES, Strategy, WeightedSampler, get_strategy
from equipoise.nn import ResidualBaseline
from equipoise.sampling import Sample

BASELINES = (*NAMED[:4], "residual", *NAMED[4:])
"""The baselines of the library's audit, and the residual baseline of its layers."""

# Strategies on which every baseline is shown by default: one that draws rows independently, one that drops, one that
# balances.
_SHOWN_ON = ("sample", "skip-iw", "gm-iw-mix")
# The share of the draws that those get: what a baseline leaves varies less, and is resolved sooner.
_SHARE = 2
# As for the audit's own baselines: updates are few and each is a large batch.
_DECAY = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit(Conditions):
    """One run of the audit.

    Every baseline is used with every strategy. None: "none" with every strategy, and the others with three that stand
    for all, on half of the draws.
    """

    strategies: tuple[str, ...] = tuple(STRATEGIES)  # names, or package.module:name
    baselines: tuple[str, ...] | None = None  # names in `BASELINES`
    eps: float | None = None  # mixture weight in place of that of the strategies that mix; None leaves it
    solves: int | None = None  # solves in place of those of the strategies that average; None leaves them

    def __post_init__(self) -> None:
        """Refuses a run that cannot be made."""
        Conditions.__post_init__(self)  # super() does not know a class with slots, which is made twice
        if self.solves is not None:
            check_at_least("solves", self.solves, 1)
        for baseline in self.baselines or ():
            check_one_of("baseline", baseline, BASELINES)
        for name, known in (("strategies", STRATEGIES), ("baselines", BASELINES)):
            if getattr(self, name) == ():
                raise ValueError(f"{name} must name at least one, got none: choose from {', '.join(known)}")

    def cases(self) -> list[tuple[str, str, int]]:
        """Lists what is measured: the name of a strategy, a baseline, and the draws of the whole batch."""
        strategies = list(dict.fromkeys(self.strategies))
        if self.baselines is not None:
            return [(s, b, self.draws) for b in BASELINES if b in self.baselines for s in strategies]
        plain = [(s, "none", self.draws) for s in strategies]
        shown = [s for s in _SHOWN_ON if s in strategies]
        return plain + [(s, b, max(self.draws // _SHARE, 2)) for s in shown for b in BASELINES[1:]]


def prepare(run: Audit) -> dict[str, Strategy]:
    """Finds the strategies and draws from each once, so that what one refuses is said before the work begins."""
    found = {name: get_strategy(name) for name in run.strategies}
    for option, value, has in (("eps", run.eps, "mixes"), ("solves", run.solves, "averages")):
        if value is not None and not any(getattr(strategy, has, False) for strategy in found.values()):
            raise ValueError(f"{option} must be left out where no strategy {has}, got {value}: add one that does")
    for name, strategy in found.items():
        if isinstance(strategy, WeightedSampler):
            eps, solves = run.eps if strategy.mixes else None, run.solves if strategy.averages else None
            found[name] = strategy.with_options(eps=eps, solves=solves)
        check_strategy(found[name], run)
    return found


def measure(
    strategy: Strategy,
    run: Audit,
    *,
    baseline: str = "none",
    draws: int | None = None,
    advance: Callable[[int], object] | None = None,
) -> AuditResult:
    """Audits one strategy with one baseline; `draws` replace those of the run, `advance` is told those made."""
    conditions = run if draws is None else replace(run, draws=draws)
    control = _Residual(draw_problem(run).residual) if baseline == "residual" else baseline
    return audit(strategy, conditions, baseline=control, advance=advance)


class _Residual(NoBaseline):
    """The residual baseline of layers, here of the losses of rows, blurred."""

    name = "residual"
    learns = True

    def __init__(self, residual: Float[Tensor, " n"]) -> None:
        self._residual, self._baseline = residual, ResidualBaseline(_DECAY)

    def read(self, s: Sample, losses: Tensor, weight: Tensor) -> tuple[float | Tensor, Tensor | None]:
        del s, weight
        return self._baseline(self._residual).expand_as(losses), None

    def update(self, s: Sample, losses: Tensor) -> None:
        self._baseline.update(losses, self._residual.expand_as(losses), s.kept)
