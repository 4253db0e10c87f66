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
    """What is tuned on the validation split; the last three are options of `equipoise.nn.MoE`.

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
        router: of the layer.
        own: the field of `Setting` that is tuned, and three values of it.
        fixed: other fields with their values, the same in all its settings.
        learns: "surrogate": what `equipoise.nn.Surrogate` makes of the losses, with a moving average as baseline.
            "label-aware": the same with a baseline that knows the label. "exact": the expected loss, all experts on
            all rows.
        ours: whether it is a recipe of this library, which the others are compared with.
        doc: one line.
    """

    name: str
    label: str
    router: str
    own: tuple[str, tuple[float, ...]]
    fixed: tuple[tuple[str, float], ...] = ()
    learns: Literal["surrogate", "label-aware", "exact"] = "surrogate"
    ours: bool = False
    doc: str

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
