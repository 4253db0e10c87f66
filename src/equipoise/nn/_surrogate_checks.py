# SPDX-License-Identifier: Apache-2.0
"""Checks of what a training loop hands to the surrogate, and of what it captured."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def check_has_layers(name: str, model: nn.Module, layers: int) -> None:
    """Requires a model with at least one layer that routes."""
    if layers == 0:
        raise ValueError(
            f"{name} must hold at least one equipoise.nn.MoE, got {type(model).__name__} with none at any depth: "
            "put one in, or pass the model that holds it"
        )


def own_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """Finds the torch optimiser whose steps can be told, within wrappers that hold it as `.optimizer`.

    Accelerate's wrapper is an instance of `torch.optim.Optimizer` that never ran its constructor.
    """
    inner = optimizer
    while not (isinstance(inner, torch.optim.Optimizer) and hasattr(inner, "_optimizer_step_post_hooks")):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise ValueError(
                "optimizer must be a torch.optim.Optimizer, or hold one as .optimizer, got "
                f"{type(optimizer).__name__}: pass the torch optimiser, or leave it out and call "
                "routings.update() after each step"
            )
    return inner


def check_routings(kind: str, captured: bool) -> None:
    """Requires what `capture` yields, which knows more than a list of records does."""
    if not captured:
        raise ValueError(
            f"routings must be what equipoise.nn.capture yields, got {kind}: pass `routings` of "
            "`with equipoise.nn.capture(model) as routings` as it is"
        )


def check_captured(count: int) -> None:
    """Requires that a forward pass was captured."""
    if count == 0:
        raise ValueError(
            "routings must hold the Routing of at least one layer, got none: run the model's forward pass inside "
            "`with equipoise.nn.capture(model) as routings`"
        )


def check_first_use(used: bool, what: str) -> None:
    """Requires routings that were not used for this before."""
    if used:
        raise ValueError(
            f"routings must be {what} once, got the same ones again: capture a forward pass of its own for every step"
        )


def check_token_shape(name: str, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Requires one entry for each row of every layer; returns the shape that the rows have in common.

    A tensor fits a layer's leading shape if it has that shape, or if either of the two is flat, with as many entries.
    """
    given = tuple(x.shape)
    for shape in shapes:
        flat = len(shape) == 1 or len(given) == 1
        size = 1
        for length in shape:
            size *= length
        if shape != given and not (flat and size == x.numel()):
            raise ValueError(
                f"{name} must have shape {list(shape)} (one entry for each token that the layer routed), got "
                f"{list(given)}: compute it with reduction='none', and leave out tokens by mask= rather than by slicing"
            )
    return max([given, *shapes], key=len)


def check_same_forward(missing: Sequence[str]) -> None:
    """Requires losses whose graph leads back to every layer that was captured."""
    if missing:
        raise ValueError(
            f"token_losses must come from the forward pass that was captured, got losses that do not depend on the "
            f"output of {', '.join(map(repr, missing))}: compute the losses from the output of the model that ran in "
            "the capture, capture one forward pass at a time, and only the part of the model that the losses use"
        )


def check_graph(name: str, calls: int, compiled: bool) -> None:
    """Requires that the gradient of a router that ran without a graph can be handed to its recomputation."""
    if compiled:
        raise ValueError(
            f"layer {name!r} must run with a graph to train its router, got a compiled layer within a reentrant "
            "checkpoint (or under no_grad): use checkpoint(..., use_reentrant=False)"
        )
    if calls > 1:
        raise ValueError(
            f"layer {name!r} must be called once in a forward pass under reentrant checkpointing (or no_grad), got "
            f"{calls} calls, whose recomputations cannot be told apart: use checkpoint(..., use_reentrant=False)"
        )


def check_balance_graph(name: str, has_graph: bool) -> None:
    """Requires a graph where the gradient of a layer's balance losses is wanted."""
    if not has_graph:
        raise ValueError(
            f"layer {name!r} must run with a graph for the gradient of balance_loss(), got one that ran without (a "
            "reentrant checkpoint, or no_grad): use checkpoint(..., use_reentrant=False), or a Surrogate, which hands "
            "the gradient to the recomputation; to read the value alone, call it under no_grad"
        )


