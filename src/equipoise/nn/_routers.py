# SPDX-License-Identifier: Apache-2.0
"""The routers by name. Every strategy is one; the others stand in the table at the end of the file of their rule."""

from types import MappingProxyType

from equipoise.estimators import STRATEGIES, Strategy, get_strategy
from equipoise.nn._bias_rules import BIAS_ROUTERS
from equipoise.nn._named_router import NamedRouter
from equipoise.nn._peer_rules import PEER_ROUTERS
from equipoise.nn._sampling_rule import sampling_router

_TABLE = (*(sampling_router(strategy) for strategy in STRATEGIES.values()), *PEER_ROUTERS, *BIAS_ROUTERS)

ROUTERS: MappingProxyType[str, NamedRouter] = MappingProxyType({row.name: row for row in _TABLE})
"""The routers by name: the strategies first, then the routers to compare them with."""


def find_router(name: str | Strategy) -> NamedRouter:
    """Finds a row of the table, or makes one of a strategy.

    Args:
        name: one of `ROUTERS`, "package.module:name" of a strategy, or a strategy itself.

    Returns:
        The row.

    Example:
        >>> find_router("switch").balance_loss
        0.01
    """
    if not isinstance(name, str):
        return sampling_router(name)
    if name in ROUTERS:
        return ROUTERS[name]
    if ":" in name:
        return sampling_router(get_strategy(name))
    raise ValueError(
        f"router must be one of {', '.join(ROUTERS)}, package.module:name for a strategy of your own, a strategy, a "
        f"routing rule or a Router, got {name!r}"
    )
