# SPDX-License-Identifier: Apache-2.0
"""`swap_routers` and `restore_routers`."""

import copy
import fnmatch
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from equipoise.estimators import Strategy
from equipoise.integrations.transformers._contract import CORRECTION_BIAS, FoundLayer, find_layers, find_scoring
from equipoise.integrations.transformers._layer import LAYER, ROUTER, Layer, RoutedBlock, RoutedGate, Rows, routed_class
from equipoise.nn import (
    ROUTERS,
    Router,
    RoutingOptions,
    RoutingRule,
    RoutingSource,
    RoutingWarning,
    TokenPrior,
    make_router,
)

_HOOK = "equipoise_rows"


def swap_routers(
    model: nn.Module,
    router: str | Strategy | RoutingRule,
    *,
    layers: Sequence[int] | str | None = None,
    capacity_factor: float | None = 1.25,
    top_k: int | None = None,
    **options: Unpack[RoutingOptions],
) -> list[str]:
    """Replaces the routing of a transformers model's gates by a router of this library, in place.

    Every gate is found by its contract: a module that returns logits, scores and indices, next to stacked experts. It
    keeps its parameters under their names, K, softmax or sigmoid scores, normalisation, scaling, correction bias and
    expert groups; shared experts and everything else in the block stay as they are. Optimisers that hold the
    parameters stay valid. `restore_routers` undoes it.

    How the model's function changes:

    - `topk`, `loss-free`, `quantile`, `priced` at the start, and every gated router in evaluation: it does not change.
    - Learnt prices and biases move the selection, in units of what the gate compares: logits, or, with sigmoid
      scores or a correction bias, scores.
    - Strategies multiply by the gate's own factors. With `loss="reinforce"` they average the K experts: **factors of
      1/K**, times the gate's scaling, in training and evaluation.
    - Strategies sample from the gate's probabilities (affinities that sum to 1); its correction bias and expert groups
      decide in evaluation only.
    - Rows that exceed an expert's capacity get nothing from the experts. Padding, by the model's `attention_mask`,
      takes no expert in training.

    Args:
        model: a transformers model, or any module that holds one.
        router: a name of `equipoise.nn.ROUTERS`, a strategy, or a routing rule, which each layer gets a copy of.
        layers: which layers: numbers of decoder layers, or a pattern of names such as "model.layers.1*"; None: all.
        capacity_factor: see `equipoise.nn.make_router`.
        top_k: K; None: the gate's. For routers that take one expert a row, pass top_k=1 where the gate's K is larger.
        options: see `equipoise.nn.RoutingOptions`. Each layer gets a hash of its own: the seeds of `hash` and of a
            token prior increase by one from layer to layer.

    Returns:
        The names of the layers that were swapped.

    Raises:
        ValueError: no gate is found; a gate computes something unknown; the experts are spread over machines; or
            `layers` names one that does not exist.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = MixtralForCausalLM(MixtralConfig(vocab_size=16, num_key_value_heads=2, **small))
        >>> swap_routers(model, "priced")
        ['model.layers.0.mlp']
        >>> restore_routers(model)
        ['model.layers.0.mlp']
    """
    if isinstance(router, Router):
        raise ValueError("router must be a name, a strategy or a rule, got a Router: every layer needs one of its own")
    found = find_layers(model)
    numbers = {layer.name: number for number, layer in enumerate(found)}
    chosen = _chosen(found, layers)
    made: list[tuple[FoundLayer, Router]] = []
    for layer in chosen:  # all checks before the first change
        _check_local(layer)
        k = layer.top_k if top_k is None else top_k
        _check_takes_k(router, k, given=top_k is not None)
        device = next(layer.gate.parameters()).device
        _check_device(layer, device)
        new = make_router(
            copy.deepcopy(router),
            None,
            layer.num_experts,
            capacity_factor=capacity_factor,
            top_k=k,
            device=device,
            **_with_own_hash(router, options, numbers[layer.name]),
        )
        gate = layer.gate
        new.scoring = gate.router.scoring if isinstance(gate, RoutedGate) else find_scoring(layer)
        made.append((layer, new.train(layer.gate.training)))
    _restore([layer for layer in chosen if isinstance(layer.block, RoutedBlock)], to_native=False)
    rows = _rows_of(model)
    for layer, new in made:
        _install(layer, new, Layer(rows))
    return [layer.name for layer in chosen]


