# SPDX-License-Identifier: Apache-2.0
"""The contenders of the language-model comparison, as data. To add one, add a row.

Every one is tuned over three settings: two learning rates with its usual options, and a third setting of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

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
