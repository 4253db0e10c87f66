# SPDX-License-Identifier: Apache-2.0
"""The baselines of the audit: the library's own objects, read before a batch and updated after it.

Legend: n rows (datapoints), k columns (experts), D draws that one estimate averages, e estimates.
"""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_one_of
from equipoise.audit._conditions import Problem
from equipoise.estimators import EMABaseline, RegressionCritic, draws_baseline, leave_one_out_baseline
from equipoise.sampling import Sample

DRAWS = 4
"""How many draws one estimate averages, if each draw's baseline is computed from the others."""

# Updates are few and each is a large batch, so the past may fade fast.
_DECAY = 0.9


@runtime_checkable
class Control(Protocol):
    """What an estimate subtracts: a baseline for each row, a critic for each pair, or neither.

    It may not depend on the expert that its own row drew in the current batch. If it does, the estimate is biased, and
    the audit detects it.

    Attributes:
        name: what results call it.
        draws: draws that one estimate averages.
        learns: whether it depends on past batches.

    Example:
        A baseline that is always 1:

        >>> import equipoise as eq
        >>> class One:
        ...     name, draws, learns = "one", 1, False
        ...
        ...     def read(self, s, losses, weight):
        ...         return 1.0, None
        ...
        ...     def update(self, s, losses):
        ...         pass
        >>> isinstance(One(), Control), eq.audit.audit("sample", eq.audit.Conditions(draws=1000), baseline=One()).name
        (True, 'sample + one')
    """

    name: str
    draws: int
    learns: bool

    def read(
        self, s: Sample, losses: Float[Tensor, "*batch n"], weight: Float[Tensor, "*batch n"]
    ) -> tuple[float | Tensor, Tensor | None]:
        """Returns the baseline [] or [..., n], and the critic [..., n, k] or None, before the batch is taken in."""
        ...

    def update(self, s: Sample, losses: Float[Tensor, "*batch n"]) -> None:
        """Takes in a batch after its estimate."""
        ...


BASELINES = ("none", "ema", "expert-mean", "critic", "leave-one-out", "draws")
"""The baselines that `audit` knows by name; "leave-one-out" is biased where rows compete for capacity."""


def make_control(baseline: str, problem: Problem) -> Control:
    """Makes a baseline that knows nothing yet.

    Args:
        baseline: its name, one of `BASELINES`.
        problem: what it will be used on.

    Returns:
        The baseline.
    """
    check_one_of("baseline", baseline, BASELINES)
    if baseline in ("critic", "expert-mean"):
        features = problem.features if baseline == "critic" else problem.features[:, :0]
        return _Critic(baseline, features, problem.logits.shape[-1])
    makers = {"none": NoBaseline, "ema": _MovingAverage, "leave-one-out": _OtherRows, "draws": _OtherDraws}
    return makers[baseline]()


class NoBaseline:
    """No baseline. Also the base class of baselines that keep no state between batches.

    Example:
        >>> class Half(NoBaseline):
        ...     name = "half"
        ...
        ...     def read(self, s, losses, weight):
        ...         return 0.5, None
        >>> NoBaseline().name, Half().learns, isinstance(Half(), Control)
        ('none', False, True)
    """

    name = "none"
    draws = 1
    learns = False

    def read(self, s: Sample, losses: Tensor, weight: Tensor) -> tuple[float | Tensor, Tensor | None]:
        del s, losses, weight
        return 0.0, None

    def update(self, s: Sample, losses: Tensor) -> None:
        del s, losses


class _OtherRows(NoBaseline):
    """The negative control: what the library refuses where rows compete for capacity."""

    name = "leave-one-out"

    def read(self, s: Sample, losses: Tensor, weight: Tensor) -> tuple[float | Tensor, Tensor | None]:
        del weight
        return leave_one_out_baseline(losses, s, allow_biased=True), None


class _OtherDraws(NoBaseline):
    name = "draws"
    draws = DRAWS

    def read(self, s: Sample, losses: Tensor, weight: Tensor) -> tuple[float | Tensor, Tensor | None]:
        return draws_baseline(losses, s, weight=weight), None


class _MovingAverage(NoBaseline):
    name = "ema"
    learns = True

    def __init__(self) -> None:
        self._average = EMABaseline(_DECAY)

    def read(self, s: Sample, losses: Tensor, weight: Tensor) -> tuple[float | Tensor, Tensor | None]:
        del s, losses, weight
        return self._average.value, None

    def update(self, s: Sample, losses: Tensor) -> None:
        self._average.update(losses, s)


class _Critic(NoBaseline):
    learns = True

    def __init__(self, name: str, features: Float[Tensor, "n F"], num_experts: int) -> None:
        self.name, self._features = name, features
        self._critic = RegressionCritic(num_experts, features.shape[-1], decay=_DECAY)

    def read(self, s: Sample, losses: Tensor, weight: Tensor) -> tuple[float | Tensor, Tensor | None]:
        del losses, weight
        # The features of a row are the same in every draw, so one prediction serves them all.
        return 0.0, self._critic(self._features).expand(s.log_q.shape)

    def update(self, s: Sample, losses: Tensor) -> None:
        self._critic.update(self._features.expand(*losses.shape, -1), s, losses)
