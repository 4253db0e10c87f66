# SPDX-License-Identifier: Apache-2.0
"""The comparison as a value: what is fixed, and which runs it consists of."""

import itertools
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

from equipoise._core import check_at_least, check_one_of, check_positive, check_seed
from equipoise_lab.compare._contenders import CONTENDERS, Setting
from equipoise_lab.compare._task import TASKS

EVALUATIONS = ("unlimited", "limited")
"""Without a capacity, and within the recipe's `eval_capacity_factor`."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
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
        check_one_of("task", self.task, tuple(TASKS))
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

    def evaluations(self) -> tuple[float | None, ...]:
        """Lists the capacity factors of `EVALUATIONS`; None: no limit."""
        return (None, self.eval_capacity_factor)

    def describe(self) -> dict[str, Any]:
        """Lists the fields and their values, as JSON knows them."""
        return {f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in fields(self)}


def quick_comparison() -> Comparison:
    """The same comparison in small: two seeds, one learning rate, 60 steps."""
    return Comparison(seeds=2, steps=60, learning_rates=(0.01,))
