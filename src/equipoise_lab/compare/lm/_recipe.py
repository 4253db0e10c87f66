# SPDX-License-Identifier: Apache-2.0
"""The comparison of routers in a language model as a value: what is fixed, and which runs it consists of."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from equipoise._core import check_at_least, check_one_of, check_seed
from equipoise_lab.compare.lm._contenders import CONTENDERS, Setting
from equipoise_lab.compare.lm._vocabulary import BYTES

TUNING_SEED = 1_000_000
"""The seeds that settings are tuned on start here, above those that are reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run."""

    contender: str  # its name
    setting: Setting  # what is tuned
    # Of the parameters, the batches and the noise. Runs of a seed share the batches and all parameters outside the
    # experts, whatever the contender.
    seed: int
    final: bool  # whether the test split is read at the end

    @property
    def name(self) -> str:
        """In the files of the command."""
        setting = "-".join(f"{name}={value:g}" for name, value in self.setting.describe().items())
        return f"{self.contender}-{setting}-{self.seed}"

    def describe(self) -> dict[str, Any]:
        """Lists contender, setting and seed, as JSON knows them."""
        return {"contender": self.contender, **self.setting.describe(), "seed": self.seed, "final": self.final}


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModels:
    """A small transformer with two layers of experts, under every contender."""

    contenders: tuple[str, ...] = tuple(CONTENDERS)  # whom to compare
    seeds: int = 5  # that are reported
    first_seed: int = 0  # the seeds are this one and those after it
    tuning_seeds: int = 1  # runs of each setting to choose from, on seeds that are not reported
    steps: int = 2500  # of AdamW, in runs that are reported
    tuning_steps: int = 1200  # of runs to choose from; at most `steps`
    batch_size: int = 8  # sequences of a step
    context: int = 64  # bytes of a sequence
    dim: int = 64  # features of a token
    heads: int = 4  # of the attention
    blocks: int = 2  # each of attention and experts
    vocabulary: int = BYTES  # ids of the text: 128, the bytes; or more, with pairs that the training text repeats
    num_experts: int = 8  # of each block
    hidden_dim: int = 128  # of an expert, and of the dense block
    validation_pieces: int = 256  # sequences of the validation split that are evaluated
    test_pieces: int = 1024  # of the test split

    def __post_init__(self) -> None:
        """Refuses what cannot be run, before anything is."""
        for name in self.contenders:
            check_one_of("contenders", name, tuple(CONTENDERS))
        check_at_least("seeds", self.seeds, 2)  # a difference of one pair has no spread
        check_seed("first_seed", self.first_seed)
        counts = {field.name for field in fields(self)} - {"contenders", "seeds", "first_seed"}
        for name in sorted(counts):
            check_at_least(name, getattr(self, name), BYTES if name == "vocabulary" else 1)

    def tuning_runs(self) -> list[Run]:
        """Lists the runs that settings are chosen by."""
        seeds = range(TUNING_SEED + self.first_seed, TUNING_SEED + self.first_seed + self.tuning_seeds)
        return [
            Run(contender=name, setting=setting, seed=seed, final=False)
            for name in self.contenders
            for setting in CONTENDERS[name].settings()
            for seed in seeds
        ]

    def final_runs(self, chosen: Mapping[str, Setting]) -> list[Run]:
        """Lists the runs that are reported, seed by seed: what is done of an interrupted comparison is whole seeds."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        return [
            Run(contender=name, setting=chosen[name], seed=seed, final=True)
            for seed in seeds
            for name in self.contenders
        ]

    def steps_of(self, run: Run) -> int:
        """Training steps of a run."""
        return self.steps if run.final else min(self.tuning_steps, self.steps)

    def total_steps(self, *, tuned: bool = False) -> int:
        """Counts the training steps of the whole comparison, or of what is left where the settings are chosen."""
        tuning = 0 if tuned else sum(map(self.steps_of, self.tuning_runs()))
        return tuning + len(self.contenders) * self.seeds * self.steps

    def describe(self) -> dict[str, Any]:
        """Lists the fields and their values, as JSON knows them."""
        return {**asdict(self), "contenders": list(self.contenders)}


def quick_language_models() -> LanguageModels:
    """The same comparison in small: two seeds, a tiny model, 20 steps."""
    return LanguageModels(
        seeds=2,
        steps=20,
        tuning_steps=20,
        batch_size=4,
        context=16,
        dim=16,
        hidden_dim=16,
        validation_pieces=8,
        test_pieces=8,
    )
