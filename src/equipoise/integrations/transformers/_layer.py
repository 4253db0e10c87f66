# SPDX-License-Identifier: Apache-2.0
"""A block and its gate with a router of ours: classes that stand before the native ones.

The modules stay the objects they were, with their parameters, names, hooks and place; only their class changes, to a
subclass of the native one, so that whatever transformers finds by class it still finds. The block is the layer that
`capture` sees: it knows the shape of the batch before the model flattens it, and its output is what losses depend on.

Legend: T rows (tokens), E experts, K experts a row.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.integrations.transformers._contract import CORRECTION_BIAS
from equipoise.nn import Dispatcher, Router, Routing, RoutingSource, emit

LAYER = "equipoise_layer"
"""The attribute under which block, gate and experts of a layer find what they share."""
ROUTER = "equipoise_router"
"""The name of the router in the gate, and in the state dict."""


class Rows:
    """What the model's input says about rows: token ids, and which rows are padding. A hook of the whole model.

    It stays until the next forward pass, since activation checkpointing routes again during the backward pass.

    Args:
        model: whose forward pass says what an input by position is.
    """

    def __init__(self, model: nn.Module) -> None:
        self.token_ids: Tensor | None = None
        self.attended: Tensor | None = None
        self._names = _positional_names(model)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes the input, before the model runs."""
        first = args[0] if args else None
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        self.token_ids = given.get("input_ids", first if isinstance(first, Tensor) else None)
        self.attended = given.get("attention_mask")

    def ids(self, shape: tuple[int, ...]) -> Tensor | None:
        """Returns the token ids, if there are any of this shape."""
        ids = self.token_ids
        return ids if ids is not None and tuple(ids.shape) == shape and not ids.is_floating_point() else None

    def mask(self, shape: tuple[int, ...]) -> Tensor | None:
        """Returns which rows are no padding, if that is known for this shape."""
        attended = self.attended
        return attended != 0 if isinstance(attended, Tensor) and tuple(attended.shape) == shape else None


def _positional_names(model: nn.Module) -> list[str]:
    """Returns the names of a model's inputs by position; where it takes any, as a wrapper does, transformers' own."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return ["input_ids", "attention_mask"]
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


class Layer:
    """What block, gate and experts of one layer share during a forward pass.

    Attributes:
        rows: of the whole model.
        shape: leading dimensions of the block's input, while it runs.
        routing: the decision, from the gate to the end of the block.
        decide: changes the decision: a replay; None: nothing does.
        dispatcher: takes rows to experts on other ranks; None: all experts are here.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.shape: tuple[int, ...] | None = None
        self.routing: Routing | None = None
        self.decide: Callable[[Routing], Routing] | None = None
        self.dispatcher: Dispatcher | None = None

    def shape_of(self, rows: int) -> tuple[int, ...]:
        """Returns the leading dimensions of T rows, as far as they are known."""
        shape = self.shape
        return shape if shape is not None and math.prod(shape) == rows else (rows,)


def layer_of(module: nn.Module) -> Layer:
    """Returns what a block, a gate or experts share with the others."""
    return module.__dict__[LAYER]


