# SPDX-License-Identifier: Apache-2.0
"""Checks of what layers and routers are built from and called with."""

import math
from collections.abc import Sequence
from typing import Any, SupportsFloat

import torch
from torch import Tensor


def check_top_k(top_k: int, num_experts: int) -> None:
    """Requires no more experts a row than there are."""
    if top_k > num_experts:
        raise ValueError(
            f"top_k must be at most num_experts = {num_experts}, got {top_k}: a row's experts differ from each other"
        )


def check_unused(router: str, name: str, value: Any, default: Any, users: Sequence[str]) -> None:
    """Requires the default of an option that a router has no use for."""
    if value != default:
        raise ValueError(
            f"{name} must be left at {default!r} with router {router}, which does not use it, got {value!r}: only "
            f"{', '.join(users)} do"
        )


def check_not_inert(name: str, weight: float | None, reason: str) -> None:
    """Requires that a balance loss can move the router."""
    if weight:
        raise ValueError(f"{name} must be 0 here, got {weight}: it would be inert, because {reason}; leave it out")


def check_loss_weight(name: str, weight: Any) -> None:
    """Requires a finite number of at least 0."""
    if isinstance(weight, bool | str | bytes) or not isinstance(weight, SupportsFloat) or not 0 <= weight < math.inf:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(
            f"{name} must be a finite number >= 0, got {weight!r}: it is the weight of a loss that is added; 0 leaves "
            "the loss out"
        )


def check_rule(rule: object) -> None:
    """Requires something to call with logits: an object, not a class to make one of."""
    if not callable(rule) or isinstance(rule, type):
        raise ValueError(
            f"router must be a name, a strategy, a Router, or a routing rule to call with (logits, request), got "
            f"{rule!r}: {'make an object of this class' if isinstance(rule, type) else 'leave it out for the default'}"
        )


def check_has_gate(dim: int | None) -> None:
    """Requires a gate."""
    if dim is None:
        raise ValueError("dim must be a number where a router is called with rows, got None: call route(logits)")


def check_logits(logits: Tensor, shape: Sequence[int], num_experts: int) -> None:
    """Requires a number for each row and expert."""
    if not logits.is_floating_point() or list(logits.shape) != [math.prod(shape), num_experts]:
        raise ValueError(
            f"logits must be floating point of shape [{math.prod(shape)}, {num_experts}] (rows x experts), got "
            f"{logits.dtype} of shape {list(logits.shape)}: flatten the leading dimensions, and pass them as shape"
        )


def check_input_dim(x: Tensor, dim: int | None) -> None:
    """Requires floating-point [..., dim]."""
    if not x.is_floating_point():
        raise ValueError(f"x must be floating point, got {x.dtype}: embed tokens first, or convert with x.float()")
    if x.ndim < 1 or x.shape[-1] != dim:
        raise ValueError(
            f"x must have shape [..., {dim}], got {list(x.shape)}: the layer was built with dim={dim}; put the "
            "features last, or build it with the right dim"
        )


def check_rows_like(name: str, value: Tensor | None, shape: Sequence[int]) -> None:
    """Requires None or integers of the leading shape of x."""
    if value is None:
        return
    if value.is_floating_point() or list(value.shape) != list(shape):
        raise ValueError(
            f"{name} must be integers of shape {list(shape)} (one for each row of x), got {value.dtype} of shape "
            f"{list(value.shape)}: pass the ids that x was embedded from"
        )


def check_choice(indices: Tensor, scores: Tensor, rows: int) -> None:
    """Requires that a rule chose K experts, with as many factors, for each row."""
    if indices.ndim != 2 or indices.shape[0] != rows or indices.shape != scores.shape:
        raise ValueError(
            f"the decision of a routing rule must have indices and scores of shape [{rows}, K], got "
            f"{list(indices.shape)} and {list(scores.shape)}: unsqueeze(1) if each row has one expert"
        )


def check_routing(got: object, routing: bool) -> None:
    """Requires that a rule returned the record of its decision."""
    if not routing:
        raise ValueError(
            f"a routing rule must return request.route(indices, scores), got {type(got).__name__}: "
            "see equipoise.nn.RouteRequest.route"
        )


def check_no_limit(name: str, factor: float | None, all_experts: bool) -> None:
    """Requires None where every expert takes every row."""
    if all_experts and factor is not None:
        raise ValueError(f"{name} must be None with router 'dense', got {factor}: every expert takes every row")


