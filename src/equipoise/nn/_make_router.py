# SPDX-License-Identifier: Apache-2.0
"""`make_router`, which builds all routers, and the checks that involve several options."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeGuard, Unpack, cast

import torch

from equipoise._core import check_capacity_factor
from equipoise.estimators import Strategy
from equipoise.nn._named_router import NamedRouter
from equipoise.nn._router import Router
from equipoise.nn._router_checks import (
    check_auto,
    check_loss_weight,
    check_mixes,
    check_no_limit,
    check_not_inert,
    check_priceable,
    check_router_size,
    check_rule,
    check_target,
    check_token_prior,
    check_unused,
    check_upstream,
    check_weighable,
)
from equipoise.nn._routers import ROUTERS, find_router
from equipoise.nn._rules import RoutingRule, rule_traits
from equipoise.nn._schedules import Schedule
from equipoise.nn._token_prior import TokenPrior


class RoutingOptions(TypedDict, total=False):
    """Options of a router other than its sizes and its capacity. `MoE` and `make_router` take all of them.

    Attributes:
        eval_capacity_factor: the capacity factor in evaluation, for every router; None, the default: no limit.
        evaluation: "argmax": each row takes its most probable expert (`topk`, `hash`, `loss-free`, `priced` and `dense`
            do what they do in training). "priced": the largest logit minus a running average of the exact prices, which
            stays near balance and needs no batch. None, the default: "priced" for `base`, "argmax" for the others.
            `router.evaluation` may be changed at any time.
        loss: for strategies: how the router learns, see `SamplingRule`: "reinforce", the paper's, by the score
            function; "gating", through its gate, which multiplies the outputs; "gated-reinforce", the default, by both.
            Routers that are not strategies are gated.
        temperature: for strategies, 1 by default: a number; a function of the number of updates so far, such as
            `LinearSchedule`; or "auto", which adapts it to past batches so that the effective sample size stays above a
            target.
        eps: for strategies that mix: the mixture weight, in [0, 1); "auto", as for the temperature; None, the default:
            0.2.
        solves: for strategies that average: the number of solves; None, the default: 8.
        target_sample_size: for "auto": the target for the effective sample size, as a fraction of the rows, 0.5 by
            default.
        sinkhorn_first: for strategies: balance the proposal in expectation before sampling (the first expert's, of
            several). False by default.
        importance: for strategies: whether p/q is part of the weights. True by default.
        upstream: for strategies: whether the score function also trains the layers before the router. False, the
            default: its gradient ends at the router's own parameters, and everything before them learns from the losses
            alone, with the experts that were drawn held fixed. True: the gradient of the whole model, the paper's,
            which adds the score function's variance to every layer before the router. For logits of your own gate see
            `Router.route`.
        balance_loss: weight of the balance loss; None, the default: the router's.
        marginal_entropy: weight of the marginal-entropy loss; None, the default: the router's. The paper's setting: 0.
        conditional_entropy: weight of the conditional-entropy loss, which rewards certainty. None, the default: 0.03
            for strategies that have a gate of their own, one expert a row, and no token prior; proportionally less if
            the marginal-entropy loss has less weight than its default. 0 for all other routers.
        z_loss: weight of the z-loss, 0 by default.
        rate: for `loss-free`: how far the bias moves after each step, in logit units, 0.001 by default. Short runs need
            more.
        seed: for `hash`: picks the hash function, 0 by default. Give each layer its own seed: tokens that share an
            expert in one layer then rarely share one in the next. (A token prior has a seed too, see `TokenPrior`.)
        token_prior: a `TokenPrior`, or the size of the vocabulary: a learnt table by token id that is added to the
            logits and starts at a hash. The layer then needs `token_ids`. None, the default: no table.

    Example:
        >>> import equipoise as eq
        >>> moe = eq.nn.MoE(16, 4, router="skip-iw", temperature=eq.nn.LinearSchedule(2.0, 1.0, steps=100), z_loss=1e-3)
    """

    eval_capacity_factor: float | None
    evaluation: str | None
    loss: str
    temperature: float | str | Schedule
    eps: float | str | None
    solves: int | None
    target_sample_size: float
    sinkhorn_first: bool
    importance: bool
    upstream: bool
    balance_loss: float | None
    marginal_entropy: float | None
    conditional_entropy: float | None
    z_loss: float
    rate: float
    seed: int
    token_prior: TokenPrior | int | None


# What a router may have no use for, which is then an error.
_OF_RULES: dict[str, Any] = {
    "top_k": 1,
    "loss": "gated-reinforce",
    "sinkhorn_first": False,
    "importance": True,
    "temperature": 1.0,
    "eps": None,
    "solves": None,
    "target_sample_size": 0.5,
    "upstream": False,
    "rate": 1e-3,
    "seed": 0,
}
# Weights of losses: the loss, and the default, where None is the router's own.
_OF_LOSSES: dict[str, tuple[str, float | None]] = {
    "balance_loss": ("load-balance", None),
    "marginal_entropy": ("marginal-entropy", None),
    "conditional_entropy": ("conditional-entropy", None),
    "z_loss": ("z", 0.0),
}


def make_router(
    name: str | Strategy | RoutingRule | Router,
    dim: int | None,
    num_experts: int,
    *,
    capacity_factor: float | None = 1.25,
    top_k: int = 1,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **routing: Unpack[RoutingOptions],
) -> Router:
    """Builds a router from a name, a strategy or a rule. `MoE` builds its router in the same way.

    Args:
        name: one of `ROUTERS` or "package.module:name" of a strategy; a strategy, a routing rule, or a `Router`, which
            is returned as it is if its sizes fit, and takes no options here.
        dim: features of a row; None: a router without a gate, see `Router.route`.
        num_experts: E.
        capacity_factor: in training an expert takes at most K * ceil(capacity_factor * T / E) of T rows; None: no
            limit. It has no effect on routers without a capacity.
        top_k: K, for `topk`, `base`, `loss-free`, `quantile` and `priced`, and for every strategy, which then draws K
            different experts a row, see `SamplingRule`.
        device: the device of parameters and buffers.
        dtype: the dtype of the gate.
        routing: all other options, see `RoutingOptions`. An option that the router does not use is an error.

    Returns:
        The router.

    Raises:
        TypeError: no router has an option of this name.

    Example:
        >>> router = make_router("gm-iw-mix", 8, 4, capacity_factor=1.0, eps=0.1)
        >>> router(torch.randn(12, 8)).stats.load.tolist()
        [3, 3, 3, 3]
    """
    check_known_options(routing, make_router)
    options: dict[str, Any] = {"top_k": top_k, **routing}
    if isinstance(name, Router):
        return _unchanged(name, dim, num_experts, options)
    of_rule = {option: options.get(option, default) for option, default in _OF_RULES.items()}
    for option in ("temperature", "eps"):
        check_auto(option, of_rule[option])
    chosen = "auto" in (of_rule["temperature"], of_rule["eps"])
    check_target(of_rule["target_sample_size"], _OF_RULES["target_sample_size"], chosen)
    if isinstance(name, str) or _is_strategy(name):
        row = find_router(name)
        rule = _make_rule(row, num_experts, device, of_rule)
        _check_named(row, rule, capacity_factor, options)
    else:
        row, rule = None, cast(RoutingRule, name)
        _check_own_rule(rule, of_rule)
    return Router(
        dim,
        num_experts,
        rule,
        capacity_factor=capacity_factor,
        eval_capacity_factor=options.get("eval_capacity_factor"),
        evaluation=options.get("evaluation") or ("argmax" if row is None else row.evaluation),
        temperature=of_rule["temperature"],
        eps=of_rule["eps"] if row is None or of_rule["eps"] == "auto" else None,  # a number is in the rule
        target_sample_size=of_rule["target_sample_size"],
        upstream=of_rule["upstream"],
        loss_weights=_complete_weights(row, num_experts, options, unaided=dim is not None and top_k == 1),
        token_prior=options.get("token_prior"),
        device=device,
        dtype=dtype,
    )


def check_known_options(given: Mapping[str, object], function: Callable[..., object]) -> None:
    """Requires that a function which collects routing options knows every option.

    Args:
        given: what it collected.
        function: whose keywords are known too.

    Raises:
        TypeError: an option is not known; the message lists those that are.
    """
    unknown = [name for name in given if name not in RoutingOptions.__annotations__]
    if unknown:
        parameters = inspect.signature(function).parameters.values()
        own = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        known = [*own, *RoutingOptions.__annotations__]
        near = difflib.get_close_matches(unknown[0], known, 1)
        remedy = f"did you mean {near[0]}?" if near else "use one of these"
        raise TypeError(f"options must be among {', '.join(known)}, got {unknown[0]!r}: {remedy}")


def _is_strategy(x: object) -> TypeGuard[Strategy]:
    """Tells a strategy, which draws, from a rule, which is called; what it lacks to be one is found out later."""
    return hasattr(x, "draw") and hasattr(x, "draw_noise")


def _unchanged(router: Router, dim: int | None, num_experts: int, options: Mapping[str, Any]) -> Router:
    """Returns a router of the right sizes, for which no options were given."""
    check_router_size(router.dim, router.num_experts, dim, num_experts)
    for name, value in options.items():
        if name != "top_k" or value != _OF_RULES["top_k"]:
            raise ValueError(
                f"{name} must be left out with a Router, which has options of its own, got {value!r}: give it to "
                "make_router, or to Router"
            )
    return router


def _make_rule(
    row: NamedRouter, num_experts: int, device: torch.device | str | None, options: Mapping[str, Any]
) -> RoutingRule:
    """Builds the rule of a row, requiring that it has a use for what is not at its default."""
    _check_used(repr(row.name), row.options, options)
    check_upstream(options["upstream"], options["loss"])
    if "importance" in row.options:
        check_weighable(options["temperature"], options["eps"], options["importance"])
    return row.make(num_experts, device, **{name: options[name] for name in row.options})


def _check_named(
    row: NamedRouter, rule: RoutingRule, capacity_factor: float | None, options: Mapping[str, Any]
) -> None:
    """Checks what depends on which router it is."""
    holds_all = row.name if rule_traits(rule).holds_all else None
    check_capacity_factor("capacity_factor", capacity_factor, holds_all=holds_all)
    check_no_limit("eval_capacity_factor", options.get("eval_capacity_factor"), row.name == "dense")
    check_priceable(options.get("evaluation"), row.name, row.inert)
    check_token_prior(row.name, options.get("token_prior"), row.inert)


def _check_own_rule(rule: RoutingRule, options: Mapping[str, Any]) -> None:
    """Requires that a rule of the user's own is one, and has a use for what is not at its default."""
    check_rule(rule)
    mixes = rule_traits(rule).mixes
    used = ("temperature", "target_sample_size", "upstream", *(["eps"] if mixes else []))
    _check_used("a rule of your own", used, options)
    check_mixes(options["eps"], mixes)