def restore_routers(model: nn.Module) -> list[str]:
    """Puts the native gates back, in place: a plain model again, which saves and loads without equipoise.

    Prices and biases that a router has learnt become the native correction bias where the architecture has one
    (DeepSeek-V3: `e_score_correction_bias`); the function stays as it was in evaluation, with `topk`, `loss-free`,
    `quantile`, `priced` and with strategies of `loss="gating"`, unless `top_k` was changed.

    Args:
        model: as `swap_routers` left it.

    Returns:
        The names of the layers that were restored; empty if none was swapped.

    Warns:
        RoutingWarning: what is lost: prices that the architecture has no place for, factors of 1/K, a token prior, a K
            that is not the gate's.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> from equipoise.integrations.transformers import swap_routers
        >>> small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = MixtralForCausalLM(MixtralConfig(vocab_size=16, num_key_value_heads=2, **small))
        >>> names = swap_routers(model, "topk")
        >>> restore_routers(model)
        ['model.layers.0.mlp']
    """
    layers = [layer for layer in find_layers(model) if isinstance(layer.block, RoutedBlock)]
    _restore(layers, to_native=True)
    handle = model.__dict__.pop(_HOOK, None)
    if handle is not None:
        handle[1].remove()
    return [layer.name for layer in layers]


def _with_own_hash(router: object, options: RoutingOptions, number: int) -> RoutingOptions:
    """Adds the number of a layer to the seeds of its hashes, since a token's hashes should differ between layers."""
    own = options.copy()
    prior = own.get("token_prior")
    if prior is not None:
        prior = TokenPrior(prior) if isinstance(prior, int) else prior
        own["token_prior"] = replace(prior, seed=prior.seed + number)
    if router == "hash":
        own["seed"] = own.get("seed", 0) + number
    return own


def _chosen(found: list[FoundLayer], layers: Sequence[int] | str | None) -> list[FoundLayer]:
    """Returns the layers that were asked for."""
    if layers is None:
        return found
    names = [layer.name for layer in found]
    if isinstance(layers, str):
        chosen = [layer for layer in found if fnmatch.fnmatchcase(layer.name, layers)]
        missing: list[Any] = [] if chosen else [layers]
    else:
        numbers = [{int(part) for part in name.split(".") if part.isdigit()} for name in names]
        chosen = [layer for layer, own in zip(found, numbers, strict=True) if own & set(layers)]
        missing = [number for number in layers if not any(number in own for own in numbers)]
    if missing:
        raise ValueError(
            f"layers must be numbers or a pattern of layers with experts, {', '.join(names)}, got {missing[0]!r}: "
            "leave it out for all of them"
        )
    return chosen


def _rows_of(model: nn.Module) -> Rows:
    """Returns what notes the model's input; registers it at the first swap."""
    if _HOOK not in model.__dict__:
        rows = Rows(model)
        model.__dict__[_HOOK] = rows, model.register_forward_pre_hook(rows, with_kwargs=True)
    return model.__dict__[_HOOK][0]


def _check_local(layer: FoundLayer) -> None:
    """Requires experts that are not spread over machines by transformers."""
    if getattr(layer.experts, "_is_expert_parallel", False) and not isinstance(layer.block, RoutedBlock):
        raise ValueError(
            f"the experts must be whole on every process, got {layer.name!r} with transformers' expert parallelism, "
            "whose exchange has no index for rows without an expert: use equipoise.distributed, or another plan"
        )


def _check_takes_k(router: str | Strategy | RoutingRule, k: int, *, given: bool) -> None:
    """Requires a router for the gate's K, where no K was given: `make_router` would speak of one that nobody wrote."""
    if given or k == 1:
        return
    if isinstance(router, str):
        takes = router not in ROUTERS or "top_k" in ROUTERS[router].options
    else:
        takes = hasattr(router, "draw")  # a strategy
    if not takes:
        name = f"router {router!r}" if isinstance(router, str) else "a rule of your own"
        raise ValueError(
            f"top_k must be left at 1 with {name}, which does not use it, got {k}, since the model has {k} experts a "
            "token: pass top_k=1 to swap_routers, which changes the model, or take a router for several experts, such "
            "as 'topk', 'priced' or 'skip-iw'"
        )


