# SPDX-License-Identifier: Apache-2.0
"""What the runs of the toy experiment can be called: a strategy, the room that experts have, and a critic or none."""

from dataclasses import dataclass
from types import MappingProxyType

from equipoise.estimators import PAPER_STRATEGIES, STRATEGIES, WeightedSampler

# Beyond the paper, an expert may have this times n/k rows, rounded down.
SLACK = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
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


def _paper() -> list[Method]:
    return [Method(name=name, label=strategy.label, strategy=strategy) for name, strategy in PAPER_STRATEGIES.items()]


def _beyond() -> list[Method]:
    sample, matching, mix = STRATEGIES["sample"], STRATEGIES["gm-iw"], STRATEGIES["gm-iw-mix"]
    averaged, skip = STRATEGIES["gm-iw-avg-mix"].with_options(solves=4), STRATEGIES["skip-iw-mix"]
    return [
        Method(name="sample-critic", label="Sample, critic", strategy=sample, critic=True),
        Method(name="skip-iw-mix", label="Skip IW mix", strategy=skip),
        Method(name="skip-iw-mix-critic", label="Skip IW mix, critic", strategy=skip, critic=True),
        Method(name="gm-iw-critic", label="GM IW, critic", strategy=matching, critic=True),
        Method(name="gm-iw-mix", label="GM IW mix", strategy=mix),
        Method(name="gm-iw-avg-mix", label="GM IW avg mix", strategy=averaged),
        Method(name="gm-iw-mix-critic", label="GM IW mix, critic", strategy=mix, critic=True),
        Method(name="gm-iw-slack", label="GM IW, capacity 1.25", strategy=matching, capacity_factor=SLACK),
        Method(name="gm-iw-mix-slack", label="GM IW mix, capacity 1.25", strategy=mix, capacity_factor=SLACK),
        Method(
            name="gm-iw-mix-critic-slack",
            label="GM IW mix, critic, capacity 1.25",
            strategy=mix,
            capacity_factor=SLACK,
            critic=True,
        ),
    ]


BEYOND = tuple(method.name for method in _beyond())
"""The methods that the paper does not have."""

METHOD_TABLE: MappingProxyType[str, Method] = MappingProxyType({m.name: m for m in [*_paper(), *_beyond()]})
"""All methods by name, the paper's six first."""
