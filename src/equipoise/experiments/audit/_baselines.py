# SPDX-License-Identifier: Apache-2.0
"""The baselines of the audit: the library's own objects, read before a batch and updated after it.

Legend: n rows (datapoints), k columns (experts), D draws that one estimate averages, e estimates.
"""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from equipoise.estimators import EMABaseline, RegressionCritic, draws_baseline, leave_one_out_baseline
from equipoise.experiments.audit._recipe import Baseline, Problem
from equipoise.nn import ResidualBaseline
from equipoise.sampling import Sample

DRAWS = 4
"""Draws that one estimate averages where they serve each other as a baseline."""

# Updates are few and each is a large batch, so the past may fade fast.
_DECAY = 0.9


@runtime_checkable
class Control(Protocol):
    """What an estimate subtracts: a baseline for each row, a critic for each pair, or neither.

    Attributes:
        draws: draws that one estimate averages.
        learns: whether it depends on past batches.
    """

    draws: int
    learns: bool

    def read(
        self, s: Sample, losses: Float[Tensor, "*batch n"], weight: Float[Tensor, "*batch n"]
    ) -> tuple[float | Tensor, Tensor | None]:
        """Returns baseline [], [..., n] and critic [..., n, k] or None, before the batch is taken in."""
        ...

    def update(self, s: Sample, losses: Float[Tensor, "*batch n"]) -> None:
        """Takes in a batch after its estimate."""
        ...


def make_control(baseline: Baseline, problem: Problem) -> Control:
    """Makes a baseline that knows nothing yet.

    Args:
        baseline: its name.
        problem: what it will be used on.

    Returns:
        The baseline.
    """
    if baseline == "ema":
        return _MovingAverage()
    if baseline == "residual":
        return _Residual(problem.residual)
    if baseline in ("critic", "expert-mean"):
        return _Critic(problem.features if baseline == "critic" else problem.features[:, :0], problem.logits.shape[-1])
    return {"none": _Nothing, "leave-one-out": _OtherRows, "draws": _OtherDraws}[baseline]()


class _Nothing:
    """No baseline; and nothing to learn, for those that see the current batch only."""

    draws = 1
    learns = False

    def read(self, s: Sample, losses: Tensor, weight: Tensor) -> tuple[float | Tensor, Tensor | None]:
        del s, losses, weight
        return 0.0, None

    def update(self, s: Sample, losses: Tensor) -> None:
        del s, losses


class _OtherRows(_Nothing):
    """The negative control: what the library refuses where rows compete for capacity."""

    def read(self, s: Sample, losses: Tensor, weight: Tensor) -> tuple[float | Tensor, Tensor | None]:
        del weight
        return leave_one_out_baseline(losses, s, allow_biased=True), None


class _OtherDraws(_Nothing):
    draws = DRAWS

    def read(self, s: Sample, losses: Tensor, weight: Tensor) -> tuple[float | Tensor, Tensor | None]:
        return draws_baseline(losses, s, weight=weight), None


class _MovingAverage(_Nothing):
    learns = True

    def __init__(self) -> None:
        self._average = EMABaseline(_DECAY)

    def read(self, s: Sample, losses: Tensor, weight: Tensor) -> tuple[float | Tensor, Tensor | None]:
        del s, losses, weight
        return self._average.value, None

    def update(self, s: Sample, losses: Tensor) -> None:
        self._average.update(losses, s)


class _Residual(_Nothing):
    learns = True

    def __init__(self, residual: Float[Tensor, " n"]) -> None:
        self._residual, self._baseline = residual, ResidualBaseline(_DECAY)

    def read(self, s: Sample, losses: Tensor, weight: Tensor) -> tuple[float | Tensor, Tensor | None]:
        del s, weight
        return self._baseline(self._residual).expand_as(losses), None

    def update(self, s: Sample, losses: Tensor) -> None:
        self._baseline.update(losses, self._residual.expand_as(losses), s.kept)


class _Critic(_Nothing):
    learns = True

    def __init__(self, features: Float[Tensor, "n F"], num_experts: int) -> None:
        self._features, self._critic = features, RegressionCritic(num_experts, features.shape[-1], decay=_DECAY)

    def read(self, s: Sample, losses: Tensor, weight: Tensor) -> tuple[float | Tensor, Tensor | None]:
        del losses, weight
        # The features of a row are the same in every draw, so one prediction serves them all.
        return 0.0, self._critic(self._features).expand(s.log_q.shape)

    def update(self, s: Sample, losses: Tensor) -> None:
        self._critic.update(self._features.expand(*losses.shape, -1), s, losses)
