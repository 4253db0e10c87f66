# SPDX-License-Identifier: Apache-2.0
"""The comparison as a value: the contenders, what is fixed, and which runs it consists of.

A contender is a row: which router it has, how it learns, and which settings of its own are tried. Every one is tuned
over the same number of settings: the learning rates of the comparison times three values of what each needs for
balance. To add a contender, add a row.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from types import MappingProxyType
from typing import Any, Literal

from equipoise._core import check_at_least, check_one_of, check_positive, check_seed
from equipoise_lab.compare._task import TASKS


@dataclass(frozen=True, kw_only=True, slots=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run."""

    contender: str  # its name
    setting: Setting  # what is tuned
    seed: int  # of the initial parameters and the order of the rows, which contenders share, and of the noise

    @property
    def name(self) -> str:
        """In the files of the command."""
        setting = "-".join(f"{value:g}" for value in astuple(self.setting))
        return f"{self.contender}-{setting}-{self.seed}"

    def describe(self) -> dict[str, Any]:
        """Lists contender, setting and seed, as JSON knows them."""
        return {"contender": self.contender, **asdict(self.setting), "seed": self.seed}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One mixture-of-experts layer on a classification task, under every contender.

    The defaults were settled on the validation split with seeds from 1,000 on, which no reported run has.
    """

    task: str = "digits"
    contenders: tuple[str, ...] = tuple(CONTENDERS)  # whom to compare
    seeds: int = 5  # how many
    first_seed: int = 0  # the seeds are this one and those after it
    steps: int = 600  # of Adam, the same for all
    batch_size: int = 128  # rows of a step
    learning_rates: tuple[float, ...] = (0.003, 0.01, 0.03)  # each is tried with three values of a contender's own
    num_experts: int = 8  # k
    hidden_dim: int = 16  # hidden units of an expert
    eval_capacity_factor: float = 1.25  # of the evaluation within a capacity; the other one has none

    def __post_init__(self) -> None:
        """Refuses what cannot be run, before anything is."""
        check_one_of("task", self.task, TASKS)
        for name in self.contenders:
            check_one_of("contenders", name, tuple(CONTENDERS))
        for name in ("steps", "batch_size", "num_experts", "hidden_dim"):
            check_at_least(name, getattr(self, name), 1)
        # A difference of one pair has no spread.
        check_at_least("seeds", self.seeds, 2)
        check_seed("first_seed", self.first_seed)
        for rate in self.learning_rates:
            check_positive("learning_rates", rate)
        check_positive("eval_capacity_factor", self.eval_capacity_factor)

    def runs(self) -> list[Run]:
        """Lists every run: contenders, settings, seeds."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        return [
            Run(contender=name, setting=setting, seed=seed)
            for name in self.contenders
            for setting, seed in itertools.product(CONTENDERS[name].settings(self.learning_rates), seeds)
        ]

    def evaluations(self) -> dict[str, float | None]:
        """Names the evaluations, with their capacity factors; None: no limit."""
        return {"unlimited": None, "limited": self.eval_capacity_factor}


def quick_comparison() -> Comparison:
    """The same comparison in small: two seeds, one learning rate, 60 steps."""
    return Comparison(seeds=2, steps=60, learning_rates=(0.01,))
