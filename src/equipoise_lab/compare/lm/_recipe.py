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
    """One training run.

    Attributes:
        contender: its name.
        setting: what is tuned.
        seed: of the parameters, the batches and the noise. Runs of a seed share the batches and all parameters
            outside the experts, whatever the contender.
        final: whether the test split is read at the end.
    """

    contender: str
    setting: Setting
    seed: int
    final: bool

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
    """A small transformer with two layers of experts, under every contender.

    Attributes:
        contenders: whom to compare.
        seeds: that are reported.
        first_seed: the seeds are this one and those after it.
        tuning_seeds: runs of each setting to choose from, on seeds that are not reported.
        steps: of AdamW, in runs that are reported.
        tuning_steps: of runs to choose from; at most `steps`.
        batch_size: sequences of a step.
        context: bytes of a sequence.
        dim: features of a token.
        heads: of the attention.
        blocks: each of attention and experts.
        vocabulary: ids of the text: 128, the bytes; or more, with pairs that the training text repeats.
        num_experts: of each block.
        hidden_dim: of an expert, and of the dense block.
        validation_pieces: sequences of the validation split that are evaluated.
        test_pieces: of the test split.
    """

    contenders: tuple[str, ...] = tuple(CONTENDERS)
    seeds: int = 5
    first_seed: int = 0
    tuning_seeds: int = 1
    steps: int = 2500
    tuning_steps: int = 1200
    batch_size: int = 8
    context: int = 64
    dim: int = 64
    heads: int = 4
    blocks: int = 2
    vocabulary: int = BYTES
    num_experts: int = 8
    hidden_dim: int = 128
    validation_pieces: int = 256
    test_pieces: int = 1024

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
        """Lists the runs that are reported, seed by seed: what is done of an interrupted comparison is whole seeds.

        Args:
            chosen: the setting of each contender.
        """
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
        """Counts the training steps of the whole comparison.

        Args:
            tuned: whether the settings are chosen already.
        """
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
