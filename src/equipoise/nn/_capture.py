# SPDX-License-Identifier: Apache-2.0
"""How the `Routing` of every layer reaches the training loop, without hidden state.

A layer that routes is a `RoutingSource`. Its forward passes the record to `emit`, which appends it to the list that an
open capture has given this layer, if there is one; no list outlives its `with` block, and a layer of another model does
not see it. An append is a side effect that `torch.compile` replays after the graph, so one graph holds the layer. Every
layer has a list of its own: a compiled graph is bound to the length of the lists that it appends to, and blocks that
are compiled one by one can share a graph only if their lists are equally long.

Activation checkpointing runs a forward pass again while it differentiates. `emit` checks whether it is
called within a backward pass, and appends nothing then.
"""

import itertools
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from equipoise._core import in_transform
from equipoise.nn._monitor import warn_without_capture
from equipoise.nn._routing import Routing
from equipoise.nn._surrogate_checks import check_has_layers, own_optimizer

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from equipoise.nn._monitor import Monitor
    from equipoise.nn._recompute import Pending
    from equipoise.nn._routings import Routings

_ORDER = itertools.count()


class Emission(NamedTuple):
    """A `Routing`, with facts about the forward pass that made it.

    Attributes:
        routing: the record.
        node: of the autograd graph, that made the layer's output; None where there is none, or none to be seen.
        grad_enabled: whether the forward pass recorded a graph.
        compiled: whether it was part of a compiled graph.
        order: grows with time; within a compiled graph, with the order of tracing.
        inputs: what entered the layer, detached, where the capture keeps it.
        training: whether the layer was in training mode.
    """

    routing: Routing
    node: "Node | None"
    grad_enabled: bool
    compiled: bool
    order: int
    inputs: Tensor | None = None
    training: bool = True


class RoutingSource(nn.Module):
    """A module whose forward ends in `return emit(self, routing, y, x)`: an `MoE`, or a layer of your own.

    Attributes:
        routing_sink: the list that its records are appended to; None: no capture is open.
        routing_inputs: whether records include the layer's input.
        routing_warned: whether the warning that it is trained without a capture or a surrogate has been given.
        routing_credited: whether a surrogate has used a record of this layer.
        routing_pending: gradient that the next recomputation adds for its router.
        routing_monitor: state that `Routings.update` keeps for this layer, to warn when its routing stays bad.

    Example:
        A layer that scales each row by its router's factor, in place of experts:

        >>> import equipoise as eq
        >>> class Scaled(eq.nn.RoutingSource):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.router = eq.nn.make_router("switch", 8, 4)
        ...
        ...     def forward(self, x):
        ...         routing = self.router(x)
        ...         return eq.nn.emit(self, routing, routing.scores * x, x)
        >>> layer = Scaled()
        >>> with eq.nn.capture(layer) as routings:
        ...     y = layer(torch.randn(6, 8))
        >>> [routing.indices.shape for routing in routings]
        [torch.Size([6, 1])]
    """

    routing_sink: list[Emission] | None = None
    routing_inputs: bool = False
    routing_warned: bool = False
    routing_credited: bool = False
    routing_pending: "Pending | None" = None
    routing_monitor: "Monitor | None" = None

    def observe(self, routing: Routing) -> None:
        """Updates what is not learnt by gradient (biases, prices). `Routings.update` calls it.

        Args:
            routing: the routing of this layer in the step that has just ended.
        """
        del routing


@torch.compiler.assume_constant_result
def _next_order() -> int:
    """Counts. A compiled graph keeps the number of its tracing."""
    return next(_ORDER)


