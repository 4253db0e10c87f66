# SPDX-License-Identifier: Apache-2.0
"""The paper's experiment as a value: what it fixes, what it leaves open, and which runs it consists of."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from equipoise._core import check_at_least, check_fraction, check_one_of, check_positive, check_seed
from equipoise_lab.paper._methods import METHOD_TABLE
from equipoise_lab.paper._results import (
    BASELINES,
    LOSSES,
    MAIN_BALANCE_WEIGHT,
    MAIN_BASELINE,
    MAIN_LEARNING_RATE,
    THRESHOLD,
    VARIANTS,
    Run,
)

METHODS = ("sample", "skip-iw", "skip", "gm-iw", "gm-sh", "gm")
TEMPERATURES = (0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
# Where the claims about the balance loss and the learning rate are decided.
SWEEP_TEMPERATURES = (0.03, 0.3, 1.0, 10.0)
RATE_TEMPERATURES = (1.0, 10.0)
BALANCE_WEIGHTS = (0.0, 0.003, 0.01, 0.03, 0.1)
# What is varied besides the panels: the weight of the balance loss with either loss, the learning rate with REINFORCE.
SWEEPS = ("gating-balance", "reinforce-balance", "reinforce-rate")
LEARNING_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
# What the paper leaves open, the default first.
OPEN_CHOICES: dict[str, tuple[str, ...]] = {
    "dataset": ("per-seed", "shared"),
    "initialisation": ("uniform", "haiku", "small"),
    "balance_load": ("argmax", "sampled"),
    "sinkhorn_order": ("temperature-first", "sinkhorn-first"),
    "measure": ("argmax", "expected"),
    "measured_at": ("last", "last-200"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Paper:
    """The toy experiment of section 3.

    What the paper says: the task, the model, the optimiser, the grid. What it leaves open has a field too, with the
    default that is closest to its wording; `equipoise reproduce --sensitivity` shows which claims depend on it.
    """

    methods: tuple[str, ...] = METHODS  # the strategies to compare
    losses: tuple[str, ...] = LOSSES  # how the router learns
    variants: tuple[str, ...] = VARIANTS  # what is changed about the sampling
    temperatures: tuple[float, ...] = TEMPERATURES  # of the proposal
    seeds: int = 20  # runs of each setting; they are consecutive
    panel_seeds: int = 40  # runs of each setting of the panels with REINFORCE, which the first claims rest on
    first_seed: int = 1000  # where seeds begin
    steps: int = 10_000  # of Adam
    # What is varied besides: the balance loss ("gating-balance", "reinforce-balance"), the learning rate
    # ("reinforce-rate").
    sweeps: tuple[str, ...] = SWEEPS
    # Of the load-balance loss with gating; REINFORCE has none outside of the sweep.
    balance_weight: float = MAIN_BALANCE_WEIGHT["gating"]
    learning_rate: float = MAIN_LEARNING_RATE  # of Adam outside of the sweep
    num_points: int = 100  # datapoints, all in every batch
    noise_sd: float = 0.1  # of the labels
    threshold: float = THRESHOLD  # the mean squared error below which the task counts as solved
    # What REINFORCE subtracts in the first panel; everywhere else it is the first of them.
    baselines: tuple[str, ...] = BASELINES
    baseline_decay: float = 0.99  # of the moving average, which starts at 0
    # Open. "per-seed": every seed has its own; "shared": one for all of them, that of seed 0.
    dataset: str = "per-seed"
    # Open. "uniform": U(-1, 1), as torch initialises a linear layer of one input; "haiku": weights from a normal
    # distribution truncated at two standard deviations, biases 0; "small": N(0, 0.1^2).
    initialisation: str = "uniform"
    # Open. What the balance loss counts: "argmax", the expert that the router prefers; or "sampled", the expert that
    # was drawn. Balanced samples make the latter a constant, so that it has no effect.
    balance_load: str = "argmax"
    # Open. "temperature-first": sinkhorn(log p / tau); "sinkhorn-first": sinkhorn(log p), then tau.
    sinkhorn_order: str = "temperature-first"
    # Open. Which error decides whether a run solved the task: of the "argmax" expert, or "expected" under the router.
    measure: str = "argmax"
    measured_at: str = "last"  # open. When that error is read: at the "last" step, or averaged over the "last-200".

    def __post_init__(self) -> None:
        """Refuses what cannot be run, before anything is."""
        for name, values, known in (
            ("methods", self.methods, tuple(METHOD_TABLE)),
            ("losses", self.losses, LOSSES),
            ("variants", self.variants, VARIANTS),
            ("sweeps", self.sweeps, SWEEPS),
            ("baselines", self.baselines, BASELINES),
        ):
            for value in values:
                check_one_of(name, value, known)
        for name, known in OPEN_CHOICES.items():
            check_one_of(name, getattr(self, name), known)
        for name, value in (("seeds", self.seeds), ("panel_seeds", self.panel_seeds), ("steps", self.steps)):
            check_at_least(name, value, 1)
        check_seed("first_seed", self.first_seed)
        for temperature in self.temperatures:
            check_positive("temperatures", temperature)
        check_positive("learning_rate", self.learning_rate)
        if self.num_points < 2 or self.num_points % 2:
            raise ValueError(
                f"num_points must be even and at least 2, so that two experts share them, got {self.num_points}"
            )
        check_fraction("baseline_decay", self.baseline_decay)

    def runs(self) -> list[Run]:
        """Lists every run once: the six panels, then what the sweeps add to them."""
        found: dict[Run, None] = {}
        grid = itertools.product(self.variants, self.methods, self.losses, self.temperatures)
        for variant, method, loss, t in grid:
            setting = {"loss": loss, "variant": variant, "method": method, "temperature": t}
            if loss == "gating":
                found |= self.setting_runs(self.seeds, **setting, balance_weight=self.balance_weight)
            else:
                for baseline in self.baselines if variant == "plain" else self.baselines[:1]:
                    found |= self.setting_runs(self.panel_seeds, **setting, baseline=baseline)
        if "plain" in self.variants:
            swept = [loss for loss in self.losses if f"{loss}-balance" in self.sweeps]
            weights = itertools.product(self.methods, swept, BALANCE_WEIGHTS, SWEEP_TEMPERATURES)
            for method, loss, weight, t in weights:
                setting = {"loss": loss, "variant": "plain", "method": method, "temperature": t}
                found |= self.setting_runs(self.seeds, **setting, balance_weight=weight)
            if "reinforce" in self.losses and "reinforce-rate" in self.sweeps:
                for method, rate, t in itertools.product(self.methods, LEARNING_RATES, RATE_TEMPERATURES):
                    setting = {"loss": "reinforce", "variant": "plain", "method": method, "temperature": t}
                    found |= self.setting_runs(self.seeds, **setting, learning_rate=rate)
        return list(found)

    def setting_runs(self, number: int, **setting: Any) -> dict[Run, None]:
        """Makes the runs of a setting, so many seeds; what is not given is that of the first panel of REINFORCE."""
        baseline = MAIN_BASELINE["gating"] if setting["loss"] == "gating" else self.baselines[0]
        usual: dict[str, Any] = {"balance_weight": 0.0, "learning_rate": self.learning_rate, "baseline": baseline}
        return {Run(**usual | setting, seed=self.first_seed + i): None for i in range(number)}

    @property
    def seed_range(self) -> range:
        """The seeds of a setting outside of the panels with REINFORCE."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def data_seeds(self, seeds: Sequence[int]) -> list[int]:
        """The seeds of the datasets that go with seeds of runs: the same, or 0 for all of them."""
        return [seed if self.dataset == "per-seed" else 0 for seed in seeds]

    def describe(self) -> dict[str, str | float | int | bool | None | list[str] | list[float]]:
        """Lists the fields and their values, as JSON knows them."""
        return {f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in fields(self)}

    def units(self) -> dict[str, list[Run]]:
        """Groups the runs by what is trained together."""
        units: dict[str, list[Run]] = {}
        for run in self.runs():
            units.setdefault(run.unit, []).append(run)
        return units


def quick_recipe() -> Paper:
    """The same experiment in small: three temperatures, three seeds, 200 steps, no sweeps."""
    return Paper(temperatures=(0.1, 1.0, 10.0), seeds=3, panel_seeds=3, steps=200, sweeps=())