class RoutedGate(nn.Module):
    """A gate whose logits go to a router of ours."""

    native: ClassVar[type[nn.Module]] = nn.Module

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes rows.

        Args:
            hidden_states: the rows, flattened or not.

        Returns:
            The native logits; the router's scores, in the native dtype; its indices, as the experts can take them.
        """
        native = super().forward
        logits, native_scores, _ = native(hidden_states)
        layer, router = layer_of(self), self.router
        shape = layer.shape_of(logits.shape[0])
        routing = router.route(
            logits,
            shape=shape,
            bias=getattr(self, CORRECTION_BIAS, None),
            # Padding takes no room and moves no price. In evaluation the native function stays as it is, row by row.
            mask=layer.rows.mask(shape) if self.training else None,
            token_ids=layer.rows.ids(shape),
            own_logits=(lambda: native(hidden_states.detach())[0]) if hidden_states.requires_grad else None,
        )
        layer.routing = routing if layer.decide is None else layer.decide(routing)
        return logits, layer.routing.scores.to(native_scores.dtype), self._for_experts(layer)

    @property
    def router(self) -> Router:
        """The router."""
        return self._modules[ROUTER]  # pyright: ignore[reportReturnType]

    def _for_experts(self, layer: Layer) -> Tensor:
        """Returns the indices, without "no expert" where the experts' implementation has no such index."""
        routing = layer.routing
        assert routing is not None
        indices, num_experts = routing.indices, routing.num_experts
        complete = routing.capacity is None and routing.mask is None and layer.decide is None  # nothing can be dropped
        if complete or self.__dict__["experts_config"]._experts_implementation in TAKE_NO_EXPERT:
            return indices
        # The factor is 0, so any expert will do. In turn, so that none of them gets all.
        some = torch.arange(indices.numel(), device=indices.device) % num_experts
        return torch.where(indices < num_experts, indices, some.view_as(indices))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles by the native class: this one has no place in a module."""
        return _rebuild, (RoutedGate, self.native), self.__dict__.copy()


TAKE_NO_EXPERT = ("grouped_mm", "batched_mm", "equipoise")
"""The implementations of experts that leave out rows of index E, if `_is_expert_parallel` is set."""


class RoutedBlock(RoutingSource):
    """A block whose gate is a `RoutedGate`: a layer that `capture` sees."""

    native: ClassVar[type[nn.Module]] = nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the native block.

        Args:
            hidden_states: [*shape, dim].
            args: as the native block's.
            kwargs: as the native block's.

        Returns:
            What the native block returns.
        """
        layer = layer_of(self)
        layer.shape = tuple(hidden_states.shape[:-1])
        output: Any = super().forward(hidden_states, *args, **kwargs)
        routing, layer.routing, layer.shape = layer.routing, None, None
        assert routing is not None, "the block did not call its gate"
        if isinstance(output, tuple):
            return emit(self, routing, output[0], hidden_states), *output[1:]
        return emit(self, routing, output, hidden_states)

    @property
    def routed_gate(self) -> RoutedGate:
        """The gate."""
        return next(child for child in self.children() if isinstance(child, RoutedGate))

    @property
    def num_experts(self) -> int:
        """The number of experts, E."""
        return self.routed_gate.router.num_experts

    @property
    def dispatcher(self) -> Dispatcher | None:
        """How rows reach experts on other ranks; `equipoise.distributed.parallelize` sets it. None: all are here."""
        return layer_of(self).dispatcher

    @dispatcher.setter
    def dispatcher(self, dispatcher: Dispatcher) -> None:
        layer_of(self).dispatcher = dispatcher
        # Only ours knows of other ranks.
        self.routed_gate.__dict__["experts_config"]._experts_implementation = "equipoise"

    @property
    def dim(self) -> int:
        """Features of a row."""
        return next(parameter.shape[1] for parameter in self.routed_gate.parameters() if parameter.ndim == 2)

    def observe(self, routing: Routing) -> None:
        """Updates the router's averages and schedules, after the step.

        Args:
            routing: of this layer.
        """
        self.routed_gate.router.observe(routing)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles by the native class: this one has no place in a module."""
        return _rebuild, (RoutedBlock, self.native), self.__dict__.copy()


def routed_blocks(model: nn.Module) -> list[tuple[str, RoutedBlock]]:
    """Returns the layers with routers of ours, by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, RoutedBlock)]


@functools.cache
def routed_class(kind: type[nn.Module], native: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of ours that stands before a native one.

    Args:
        kind: `RoutedGate` or `RoutedBlock`.
        native: the class of the module.

    Returns:
        A subclass of both.
    """
    return type(f"Routed{native.__name__}", (kind, native), {"native": native, "__module__": kind.__module__})


def _rebuild(kind: type[nn.Module], native: type[nn.Module]) -> nn.Module:
    """Makes an empty module for copies and pickles to fill."""
    routed = routed_class(kind, native)
    return routed.__new__(routed)
