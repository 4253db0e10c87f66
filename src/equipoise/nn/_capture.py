# SPDX-License-Identifier: Apache-2.0
"""How the `Routing` of every layer reaches the training loop, without hidden state.

A layer that routes is a `RoutingSource`. Its forward hands the record to `emit`, which appends it to the list that an
open capture has given this layer, if there is one; no list outlives its `with` block, and a layer of another model does
not see it. An append is a side effect that `torch.compile` replays after the graph, so one graph holds the layer. Every
layer has a list of its own: a compiled graph is bound to the length of the lists that it appends to, and blocks that
are compiled one by one can share a graph only if all of them find the same.

Activation checkpointing runs a forward pass again while it differentiates. `emit` knows by the autograd engine that it
is called within a backward pass, and appends nothing then.
"""

import itertools
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.nn._routing import Routing
from equipoise.nn._surrogate_checks import check_has_layers

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from equipoise.nn._monitor import Monitor
    from equipoise.nn._recompute import Pending
    from equipoise.nn._routings import Routings

_ORDER = itertools.count()


class Emission(NamedTuple):
    """A `Routing` with what is known where it was made.

    Attributes:
        routing: the record.
        node: of the autograd graph, that made the layer's output; None where there is none, or none to be seen.
        grad_enabled: whether the forward pass recorded a graph.
        compiled: whether it was part of a compiled graph.
        order: grows with time; within a compiled graph, with the order of tracing.
    """

    routing: Routing
    node: "Node | None"
    grad_enabled: bool
    compiled: bool
    order: int


class RoutingSource(nn.Module):
    """A module whose forward ends in `return emit(self, routing, y)`: an `MoE`, or a layer of your own.

    Attributes:
        routing_sink: where its records go; None: nobody listens.
        routing_pending: gradient that the next recomputation owes its router.
        routing_monitor: what `Routings.update` remembers about this layer, to warn when its routing stays bad.
    """

    routing_sink: list[Emission] | None = None
    routing_pending: "Pending | None" = None
    routing_monitor: "Monitor | None" = None

    def observe(self, routing: Routing) -> None:
        """Learns from a batch what is not learned by gradient (biases, prices); called by `Routings.update`.

        Args:
            routing: of this layer, of the step that has just ended.
        """
        del routing


@torch.compiler.assume_constant_result
def _next_order() -> int:
    """Counts. A compiled graph keeps the number of its tracing."""
    return next(_ORDER)


def emit(source: RoutingSource, routing: Routing, y: Tensor) -> Tensor:
    """Hands a layer's record to whoever captures; the last thing that a layer's forward does.

    Args:
        source: the layer.
        routing: the record of this forward pass.
        y: the layer's output.

    Returns:
        The output to return: y itself, except while a reentrant checkpoint recomputes the layer. The first pass had no
        graph, so the router's own gradient (score function, balance losses) enters here, with that of y.
    """
    sink = source.routing_sink
    if torch.compiler.is_compiling():  # no engine to ask while tracing
        if sink is not None:
            sink.append(Emission(routing, None, torch.is_grad_enabled(), True, _next_order()))
        return y
    if within_backward():
        pending = source.routing_pending
        return y if pending is None or not torch.is_grad_enabled() else pending.attach(routing, y)
    if sink is not None:
        sink.append(Emission(routing, y.grad_fn, torch.is_grad_enabled(), False, _next_order()))
    return y


def within_backward() -> bool:
    """Tells whether the autograd engine is at work in this thread: a forward pass now is a recomputation."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


@contextmanager
def capture(model: nn.Module) -> "Generator[Routings]":
    """Collects the `Routing` of every layer in a model's forward pass.

    Layers are found at any depth. The records come in order of execution, one for every call of a layer, and once under
    activation checkpointing. Captures nest: the outer one sees what the inner one saw, when that ends. Works on a
    compiled model without a graph break; the first step with a capture compiles once more. (Layers that are compiled
    one by one and run without gradients leave no trace of their order: there it is that of `model.modules()`.)

    Args:
        model: holds at least one `MoE`, or is one. Wrappers (`torch.compile`, data parallelism) are fine.

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

    named = [(name, module) for name, module in model.named_modules() if isinstance(module, RoutingSource)]
    check_has_layers("model", model, len(named))
    sources = [module for _, module in named]
    before = [module.routing_sink for module in sources]
    sinks: list[list[Emission]] = [[] for _ in sources]
    routings = Routings([name for name, _ in named], sources, sinks)
    for module, sink in zip(sources, sinks, strict=True):
        module.routing_sink = sink
    try:
        yield routings
    finally:
        for module, sink, outer in zip(sources, sinks, before, strict=True):
            module.routing_sink = outer
            if outer is not None:
                outer.extend(sink)
