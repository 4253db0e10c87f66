# SPDX-License-Identifier: Apache-2.0
"""The router's gradient under reentrant activation checkpointing.

With `use_reentrant=True` the first forward pass runs without a graph, and the backward pass runs it again, with one.
The surrogate is built in between: the log-probabilities that it sees lead nowhere, and a score-function term made of
them would train nothing, in silence. But its derivative by log p(z_i) is a number, known when the surrogate is built,
and that by a balance loss is 1. So the surrogate leaves these numbers with the layer, and the recomputed layer adds the
terms to the graph of its output, times whatever factor reached the surrogate (`loss / steps`, a gradient scaler).

1. `Surrogate` wraps its value by `expect`. All gradient passes there first: its backward learns the factor and arms
   the layers. When the backward pass ends, whatever was not fetched is dropped: a pass under `no_grad` that nobody
   recomputes gets no gradient, as it should.
2. The recomputed layer's `emit` calls `Pending.attach`.
"""

from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function, Variable

from equipoise.estimators import score_function
from equipoise.nn._surrogate_checks import check_same_routing

if TYPE_CHECKING:
    from equipoise.nn._capture import RoutingSource
    from equipoise.nn._routing import Routing


class Pending:
    """What a layer's next recomputation adds to its graph.

    Args:
        source: the layer.
        routing: its record of the first pass.
        coefficient: the surrogate's derivative by log p at each row's expert; None without a score-function term.
    """

    def __init__(self, source: "RoutingSource", routing: "Routing", coefficient: Float[Tensor, " T"] | None) -> None:
        self._source, self._routing, self._coefficient = source, routing, coefficient
        self._factor: Tensor | None = None

    def arm(self, factor: Tensor) -> None:
        """Makes the layer's next recomputation fetch it."""
        self._factor = factor
        self._source.routing_pending = self

    def disarm(self) -> None:
        """Takes it back, if it is still there."""
        if self._source.routing_pending is self:
            self._source.routing_pending = None

    def attach(self, routing: "Routing", y: Tensor) -> Tensor:
        """Adds the surrogate's terms, made of the recomputed record, to the graph of the layer's output."""
        self.disarm()
        check_same_routing(routing.indices, self._routing.indices)
        terms = list(routing.balance_losses.values())
        if self._coefficient is not None and routing.sample is not None:
            terms.append(score_function(routing.log_prob(), self._coefficient, self._coefficient != 0).sum())
        for term in terms:
            if term.requires_grad:
                y = _Attach.apply(y, term, self._factor)  # pyright: ignore[reportAssignmentType]
        return y


def expect(value: Tensor, pending: list[Pending], compiled: "list[RoutingSource]") -> Tensor:
    """Returns a surrogate's value such that its backward prepares the layers first.

    Args:
        value: of the surrogate.
        pending: what recomputed layers are to fetch.
        compiled: layers in compiled graphs. A checkpoint outside the graph runs the graph again, and must find the one
            that it ran before, which appends; so these get a list to append to, and nobody reads it.

    Returns:
        The value.
    """
    if not value.requires_grad or not (pending or compiled):
        return value
    return _Expect.apply(value, pending, compiled)  # pyright: ignore[reportReturnType]


class _Expect(Function):
    """The identity; its backward, before any other of the surrogate, prepares the layers."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, pending: list[Pending], compiled: "list[RoutingSource]") -> Tensor:
        ctx.pending, ctx.compiled = pending, compiled
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        pending: list[Pending] = ctx.pending
        before = [(source, source.routing_sink) for source in dict.fromkeys(ctx.compiled)]
        for entry in pending:
            entry.arm(gradients[0].detach())
        for source, _ in before:
            source.routing_sink = []

        def afterwards() -> None:
            for entry in pending:
                entry.disarm()
            for source, sink in before:
                source.routing_sink = sink

        Variable._execution_engine.queue_callback(afterwards)  # pyright: ignore[reportPrivateUsage]
        return gradients[0], None, None


class _Attach(Function):
    """The identity in y; its backward sends the factor to the term as well."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, term: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor.to(term)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], ctx.factor, None
