# SPDX-License-Identifier: Apache-2.0
"""A router that has a name: a row of the table. Each row stands in the file of its rule."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from equipoise.nn._rules import RoutingRule


@dataclass(frozen=True, kw_only=True)
class NamedRouter:
    """One row of the table.

    Attributes:
        name: what `MoE(router=...)` takes.
        make: builds the rule, from the number of experts, a device, and the options that it uses.
        options: those options, of top_k, loss, sinkhorn_first, importance, temperature, eps, solves,
            target_sample_size, upstream, rate and seed.
        balance_loss: the weight of the balance loss, unless the user sets it.
        marginal_entropy: the weight of the marginal-entropy loss, unless the user sets it.
        conditional_entropy: the weight of the conditional-entropy loss, unless the user sets it, where nothing else
            tells experts apart at first: the router has a gate of its own, one expert a row, and no token prior.
        evaluation: what it does in evaluation, unless the user sets it.
        inert: why balance losses cannot move this router; None if they can.
        doc: one line.
    """

    name: str
    make: Callable[..., RoutingRule] = field(repr=False)
    options: tuple[str, ...] = ()
    balance_loss: float = 0.0
    marginal_entropy: float = 0.0
    conditional_entropy: float = 0.0
    evaluation: str = "argmax"
    inert: str | None = None
    doc: str


def without_buffers(kind: Callable[..., RoutingRule]) -> Callable[..., RoutingRule]:
    """Returns what builds a rule without state, for `NamedRouter.make`.

    Args:
        kind: builds the rule from its options.

    Returns:
        The same, of the number of experts, a device and the options.
    """
    return partial(_without_buffers, kind)


def with_buffers(kind: Callable[..., RoutingRule]) -> Callable[..., RoutingRule]:
    """Returns what builds a rule with one number for each expert, for `NamedRouter.make`.

    Args:
        kind: builds the rule from the number of experts, `device=` and its options.

    Returns:
        The same, of the number of experts, a device and the options.
    """
    return partial(_with_buffers, kind)


def _without_buffers(kind: Callable[..., RoutingRule], _num_experts: int, _device: Any, **options: Any) -> RoutingRule:
    return kind(**options)


def _with_buffers(kind: Callable[..., RoutingRule], num_experts: int, device: Any, **options: Any) -> RoutingRule:
    return kind(num_experts, device=device, **options)
