# SPDX-License-Identifier: Apache-2.0
"""`Routings`: what a capture collected, and the end of a training step."""

from collections.abc import Callable, Iterator, Sequence
from typing import overload

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.nn._capture import Emission, RoutingSource
from equipoise.nn._monitor import warn_without_surrogate, watch
from equipoise.nn._routing import Routing
from equipoise.nn._surrogate_checks import check_balance_graph, check_captured, check_first_use


class Routings(Sequence[Routing]):
    """The `Routing` of every layer of a forward pass, in order of execution; made by `capture`.

    A sequence of records. They serve one `Surrogate` (`consume`) and one `update`.
    """

    def __init__(self, names: list[str], sources: list[RoutingSource], sinks: list[list[Emission]]) -> None:
        """Made by `capture`.

        Args:
            names: of all layers that may appear.
            sources: the layers.
            sinks: the lists that they append to.
        """
        self._names = names
        self._sources = sources
        self._sinks = sinks
        self._consumed = False
        self._updated = False

    def __repr__(self) -> str:
        """Shows the record of every layer, by name."""
        records = ", ".join(f"{name!r}: {routing!r}" for name, routing in zip(self.names, self, strict=True))
        return f"Routings({records})"

    def _entries(self) -> list[tuple[int, Emission]]:
        """Returns the records so far with the number of their layer, in order of execution."""
        entries = [(layer, emission) for layer, sink in enumerate(self._sinks) for emission in sink]
        return sorted(entries, key=_when(entries))

    @overload
    def __getitem__(self, index: int) -> Routing: ...
    @overload
    def __getitem__(self, index: slice) -> list[Routing]: ...
    def __getitem__(self, index: int | slice) -> Routing | list[Routing]:
        """Returns the record at a position."""
        routings = [emission.routing for _, emission in self._entries()]
        return routings[index]

    def __iter__(self) -> Iterator[Routing]:
        """Yields the records."""
        yield from self[:]

    def __len__(self) -> int:
        """Returns the number of records."""
        return sum(map(len, self._sinks))

    @property
    def modules(self) -> list[RoutingSource]:
        """The layer that made each record."""
        return [self._sources[layer] for layer, _ in self._entries()]

    @property
    def names(self) -> list[str]:
        """The name in the model of the layer that made each record; empty if the layer is the model."""
        return [self._names[layer] for layer, _ in self._entries()]

    @property
    def numbers(self) -> list[int]:
        """The number of the layer that made each record, in the order of the model's modules."""
        return [layer for layer, _ in self._entries()]

    @property
    def num_layers(self) -> int:
        """How many layers the model has, whether they were called or not."""
        return len(self._sources)

    def balance_loss(self) -> Float[Tensor, ""]:
        """Adds up the balance losses of all layers, with their weights in them: what gated routers add to a loss.

        For a loop without `Surrogate`, `(loss + routings.balance_loss()).backward()`; a surrogate has them already.

        Returns:
            A scalar, with gradient; 0 where there is none.

        Raises:
            ValueError: the gradient is wanted and a layer ran without a graph, as in a reentrant checkpoint.

        Example:
            >>> import equipoise as eq
            >>> moe = eq.nn.MoE(8, 4, router="switch")
            >>> with eq.nn.capture(moe) as routings:
            ...     loss = moe(torch.randn(16, 8)).square().mean()
            >>> (loss + routings.balance_loss()).backward()
        """
        check_captured(len(self))
        if torch.is_grad_enabled():
            for layer, emission in self._entries():
                lost = emission.training and len(emission.routing.balance_losses) > 0 and not emission.grad_enabled
                check_balance_graph(self._names[layer], not lost)
        losses = [loss for routing in self for loss in routing.balance_losses.values()]
        return torch.stack(losses).sum() if losses else self[0].logits.new_zeros(())

    def stats(self) -> dict[str, dict[str, float | int | list[int]]]:
        """Reads the telemetry of every layer into plain numbers, for any logger; waits for the device.

        Returns:
            `Routing.stats.to_dict()` by the layer's name; of its last call where it was called more than once.
        """
        return {name: routing.stats.to_dict() for name, routing in zip(self.names, self, strict=True)}

    def consume(self) -> list[Emission]:
        """Gives the records to the one surrogate that they serve, and closes the capture.

        Returns:
            The records, with what is known where they were made.
        """
        check_captured(len(self))
        check_first_use(self._consumed, "used by one Surrogate call")
        self._consumed = True
        for source, sink in zip(self._sources, self._sinks, strict=True):
            source.routing_credited = source.routing_credited or len(sink) > 0
            if source.routing_sink is sink:
                # The list is complete: a forward pass from here on (a residual's, a recomputation) is not part of it.
                source.routing_sink = None
        return [emission for _, emission in self._entries()]

    def update_after(self, optimizer: torch.optim.Optimizer) -> None:
        """Calls `update` after the next step of an optimiser, unless that has been done by then.

        Args:
            optimizer: whose step ends this training step.
        """
        # One hook for an optimiser: a hook cannot be removed while hooks run.
        hooks = optimizer._optimizer_step_post_hooks.values()  # pyright: ignore[reportPrivateUsage]
        after = next((hook for hook in hooks if isinstance(hook, _AfterStep)), None)
        if after is None:
            after = _AfterStep()
            optimizer.register_step_post_hook(after)
        after.pending.append(self)

    def update_once(self) -> None:
        """Calls `update`, unless that has been done."""
        if not self._updated:
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Ends a training step: what layers learn without gradient, and a look at whether routing is in order.

        Calls `observe` of every layer, once for every record that it made in training mode: loss-free biases, running
        averages of prices. To be called after backward, since checkpointing routes again in there and must find what
        the forward pass found. Every so many calls the fraction of rows dropped and the effective sample size are
        read; if they stay bad, one `RoutingWarning` says which layers, and what to change. Another one says so, once,
        if a layer that learns by the score function has a graph and no surrogate has ever used its records.
        """
        check_captured(len(self))
        check_first_use(self._updated, "used by one update")
        self._updated = True
        # The mode of the forward pass, and not that of now: evaluation may come between a forward pass and its step.
        entries = [(layer, emission) for layer, emission in self._entries() if emission.training]
        warn_without_surrogate(
            {self._names[layer]: self._sources[layer] for layer, emission in entries if _needs_surrogate(emission)}
        )
        made = [(layer, emission.routing) for layer, emission in entries]
        sources, routings = [self._sources[layer] for layer, _ in made], [routing for _, routing in made]
        for source, routing in zip(sources, routings, strict=True):
            source.observe(routing)
        watch([self._names[layer] for layer, _ in made], sources, routings)


def _needs_surrogate(emission: Emission) -> bool:
    """Tells whether the router learns from this record by the score function, which nothing but a surrogate adds."""
    routing = emission.routing
    return routing.score_function and emission.grad_enabled and routing.score_log_p.requires_grad


class _AfterStep:
    """A hook of an optimiser: updates what was captured since its last step."""

    def __init__(self) -> None:
        self.pending: list[Routings] = []

    def __call__(self, *_: object) -> None:
        pending, self.pending = self.pending, []
        for routings in pending:
            routings.update_once()


def _when(entries: list[tuple[int, Emission]]) -> Callable[[tuple[int, Emission]], tuple[int, int]]:
    """Returns what to sort records by.

    The numbers of autograd nodes grow with time, whoever made them; those of one compiled graph share a node, and were
    counted when it was traced. Without nodes (no gradients, reentrant checkpoints), counting is all there is.
    """
    nodes = [emission.node or emission.routing.logits.grad_fn for _, emission in entries]
    made = {id(emission): node for (_, emission), node in zip(entries, nodes, strict=True)}
    if any(node is None for node in nodes):
        return lambda entry: (0, entry[1].order)
    return lambda entry: (made[id(entry[1])]._sequence_nr(), entry[1].order)  # pyright: ignore
