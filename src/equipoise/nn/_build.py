# SPDX-License-Identifier: Apache-2.0
"""From the arguments of `MoE` to its `Router`, with the checks that need several of them at once."""

from collections.abc import Mapping
from typing import Any

import torch

from equipoise._core import (
    check_auto,
    check_capacity_factor,
    check_mixes,
    check_no_limit,
    check_not_inert,
    check_priceable,
    check_router_size,
    check_target,
    check_unused,
    check_weighable,
)
from equipoise.nn._router import Router
from equipoise.nn._routers import ROUTERS, NamedRouter, find_router
from equipoise.nn._rules import RoutingRule, rule_traits

_DEFAULTS: dict[str, Any] = {
    "top_k": 1,
    "loss": "reinforce",
    "sinkhorn_first": False,
    "importance": True,
    "temperature": 1.0,
    "eps": None,
    "solves": None,
    "target_sample_size": 0.5,
}


def build_router(
    router: str | RoutingRule | Router,
    dim: int,
    num_experts: int,
    *,
    capacity_factor: float | None,
    eval_capacity_factor: float | None,
    evaluation: str,
    loss_weights: Mapping[str, float | None],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    options: Mapping[str, Any],
) -> Router:
    """Builds the router of a layer.

    Args:
        router: a name, a rule, or a router, which is returned as it is if its sizes fit.
        dim: features of a row.
        num_experts: E.
        capacity_factor: in training.
        eval_capacity_factor: in evaluation.
        evaluation: how to evaluate.
        loss_weights: balance_loss, marginal_entropy and z_loss; None: the router's recipe.
        device: of parameters and buffers.
        dtype: of the gate.
        options: top_k, loss, sinkhorn_first, importance, temperature, eps, solves and target_sample_size.

    Returns:
        The router.
    """
    for name in ("temperature", "eps"):
        check_auto(name, options[name])
    chosen = "auto" in (options["temperature"], options["eps"])
    check_target(options["target_sample_size"], _DEFAULTS["target_sample_size"], chosen)
    if isinstance(router, Router):
        check_router_size(router.dim, router.num_experts, dim, num_experts)
        return router
    if isinstance(router, str):
        row = find_router(router)
        rule = _make_rule(row, num_experts, device, options)
        check_capacity_factor("capacity_factor", capacity_factor, holds_all=_holds_all(row.name, rule))
        check_no_limit("eval_capacity_factor", eval_capacity_factor, row.name == "dense")
        check_priceable(evaluation, row.name, row.inert)
    else:
        row, rule = None, router
        mixes = rule_traits(rule).mixes
        used = ("temperature", "target_sample_size", *(["eps"] if mixes else []))
        _check_options("a rule of your own", used, options)
        check_mixes(options["eps"], mixes)
    return Router(
        dim,
        num_experts,
        rule,
        capacity_factor=capacity_factor,
        eval_capacity_factor=eval_capacity_factor,
        evaluation=evaluation,
        temperature=options["temperature"],
        eps=options["eps"] if row is None or options["eps"] == "auto" else None,  # a number is in the rule
        target_sample_size=options["target_sample_size"],
        loss_weights=_complete_weights(row, num_experts, loss_weights),
        device=device,
        dtype=dtype,
    )


def _holds_all(router: str, rule: RoutingRule) -> str | None:
    """Returns the router's name if its capacity must hold every row."""
    return router if rule_traits(rule).holds_all else None


def _make_rule(
    row: NamedRouter, num_experts: int, device: torch.device | str | None, options: Mapping[str, Any]
) -> RoutingRule:
    """Builds the rule of a row, requiring that it has a use for what is not at its default."""
    _check_options(repr(row.name), row.options, options)
    if "importance" in row.options:
        check_weighable(options["temperature"], options["eps"], options["importance"])
    return row.make(num_experts, device, **{name: options[name] for name in row.options})


def _check_options(router: str, used: tuple[str, ...], options: Mapping[str, Any]) -> None:
    """Requires the default of every option that the router has no use for."""
    for name, default in _DEFAULTS.items():
        # Peers are gated, so saying so is no mistake; the score function would be one that nobody hears of.
        if name not in used and not (name == "loss" and options[name] == "gating"):
            users = [row.name for row in ROUTERS.values() if name in row.options]
            check_unused(router, name, options[name], default, users)


def _complete_weights(row: NamedRouter | None, num_experts: int, given: Mapping[str, float | None]) -> dict[str, float]:
    """Takes the recipe's weights for those that are None; returns the ones that are not 0, by the name of the loss."""
    inert = "there is one expert" if num_experts == 1 else row.inert if row is not None else None
    if inert is not None:
        for name, weight in given.items():
            check_not_inert(name, weight, inert)
        return {}
    recipe = {"balance_loss": row.balance_loss, "marginal_entropy": row.marginal_entropy} if row is not None else {}
    names = {"balance_loss": "load-balance", "marginal_entropy": "marginal-entropy", "z_loss": "z"}
    weights = {names[name]: recipe.get(name, 0.0) if w is None else w for name, w in given.items()}
    return {name: weight for name, weight in weights.items() if weight != 0}
