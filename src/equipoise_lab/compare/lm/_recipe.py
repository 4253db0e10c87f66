# SPDX-License-Identifier: Apache-2.0
"""The comparison of routers in a language model as a value: the contenders, what is fixed, and which runs there are.

Every contender is tuned over three settings: two learning rates with its usual options, and a third setting of its
own. To add one, add a row.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from equipoise._core import check_at_least, check_one_of, check_seed
from equipoise_lab.compare.lm._text import BYTES

RATES = (0.003, 0.0045)
"""The learning rates that every contender is tuned over."""
_FIELDS = ("learning_rate", "strength", "id_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is tuned on the validation split."""

    learning_rate: float  # the largest one of AdamW, for router and experts
    # Of `equipoise.nn.MoE`, beside the contender's.
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    strength: float | None = None  # of the token prior, for contenders that have one
    id_length: int = 1  # what hashes and priors see as the token's id: 1, the token; 2, the token and the one before

    def describe(self) -> dict[str, float]:
        """Lists what is set, as JSON knows it."""
        prior = {} if self.strength is None else {"strength": self.strength}
        ids = {} if self.id_length == 1 else {"id_length": self.id_length}
        return {"learning_rate": self.learning_rate, **self.options, **prior, **ids}


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One row of the table."""

    name: str  # in files
    label: str  # in the table and the figure
    router: str | None  # of the layers; None: a feed-forward block of an expert's size in place of experts
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of `equipoise.nn.MoE`
    strength: float | None = None  # of the token prior; None: no prior
    gate: bool = True  # whether the router has a learnt gate beside the prior
    weights: str = "router"  # of `equipoise.nn.Surrogate`
    # The third setting, as changes of the first one: fields of `Setting`, and options of `equipoise.nn.MoE`.
    third: Mapping[str, float | int]
    kind: str = "peer"  # "peer", "control" or "ours"
    doc: str  # one line

    def settings(self) -> list[Setting]:
        """Lists the settings that are tried, as many for every contender."""
        usual = [Setting(learning_rate=rate, strength=self.strength) for rate in RATES]
        changes: dict[str, Any] = {name: value for name, value in self.third.items() if name in _FIELDS}
        own = {name: value for name, value in self.third.items() if name not in _FIELDS}
        return [*usual, replace(usual[0], options=own, **changes)]


_TABLE = (
    Contender(
        name="dense",
        label="dense",
        router=None,
        third={"learning_rate": 0.002},
        doc="one feed-forward block of an expert's size, no routing",
    ),
    Contender(
        name="hash",
        label="hash",
        router="hash",
        third={"id_length": 2},
        doc="a fixed hash of the byte, another one in each block; nothing is learnt",
    ),
    Contender(
        name="switch",
        label="Switch",
        router="switch",
        third={"balance_loss": 0.03},
        doc="the most probable expert, gated, with a load-balance loss of 0.01",
    ),
    Contender(
        name="switch-certain",
        label="Switch, certain",
        router="switch",
        options={"conditional_entropy": 0.03},
        third={"balance_loss": 0.03},
        kind="control",
        doc="Switch with the conditional-entropy loss that our samplers have by default",
    ),
    Contender(
        name="loss-free",
        label="loss-free bias",
        router="loss-free",
        third={"rate": 0.01},
        doc="logits plus a bias that follows the load by 0.001 a step, gated",
    ),
    Contender(
        name="quantile",
        label="quantile",
        router="quantile",
        third={"learning_rate": 0.002},
        doc="logits minus prices of quantile balancing, gated",
    ),
    Contender(
        name="base",
        label="BASE",
        router="base",
        options={"evaluation": "priced"},
        third={"capacity_factor": 1.0},
        doc="the exact balanced assignment of the logits, gated; evaluated with the average prices",
    ),
    Contender(
        name="priced",
        label="priced",
        router="priced",
        third={"learning_rate": 0.002},
        kind="ours",
        doc="logits minus the average exact price, gated; no auxiliary loss, nothing dropped",
    ),
    Contender(
        name="topk-2",
        label="top-2",
        router="topk",
        options={"top_k": 2},
        third={"balance_loss": 0.03},
        doc="the two most probable experts, gated, with a load-balance loss of 0.01",
    ),
    Contender(
        name="priced-2",
        label="priced, K = 2",
        router="priced",
        options={"top_k": 2},
        third={"learning_rate": 0.002},
        kind="ours",
        doc="priced with two experts a token",
    ),
    Contender(
        name="prior",
        label="prior without gate",
        router="switch",
        strength=3.0,
        gate=False,
        third={"id_length": 2},
        kind="control",
        doc="Switch whose logits are the token prior alone",
    ),
    Contender(
        name="switch-prior",
        label="Switch + prior",
        router="switch",
        strength=3.0,
        third={"id_length": 2},
        kind="control",
        doc="Switch with the token prior",
    ),
    Contender(
        name="default",
        label="Skip IW, defaults",
        router="skip-iw",
        third={"learning_rate": 0.002},
        kind="ours",
        doc="`MoE` and `Surrogate` with nothing set: no token ids, a moving average as baseline",
    ),
    Contender(
        name="skip-iw",
        label="Skip IW",
        router="skip-iw",
        options={"loss": "gated-reinforce"},
        third={"conditional_entropy": 0.05},
        kind="ours",
        doc="our recipe without token ids: draws within the capacity, gated with the score function",
    ),
    Contender(
        name="skip-iw-gates",
        label="Skip IW, gates alone",
        router="skip-iw",
        options={"loss": "gating"},
        third={"conditional_entropy": 0.05},
        kind="ours",
        doc="the same without the score function: the router learns through its gates, as Switch does",
    ),
    Contender(
        name="gm-iw-mix",
        label="GM IW mix",
        router="gm-iw-mix",
        options={"loss": "gated-reinforce", "capacity_factor": 1.0, "eps": 0.02},
        third={"conditional_entropy": 0.05},
        kind="ours",
        doc="the same with exactly balanced draws",
    ),
    Contender(
        name="sample-prior",
        label="sample + prior",
        router="sample",
        options={"loss": "gated-reinforce"},
        strength=10.0,
        third={"id_length": 2},
        kind="ours",
        doc="independent draws without a capacity, gated with the score function",
    ),
    Contender(
        name="skip-iw-prior",
        label="Skip IW + prior",
        router="skip-iw",
        options={"loss": "gated-reinforce"},
        strength=10.0,
        third={"id_length": 2},
        kind="ours",
        doc="our recipe: draws within the capacity, gated with the score function",
    ),
    Contender(
        name="gm-iw-mix-prior",
        label="GM IW mix + prior",
        router="gm-iw-mix",
        options={"loss": "gated-reinforce", "capacity_factor": 1.0, "eps": 0.02},
        strength=6.0,
        third={"id_length": 2},
        kind="ours",
        doc="our recipe with exactly balanced draws: every expert is full, nothing is dropped",
    ),
)

CONTENDERS: MappingProxyType[str, Contender] = MappingProxyType({row.name: row for row in _TABLE})
"""The contenders by name."""


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
    steps: int = 2500  # of AdamW
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

    def total_steps(self, *, tuned: bool = False) -> int:
        """Counts the training steps of the whole comparison, or of what is left where the settings are chosen."""
        return self.steps * (len(self.contenders) * self.seeds + (0 if tuned else len(self.tuning_runs())))

    def describe(self) -> dict[str, Any]:
        """Lists the fields and their values, as JSON knows them."""
        return {**asdict(self), "contenders": list(self.contenders)}


def quick_language_models() -> LanguageModels:
    """The same comparison in small: two seeds, a tiny model, 20 steps."""
    return LanguageModels(
        seeds=2,
        steps=20,
        batch_size=4,
        context=16,
        dim=16,
        hidden_dim=16,
        validation_pieces=8,
        test_pieces=8,
    )
