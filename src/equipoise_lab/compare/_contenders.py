# SPDX-License-Identifier: Apache-2.0
"""The contenders, as data: how each learns, and which settings of its own are tried.

Every one is tuned over the same number of settings: the learning rates of the comparison times three values of what
each needs for balance. To add a contender, add a row.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from equipoise.estimators import STRATEGIES, Combination
from equipoise_lab.compare._objectives import LabelAware, Objective, Sampled, base, exact, switch


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Setting:
    """What is tuned on the validation split.

    Attributes:
        learning_rate: of Adam, for router and experts.
        balance_loss: weight of the load-balance loss.
        marginal_entropy: weight of the marginal-entropy loss.
        capacity_factor: in training an expert takes at most this times its share of the rows, rounded up.
    """

    learning_rate: float
    balance_loss: float = 0.0
    marginal_entropy: float = 0.0
    capacity_factor: float = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One row of the table.

    Attributes:
        name: in files and options.
        label: in the table and the figure.
        make: builds the objective from the numbers of runs, experts and classes.
        own: three values of what it needs for balance, as fields of `Setting`.
        strategy: what it samples with; None if it does not.
        gated: whether outputs are multiplied by the router's probability, in training and in evaluation.
        ours: whether it is a recipe of this library, which the others are compared with.
        doc: one line.
    """

    name: str
    label: str
    make: Callable[[int, int, int], Objective]
    own: tuple[MappingProxyType[str, float], ...]
    strategy: Combination | None = None
    gated: bool = False
    ours: bool = False
    doc: str

    def settings(self, learning_rates: Sequence[float]) -> list[Setting]:
        """Lists the settings that are tried.

        Args:
            learning_rates: of the comparison.

        Returns:
            As many for every contender.
        """
        pairs = itertools.product(learning_rates, self.own)
        return [Setting(learning_rate=rate, **own) for rate, own in pairs]


def _own(name: str, *values: float, **fixed: float) -> tuple[MappingProxyType[str, float], ...]:
    """Values of one field of `Setting`, the others fixed."""
    return tuple(MappingProxyType({name: value, **fixed}) for value in values)


def _plain(objective: Objective, runs: int, num_experts: int, num_classes: int) -> Objective:
    del runs, num_experts, num_classes
    return objective


def _averaged(strategy: Combination, runs: int, num_experts: int, num_classes: int) -> Objective:
    del num_experts, num_classes
    return Sampled(strategy, runs)


_SKIP, _MIX = STRATEGIES["skip-iw"], STRATEGIES["gm-iw-mix"]

_TABLE = (
    Contender(
        name="switch",
        label="Switch",
        make=partial(_plain, switch),
        own=_own("balance_loss", 0.01, 0.03, 0.1),
        gated=True,
        doc="the most probable expert, gated, with the load-balance loss",
    ),
    Contender(
        name="base",
        label="BASE",
        make=partial(_plain, base),
        own=_own("capacity_factor", 1.0, 1.1, 1.25),
        gated=True,
        doc="the exact balanced assignment, gated; balance needs no loss, so that the capacity is tuned",
    ),
    Contender(
        name="skip-iw",
        label="Skip IW, as in the paper",
        make=partial(_averaged, _SKIP),
        own=_own("balance_loss", 0.0, 0.01, 0.1),
        strategy=_SKIP,
        doc="the paper's best: REINFORCE on what is left after skipping, a moving average as baseline",
    ),
    Contender(
        name="skip-iw-recipe",
        label="Skip IW, our recipe",
        make=partial(LabelAware, _SKIP),
        own=_own("marginal_entropy", 0.1, 0.5, 1.0),
        strategy=_SKIP,
        ours=True,
        doc="the default: skip-iw with the marginal-entropy bonus and a baseline that knows the label",
    ),
    Contender(
        name="gm-iw-mix-recipe",
        label="GM IW mix, our recipe",
        make=partial(LabelAware, _MIX),
        own=_own("marginal_entropy", 0.1, 0.5, 1.0, capacity_factor=1.0),
        strategy=_MIX,
        ours=True,
        doc="the same with exactly balanced samples of bounded weight: no row is dropped, every expert is full",
    ),
    Contender(
        name="exact",
        label="exact gradient",
        make=partial(_plain, exact),
        own=_own("marginal_entropy", 0.1, 0.5, 1.0),
        doc="no sampling: every expert on every row, at eight times the work. What the samplers estimate",
    ),
)

CONTENDERS: MappingProxyType[str, Contender] = MappingProxyType({row.name: row for row in _TABLE})
"""The contenders by name: those to beat, the paper's, ours, and what sampling could reach at best."""