def _check_used(router: str, used: tuple[str, ...], options: Mapping[str, Any]) -> None:
    """Requires the default of every option that the router has no use for."""
    for name, default in _OF_RULES.items():
        # Peers are gated, so saying so is no mistake; the score function would be one that nobody hears of.
        if name not in used and not (name == "loss" and options[name] == "gating"):
            users = [row.name for row in ROUTERS.values() if name in row.options]
            check_unused(router, name, options[name], default, users)


def _complete_weights(
    row: NamedRouter | None, num_experts: int, options: Mapping[str, Any], *, unaided: bool
) -> dict[str, float]:
    """Takes the recipe's weights for those that are None; returns the ones that are not 0, by the name of the loss."""
    given = {name: options.get(name, default) for name, (_, default) in _OF_LOSSES.items()}
    for name, weight in given.items():
        if weight is not None:
            check_loss_weight(name, weight)
    inert = "there is one expert" if num_experts == 1 else row.inert if row is not None else None
    if inert is not None:
        for name, weight in given.items():
            check_not_inert(name, weight, inert)
        return {}
    weights = {name: getattr(row, name, 0.0) if weight is None else weight for name, weight in given.items()}
    if given["conditional_entropy"] is None and row is not None and row.conditional_entropy > 0:
        # Certainty alone makes a router collapse: there is less of it where its counterpart has less weight than usual.
        unaided = unaided and options.get("token_prior") is None
        share = min(1.0, weights["marginal_entropy"] / row.marginal_entropy) if unaided else 0.0
        weights["conditional_entropy"] = share * row.conditional_entropy
    return {_OF_LOSSES[name][0]: weight for name, weight in weights.items() if weight != 0}