def check_router_size(dim: int | None, num_experts: int, layer_dim: int | None, layer_experts: int) -> None:
    """Requires a router of the layer's sizes."""
    if (dim, num_experts) != (layer_dim, layer_experts):
        raise ValueError(
            f"router must be of the layer's sizes, dim={layer_dim} and num_experts={layer_experts}, got dim={dim} and "
            f"num_experts={num_experts}: build it with the same"
        )


def check_weighable(temperature: Any, eps: Any, importance: bool) -> None:
    """Requires noise where importance weights are wanted, and those where they decide about the proposal."""
    if not importance and "auto" in (temperature, eps):
        raise ValueError(
            f"temperature and eps must be numbers without importance weights, got {temperature!r} and {eps!r}: 'auto' "
            "goes by those weights; set importance=True"
        )
    if importance and not callable(temperature) and temperature == 0:
        raise ValueError(
            "temperature must be > 0 with importance weights, got 0, where nothing is random: raise it, or set "
            "importance=False"
        )


def check_share(name: str, value: float) -> None:
    """Requires 0 < value < 1."""
    if not 0 < value < 1:
        raise ValueError(f"{name} must be in (0, 1), a fraction of the rows, got {value}: 0.5 is usual")


def check_above_one(name: str, value: float) -> None:
    """Requires a finite number above 1."""
    if not 1 < value < float("inf"):
        raise ValueError(f"{name} must be finite and > 1, got {value}: the factor of one move; 1.2 is usual")


def check_auto(name: str, value: Any) -> None:
    """Requires a word to be the one that is understood."""
    if isinstance(value, str) and value != "auto":
        raise ValueError(f"{name} must be a number or 'auto', got {value!r}: 'auto' goes by what past batches showed")


def check_mixes(eps: Any, mixes: bool) -> None:
    """Requires None, or "auto" for a rule that mixes, of a router that is given its rule."""
    if eps is not None and not (mixes and eps == "auto"):
        raise ValueError(
            f"eps must be None, or 'auto' where the rule mixes, with a rule of your own, got {eps!r}: set a fixed one "
            "by SamplingRule(strategy.with_options(eps=...))"
        )


def check_target(value: float, default: float, chosen: bool) -> None:
    """Requires the default where nothing goes by the target."""
    if value != default and not chosen:
        raise ValueError(
            f"target_sample_size must be left at {default} without temperature='auto' or eps='auto', got {value}: "
            "nothing goes by it"
        )


def check_priceable(evaluation: str | None, router: str, inert: str | None) -> None:
    """Requires a router that learns logits, where they decide in evaluation."""
    if evaluation == "priced" and inert is not None:
        raise ValueError(
            f"evaluation must be 'argmax' with router {router!r}, got 'priced': its logits mean nothing, since {inert}"
        )


def check_strength(strength: float) -> None:
    """Requires a finite number of at least 0."""
    if not 0 <= strength < float("inf"):
        raise ValueError(
            f"strength must be finite and >= 0, got {strength}: the start of the table at a token's hashed expert, in "
            "logit units; 3 to 6 are usual"
        )


def check_token_prior(router: str, prior: Any, inert: str | None) -> None:
    """Requires a router that looks at its logits, where a prior is added to them."""
    if prior is not None and inert is not None:
        raise ValueError(f"token_prior must be None with router {router!r}, got {prior!r}: {inert}")


def check_token_ids_given(given: bool, vocab_size: int) -> None:
    """Requires token ids where the router has a table of them."""
    if not given:
        raise ValueError(
            f"token_ids must be given to a router with token_prior (vocab_size={vocab_size}), got None: call the layer "
            "with token_ids=, the ids that x was embedded from"
        )


def check_token_ids(ids: Tensor, vocab_size: int) -> None:
    """Requires ids of the table, where looking at them is free: on other devices the look-up itself complains."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or not ids.numel():
        return
    least, largest = (int(x) for x in ids.aminmax())
    if least < 0 or largest >= vocab_size:
        raise ValueError(
            f"token_ids must be in [0, {vocab_size}), the vocab_size of token_prior, got {least} to {largest}: build "
            "the router with the size of the vocabulary, and mask padding by mask="
        )


def check_same_logits(same: bool) -> None:
    """Requires that a gate of the user's own returns the same logits for the same rows."""
    if not same:
        raise ValueError(
            "logits must return the same for the same rows, got two results of one forward pass: add noise to the rows "
            "before the router, or set upstream=True, which calls it once"
        )


def check_upstream(upstream: bool, loss: str) -> None:
    """Requires that a router which is to train what is before it by the score function has one."""
    if upstream and loss == "gating":
        raise ValueError(
            'upstream must be False with loss="gating", which has no score function, got True: leave it out, or use '
            'loss="gated-reinforce"'
        )