def check_same_routing(indices: Tensor, before: Tensor) -> None:
    """Requires that a recomputation chose the same experts."""
    if not torch.equal(indices, before):
        raise ValueError(
            "recomputation must route as the first forward pass did, got other experts: draw noise from torch's global "
            "stream (no generator=) with preserve_rng_state=True, and update the model after backward"
        )


def check_critic_use(layers: int, credit: str) -> None:
    """Requires one layer, and credit for a token's own loss, where a critic is given."""
    if layers != 1 or credit != "token":
        raise ValueError(
            f"critic must come with one layer and credit 'token', got {layers} layers and credit {credit!r}: "
            "it predicts the loss by a token's expert in one layer; for several, use Readouts(..., critic=True)"
        )


def check_critic_credit(credit: str) -> None:
    """Requires credit for a token's own loss where readouts have critics."""
    if credit != "token":
        raise ValueError(
            f"credit must be 'token' with Readouts(..., critic=True), got {credit!r}: a critic predicts a token's own "
            "loss; build the Readouts without one"
        )


def check_critic_layer(experts: int, score_function: bool) -> None:
    """Requires a layer that draws one expert a token and learns by the score function, where there is a critic."""
    if not score_function or experts != 1:
        got = f"top_k = {experts}" if score_function else "one that learns through its gates"
        raise ValueError(
            f"critic must come with a router that learns by the score function, with one expert a token, got {got}: "
            "leave it out"
        )


def check_critic_graph(grad_enabled: bool) -> None:
    """Requires a graph to add the critic's expectation back to."""
    if not grad_enabled:
        raise ValueError(
            "critic must come with a layer that ran with a graph, got one that ran without (a reentrant checkpoint, or "
            "no_grad): use checkpoint(..., use_reentrant=False)"
        )


def check_per_layer(baselines: int | None, residuals: int | None, layers: int, no_residual: bool) -> None:
    """Requires one baseline for each layer, if they are listed, and then residuals in a list of the same length."""
    if baselines is not None and baselines != layers:
        raise ValueError(
            f"baseline must hold one for each of the {layers} layers that were captured, got {baselines}: list one for "
            "each call of a layer, in order of execution"
        )
    if residuals != baselines and not no_residual:
        wanted = "one for all layers, as baseline is" if baselines is None else f"a list of {baselines}, as baseline is"
        got = "one" if residuals is None else f"a list of {residuals}"
        raise ValueError(f"residual must be {wanted}, got {got}: each ResidualBaseline takes its own, others None")


def check_residual(needed: bool, given: bool) -> None:
    """Requires the residual where the baseline is made of it, and nowhere else."""
    if needed and not given:
        raise ValueError(
            "residual must be given with a ResidualBaseline, got None: pass a function of no arguments that returns "
            "each token's loss without the experts' output"
        )
    if given and not needed:
        raise ValueError(
            "residual must come with a ResidualBaseline, got another baseline: Surrogate(baseline=ResidualBaseline())"
        )


def check_targets(given: bool, readouts: bool) -> None:
    """Requires that targets come with readouts, which alone use them."""
    if given and not readouts:
        raise ValueError(
            "targets must come with Readouts, got another baseline: build Surrogate(Readouts(model, classes)), or "
            "leave targets out"
        )


def check_readouts(readouts: int, layers: int, targets: bool) -> None:
    """Requires targets, and a readout for each layer of the model that was captured."""
    if not targets:
        raise ValueError("targets must be given with Readouts, got None: pass what the token losses compare with")
    if readouts != layers:
        raise ValueError(
            f"Readouts must have been built from the model that is captured, which has {layers} layers, got "
            f"{readouts} readouts: build them from that model"
        )


def check_inputs(kept: bool) -> None:
    """Requires a capture that kept what entered the layers."""
    if not kept:
        raise ValueError(
            "routings must hold what entered each layer where there are Readouts, got none: open the capture with "
            "capture(model, inputs=True); a layer of your own hands its input over as the last argument of emit"
        )
