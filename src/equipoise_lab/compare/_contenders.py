# SPDX-License-Identifier: Apache-2.0
"""The contenders, as data: which router each has, how it learns, and which settings of its own are tried.

Every one is tuned over the same number of settings: the learning rates of the comparison times three values of what
each needs for balance. To add a contender, add a row.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Setting:
    """What is tuned on the validation split; the last three are options of `equipoise.nn.MoE`."""

    learning_rate: float  # of Adam, for router and experts
    balance_loss: float = 0.0  # weight of the load-balance loss
    marginal_entropy: float = 0.0  # weight of the marginal-entropy loss
    capacity_factor: float = 1.25  # in training an expert takes at most this times its share of the rows, rounded up


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One row of the table.

    It learns by what `equipoise.nn.Surrogate` makes of the losses with a moving average as baseline ("surrogate"), or
    with a baseline that knows the label ("label-aware"), or by the expected loss, all experts on all rows ("exact").
    """

    name: str  # in files and options
    label: str  # in the table and the figure
    router: str  # of the layer
    own: tuple[str, tuple[float, ...]]  # the field of `Setting` that is tuned, and three values of it
    fixed: tuple[tuple[str, float], ...] = ()  # other fields with their values, the same in all its settings
    learns: Literal["surrogate", "label-aware", "exact"] = "surrogate"
    ours: bool = False  # whether it is a recipe of this library, which the others are compared with
    doc: str  # one line

    def settings(self, learning_rates: Sequence[float]) -> list[Setting]:
        """Lists the settings that are tried, as many for every contender."""
        name, values = self.own
        pairs = itertools.product(learning_rates, values)
        return [Setting(learning_rate=rate, **{name: value}, **dict(self.fixed)) for rate, value in pairs]


_BONUS = ("marginal_entropy", (0.1, 0.5, 1.0))

_TABLE = (
    Contender(
        name="switch",
        label="Switch",
        router="switch",
        own=("balance_loss", (0.01, 0.03, 0.1)),
        doc="the most probable expert, gated, with the load-balance loss",
    ),
    Contender(
        name="base",
        label="BASE",
        router="base",
        own=("capacity_factor", (1.0, 1.1, 1.25)),
        doc="the exact balanced assignment, gated; balance needs no loss, so that the capacity is tuned",
    ),
    Contender(
        name="skip-iw",
        label="Skip IW, as in the paper",
        router="skip-iw",
        own=("balance_loss", (0.0, 0.01, 0.1)),
        doc="the paper's best: REINFORCE on what is left after skipping, a moving average as baseline",
    ),
    Contender(
        name="skip-iw-recipe",
        label="Skip IW, our recipe",
        router="skip-iw",
        own=_BONUS,
        learns="label-aware",
        ours=True,
        doc="the default: skip-iw with the marginal-entropy bonus and a baseline that knows the label",
    ),
    Contender(
        name="gm-iw-mix-recipe",
        label="GM IW mix, our recipe",
        router="gm-iw-mix",
        own=_BONUS,
        fixed=(("capacity_factor", 1.0),),
        learns="label-aware",
        ours=True,
        doc="the same with exactly balanced samples of bounded weight: no row is dropped, every expert is full",
    ),
    Contender(
        name="exact",
        label="exact gradient",
        router="sample",
        own=_BONUS,
        learns="exact",
        doc="no sampling: every expert on every row, at eight times the work. What the samplers estimate",
    ),
)

CONTENDERS: MappingProxyType[str, Contender] = MappingProxyType({row.name: row for row in _TABLE})
"""The contenders by name: those to beat, the paper's, ours, and what sampling could reach at best."""