def emit(source: RoutingSource, routing: Routing, y: Tensor, x: Tensor | None = None) -> Tensor:
    """Adds a layer's record to the open capture. A layer's forward calls it last.

    Args:
        source: the layer.
        routing: the record of this forward pass.
        y: the layer's output.
        x: the layer's input, [*shape, dim], for captures that keep it (`Readouts` need it); None if it is not
            available.

    Returns:
        The output to return: y itself, except while a reentrant checkpoint recomputes the layer. The first pass had no
        graph, so the router's own gradient (score function, balance losses) enters here, with that of y.

    Example:
        >>> import equipoise as eq
        >>> layer, router, x = eq.nn.RoutingSource(), eq.nn.make_router("topk", 8, 4, top_k=2), torch.randn(6, 8)
        >>> with eq.nn.capture(layer) as routings:
        ...     y = emit(layer, router(x), x)
        >>> len(routings), y is x
        (1, True)
    """
    sink = source.routing_sink
    inputs = x.detach() if x is not None and source.routing_inputs else None
    if torch.compiler.is_compiling():  # no engine to ask while tracing
        if sink is not None:
            sink.append(Emission(routing, None, torch.is_grad_enabled(), True, _next_order(), inputs, source.training))
        return y
    if within_backward():
        pending = source.routing_pending
        return y if pending is None or not torch.is_grad_enabled() else pending.attach(routing, y)
    if sink is not None:
        graph = torch.is_grad_enabled()
        sink.append(Emission(routing, y.grad_fn, graph, False, _next_order(), inputs, source.training))
    elif routing.score_function and routing.score_log_p.requires_grad and y.requires_grad and not in_transform():
        y.register_hook(partial(_warn, source))
    return y


def _warn(source: RoutingSource, _gradient: Tensor) -> None:
    """A hook of an output that was not captured: gradient reaches it."""
    warn_without_capture(source)


def within_backward() -> bool:
    """Returns whether a backward pass runs in this thread, so that a forward pass now is a recomputation."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


@contextmanager
def capture(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, inputs: bool = False
) -> "Generator[Routings]":
    """Collects the `Routing` of every layer in a model's forward pass.

    Layers are found at any depth. The records come in order of execution, one for every call of a layer, and once under
    activation checkpointing. Captures nest: when the inner one ends, its records are added to the outer one. Works on a
    compiled model without a graph break; the first step with a capture compiles once more. (The order of layers that
    are compiled one by one and run without gradients is not known: their records have the order of `model.modules()`.)

    Args:
        model: holds at least one `MoE`, or is one. Wrappers (`torch.compile`, data parallelism) are fine.
        optimizer: after its next step `routings.update()` is called, once; None: call it yourself in training. With
            gradient accumulation, the step updates every capture since the last one. A capture in evaluation mode
            asks for no update. A wrapper with the torch optimiser as `.optimizer`, such as accelerate's, is fine.
        inputs: whether to keep each layer's input, for `Readouts`. This takes dim numbers a token and layer, for as
            long as the routings are kept.

    Yields:
        The records, a sequence that grows as the model runs.

    Example:
        >>> import equipoise as eq
        >>> model = torch.nn.Sequential(eq.nn.MoE(8, 4), torch.nn.ReLU(), eq.nn.MoE(8, 2))
        >>> with eq.nn.capture(model) as routings:
        ...     y = model(torch.randn(16, 8))
        >>> [routing.num_experts for routing in routings], routings.names
        ([4, 2], ['0', '2'])
    """
    from equipoise.nn._routings import Routings  # not above: Routings are made of what is defined here

    optimizer = None if optimizer is None else own_optimizer(optimizer)
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, RoutingSource)]
    check_has_layers("model", model, len(named))
    sources = [module for _, module in named]
    before = [(module.routing_sink, module.routing_inputs) for module in sources]
    sinks: list[list[Emission]] = [[] for _ in sources]
    routings = Routings([name for name, _ in named], sources, sinks)
    for module, sink in zip(sources, sinks, strict=True):
        module.routing_sink, module.routing_inputs = sink, module.routing_inputs or inputs
    try:
        yield routings
    finally:
        for module, sink, (outer, kept) in zip(sources, sinks, before, strict=True):
            module.routing_sink, module.routing_inputs = outer, kept
            if outer is not None:
                outer.extend(sink)
    if optimizer is not None and any(emission.training for sink in sinks for emission in sink):
        routings.update_after(optimizer)