def _check_device(layer: FoundLayer, device: torch.device) -> None:
    """Requires parameters that exist."""
    if device.type == "meta":
        raise ValueError(
            f"model must have its parameters, got {layer.name!r} on the meta device: load or initialise it, then swap"
        )


def _install(layer: FoundLayer, router: Router, shared: Layer) -> None:
    """Makes a block and its gate ours."""
    block, gate, experts = layer.block, layer.gate, layer.experts
    for module in (block, gate, experts):
        module.__dict__[LAYER] = shared
    gate.__dict__["experts_config"] = experts.config
    gate.add_module(ROUTER, router)
    gate.__class__ = routed_class(RoutedGate, type(gate))
    block.__class__ = routed_class(RoutedBlock, type(block))
    experts.__dict__["_is_expert_parallel"] = True  # which only means: index E is "no expert"


def _restore(layers: list[FoundLayer], *, to_native: bool) -> None:
    """Makes blocks and gates native, keeping prices where there is a place for them, and says what is lost."""
    lost: dict[str, list[str]] = {}
    for layer in layers:
        for what in [*_keep_prices(layer), *(_other_losses(layer) if to_native else [])]:
            lost.setdefault(what, []).append(layer.name)
        _uninstall(layer)
    for what, names in lost.items():
        warnings.warn(f"restored gates of {', '.join(names)} have lost {what}", RoutingWarning, stacklevel=3)


def _uninstall(layer: FoundLayer) -> None:
    """Undoes `_install`."""
    block, gate, experts = layer.block, layer.gate, layer.experts
    delattr(gate, ROUTER)
    for module in (block, gate):
        assert isinstance(module, RoutedBlock | RoutedGate)
        object.__setattr__(module, "__class__", module.native)
    for module in (block, gate, experts):
        for name in (LAYER, "experts_config", *(name for name in vars(RoutingSource) if name.startswith("routing_"))):
            module.__dict__.pop(name, None)
    experts.__dict__["_is_expert_parallel"] = False


@torch.no_grad()
def _keep_prices(layer: FoundLayer) -> list[str]:
    """Moves prices into the correction bias; where there is none, returns that they are lost."""
    assert isinstance(layer.gate, RoutedGate)
    prices = _learnt_prices(layer.gate.router)
    bias: Tensor | None = getattr(layer.gate, CORRECTION_BIAS, None)
    if prices is None or not bool((prices != 0).any()):
        return []
    if bias is not None:
        bias -= prices.to(bias)
        return []
    return [
        "the prices they had learnt: the architecture has no correction bias, so rows go to the largest logits, "
        "less evenly"
    ]


def _other_losses(layer: FoundLayer) -> list[str]:
    """Returns what else the native gate has no place for."""
    assert isinstance(layer.gate, RoutedGate)
    router, lost = layer.gate.router, list[str]()
    if router.traits.top_k != layer.top_k:
        lost.append(
            f"their K of {router.traits.top_k}, which was given as top_k: the model goes back to "
            f"num_experts_per_tok={layer.top_k} experts a token and computes something else"
        )
    if not router.traits.gated:
        lost.append("factors of 1/K: native gates multiply outputs by their scores; loss='gating' trains for that")
    if any(True for _ in router.parameters()):
        lost.append("parameters that were added to the gate, such as a token prior")
    return lost


def _learnt_prices(router: Router) -> Tensor | None:
    """Returns what a router subtracts from what it compares in evaluation; None if it has nothing to subtract."""
    if router.average is not None and router.evaluation == "priced":
        return router.average.prices
    rule: Any = router.rule
    if hasattr(rule, "average"):
        return rule.average.prices
    if isinstance(getattr(rule, "bias", None), Tensor):
        return -rule.bias
    prices = getattr(rule, "prices", None)
    return prices if isinstance(prices, Tensor) else None
