# SPDX-License-Identifier: Apache-2.0
"""The routers by name: a table of rules, with the options that each understands and the losses that it needs.

To add a router to the table, write its rule and add one row. Strategies are in it by themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from equipoise.estimators import STRATEGIES, Strategy, StrategyTraits, get_strategy, read_traits
from equipoise.nn._bias_rules import LossFree, Priced
from equipoise.nn._peer_rules import Base, Dense, Hash, SinkhornBase, TopK
from equipoise.nn._rules import RoutingRule
from equipoise.nn._sampling_rule import SamplingRule

_SAMPLING = ("top_k", "loss", "sinkhorn_first", "importance", "temperature", "target_sample_size")


@dataclass(frozen=True, kw_only=True)
class NamedRouter:
    """One row of the table.

    Attributes:
        name: what `MoE(router=...)` takes.
        make: builds the rule, from the number of experts, a device, and the options that it uses.
        options: those options, of top_k, loss, sinkhorn_first, importance, temperature, eps, solves and
            target_sample_size.
        balance_loss: the weight of the balance loss, unless the user sets it.
        marginal_entropy: the weight of the marginal-entropy loss, unless the user sets it.
        inert: why balance losses cannot move this router; None if they can.
        doc: one line.
    """

    name: str
    make: Callable[..., RoutingRule] = field(repr=False)
    options: tuple[str, ...] = ()
    balance_loss: float = 0.0
    marginal_entropy: float = 0.0
    inert: str | None = None
    doc: str


def _strategy(
    strategy: Any,
    _num_experts: int,
    _device: Any,
    *,
    temperature: Any,
    target_sample_size: float,
    eps: float | str | None = None,
    solves: int | None = None,
    **how: Any,
) -> SamplingRule:
    """Builds the rule of a strategy; the router keeps the temperature, and an eps that chooses itself."""
    del temperature, target_sample_size
    changed = {name: value for name, value in (("eps", eps), ("solves", solves)) if value not in (None, "auto")}
    return SamplingRule(strategy.with_options(**changed) if changed else strategy, **how)


def _strategy_row(strategy: Strategy) -> NamedRouter:
    """Makes the row of a strategy. The bonus of 0.1 is part of the recipe: the objective does not balance itself."""
    traits = read_traits(StrategyTraits, strategy)
    own = {"eps": traits.mixes, "solves": traits.averages}
    return NamedRouter(
        name=strategy.name,
        make=partial(_strategy, strategy),
        options=(*_SAMPLING, *(name for name, used in own.items() if used)),
        marginal_entropy=0.1,
        doc=f"the paper's {strategy.label}" if traits.paper else strategy.label,
    )


def _plain(kind: Callable[..., RoutingRule], _num_experts: int, _device: Any, **options: Any) -> RoutingRule:
    """Builds a rule without state."""
    return kind(**options)


def _with_buffers(kind: Callable[..., RoutingRule], num_experts: int, device: Any, **options: Any) -> RoutingRule:
    """Builds a rule with one number for each expert."""
    return kind(num_experts, device=device, **options)


_TABLE = (
    *(_strategy_row(strategy) for strategy in STRATEGIES.values()),
    NamedRouter(
        name="switch",
        make=partial(_plain, partial(TopK, 1, limited=True)),
        balance_loss=0.01,
        doc="the most probable expert, gated; rows beyond the capacity are dropped",
    ),
    NamedRouter(
        name="topk",
        make=partial(_plain, TopK),
        options=("top_k",),
        balance_loss=0.01,
        doc="the K most probable experts, gated by their renormalised probabilities; no capacity",
    ),
    NamedRouter(
        name="base",
        make=partial(_plain, Base),
        doc="the exact balanced assignment of the logits, gated",
    ),
    NamedRouter(
        name="s-base",
        make=partial(_plain, SinkhornBase),
        doc="the largest probability after balancing in expectation, gated",
    ),
    NamedRouter(
        name="hash",
        make=partial(_plain, Hash),
        inert="a hash routes without looking at the router's probabilities",
        doc="a fixed hash of the token ids if given, else of the position; not gated",
    ),
    NamedRouter(
        name="loss-free",
        make=partial(_with_buffers, LossFree),
        options=("top_k",),
        doc="logits plus a bias that is moved towards balance after each step, gated; no capacity",
    ),
    NamedRouter(
        name="priced",
        make=partial(_with_buffers, Priced),
        options=("top_k",),
        doc="logits minus a running average of the exact prices of past batches, gated; no capacity",
    ),
    NamedRouter(
        name="dense",
        make=partial(_plain, Dense),
        doc="all experts, averaged with the router's probabilities; no capacity",
    ),
)

ROUTERS: MappingProxyType[str, NamedRouter] = MappingProxyType({row.name: row for row in _TABLE})
"""The routers by name: the strategies, then those to compare with."""


def find_router(name: str) -> NamedRouter:
    """Finds a row of the table, or makes one of a strategy of the user's own.

    Args:
        name: one of `ROUTERS`, or "package.module:name" of a strategy.

    Returns:
        The row.

    Example:
        >>> find_router("switch").balance_loss
        0.01
    """
    if name in ROUTERS:
        return ROUTERS[name]
    if ":" in name:
        return _strategy_row(get_strategy(name))
    raise ValueError(
        f"router must be one of {', '.join(ROUTERS)}, package.module:name for a strategy of your own, a routing rule "
        f"or a Router, got {name!r}"
    )
