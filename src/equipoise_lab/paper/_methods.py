# SPDX-License-Identifier: Apache-2.0
"""What the runs of the toy experiment can be called: a strategy, the room that experts have, and a critic or none."""

from dataclasses import dataclass
from types import MappingProxyType

from equipoise.estimators import PAPER_STRATEGIES, STRATEGIES, WeightedSampler

# Beyond the paper, an expert may have this times n/k rows, rounded down.
SLACK = 1.25


@dataclass(frozen=True, slots=True)
class Method:
    """A way to estimate the gradient."""

    name: str  # in the column `method` of `results.csv`
    label: str  # in figures
    strategy: WeightedSampler  # samples and weighs
    capacity_factor: float = 1.0  # rows that an expert may take, in units of n/k
    # Whether a `RegressionCritic` on (x, y, x^2, xy, y^2) takes the place of the moving average: enough to represent
    # the squared error of a linear expert.
    critic: bool = False

    def capacity(self, num_points: int) -> int | None:
        """Rows that each of the two experts may take; None for as few as possible."""
        return None if self.capacity_factor == 1 else int(self.capacity_factor * num_points / 2)


_SAMPLE, _MATCHING, _MIX, _SKIP = (STRATEGIES[name] for name in ("sample", "gm-iw", "gm-iw-mix", "skip-iw-mix"))
_PAPER = tuple(Method(name, strategy.label, strategy) for name, strategy in PAPER_STRATEGIES.items())
_BEYOND = (
    Method("sample-critic", "Sample, critic", _SAMPLE, critic=True),
    Method("skip-iw-mix", "Skip IW mix", _SKIP),
    Method("skip-iw-mix-critic", "Skip IW mix, critic", _SKIP, critic=True),
    Method("gm-iw-critic", "GM IW, critic", _MATCHING, critic=True),
    Method("gm-iw-mix", "GM IW mix", _MIX),
    Method("gm-iw-avg-mix", "GM IW avg mix", STRATEGIES["gm-iw-avg-mix"].with_options(solves=4)),
    Method("gm-iw-mix-critic", "GM IW mix, critic", _MIX, critic=True),
    Method("gm-iw-slack", "GM IW, capacity 1.25", _MATCHING, SLACK),
    Method("gm-iw-mix-slack", "GM IW mix, capacity 1.25", _MIX, SLACK),
    Method("gm-iw-mix-critic-slack", "GM IW mix, critic, capacity 1.25", _MIX, SLACK, critic=True),
)

BEYOND = tuple(method.name for method in _BEYOND)
"""The methods that the paper does not have."""

METHOD_TABLE: MappingProxyType[str, Method] = MappingProxyType({m.name: m for m in (*_PAPER, *_BEYOND)})
"""All methods by name, the paper's six first."""
