# SPDX-License-Identifier: Apache-2.0
"""A warning, once, when a layer's routing stays bad.

Two numbers tell that training goes wrong long before the loss does: the fraction of rows that no expert processes, and
the effective sample size of the weights, (sum w)^2 / (n sum w^2), the fraction of the batch that the router's gradient
really rests on. Either is bad for a few steps in any run, so only a long row of bad readings counts.

Reading a number waits for the device, so it is done once in `EVERY` steps. What is remembered is with the layer.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from equipoise.nn._routing import Routing

if TYPE_CHECKING:
    from equipoise.nn._capture import RoutingSource

EVERY = 50
"""Steps between readings."""
PATIENCE = 6
"""Bad readings in a row before the warning: 300 steps."""
MOST_DROPPED = 0.25
"""A reading is bad if a larger fraction of the rows is dropped. A balanced router at capacity factor 1 drops about
0.4 / sqrt(rows for each expert): 0.05 at 64 rows."""
LEAST_SAMPLE_SIZE = 0.25
"""A reading is bad if the effective sample size is below this fraction of the rows."""


class RoutingWarning(UserWarning):
    """A router is not trained, routes badly for hundreds of steps, or loses state; the message says what to change.

    Example:
        A router that learns by the score function gets no gradient without a `capture`:

        >>> import warnings, torch, equipoise as eq
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     eq.nn.MoE(8, 4, router="gm-iw")(torch.randn(16, 8)).sum().backward()
        >>> [warning.category.__name__ for warning in caught]
        ['RoutingWarning']
    """


class Monitor:
    """What is remembered about one layer from step to step.

    Attributes:
        steps: updates seen, in training mode.
        bad_dropped: consecutive readings with too many rows dropped.
        bad_sample_size: consecutive readings with too small an effective sample size.
        warned: whether the warning has been given.
    """

    def __init__(self) -> None:
        """Starts with a clean record."""
        self.steps = 0
        self.bad_dropped = 0
        self.bad_sample_size = 0
        self.warned = False

    def step(self, routing: Routing) -> list[str]:
        """Takes in one step, and reads its telemetry if it is time to.

        Args:
            routing: the layer's record.

        Returns:
            What has been bad for `PATIENCE` readings; nothing at most steps.
        """
        self.steps += 1
        if self.warned or self.steps % EVERY or not routing.logits.shape[0]:
            return []
        stats = routing.stats
        dropped, size = torch.stack([stats.fraction_dropped, stats.effective_sample_size]).tolist()
        self.bad_dropped = self.bad_dropped + 1 if dropped > MOST_DROPPED else 0
        self.bad_sample_size = self.bad_sample_size + 1 if size < LEAST_SAMPLE_SIZE else 0
        found: list[str] = []
        if self.bad_dropped >= PATIENCE:
            found.append(f"drops {dropped:.0%} of its tokens")
        if self.bad_sample_size >= PATIENCE:
            found.append(f"has an effective sample size of {size:.0%}")
        return found


def warn_without_capture(source: "RoutingSource") -> None:
    """Warns, once for a layer, that gradient reaches it and its router's score function does not take part.

    Args:
        source: the layer.
    """
    if source.routing_warned:
        return
    source.routing_warned = True
    warnings.warn(
        "a layer whose router learns by the score function is trained without a capture, so that its router misses "
        "that gradient: run the forward pass within `with equipoise.nn.capture(model) as routings` and call backward "
        "on Surrogate()(token_losses, routings), or build the layer with loss='gating'",
        RoutingWarning,
        stacklevel=2,
    )


def warn_without_surrogate(sources: Mapping[str, "RoutingSource"]) -> None:
    """Warns, once for a layer, that steps end which train all but its router's score function.

    A layer whose records a surrogate has ever used is left alone: its losses may well alternate.

    Args:
        sources: the layers whose records of the step have a score-function term, by name.
    """
    found = {name: source for name, source in sources.items() if not source.routing_credited}
    new = any(not source.routing_warned for source in found.values())
    for source in found.values():
        source.routing_warned = True
    if new:
        names = ", ".join(map(repr, found))
        warnings.warn(
            f"no surrogate has used the records of {names}, whose router learns by the score function and misses that "
            "gradient: before each step call backward on the surrogate's loss, surrogate(losses, routings).backward() "
            "with surrogate = equipoise.nn.Surrogate() and a loss for each token, or build the layer with "
            "loss='gating'; to update prices without training, run the forward pass under torch.no_grad()",
            RoutingWarning,
            stacklevel=3,
        )


def watch(names: Sequence[str], sources: Sequence["RoutingSource"], routings: Sequence[Routing]) -> None:
    """Takes in one step of all layers of a model, and warns if any has been bad for long; once for all of them.

    Args:
        names: of the layers, for the message.
        sources: the layers; they keep the record.
        routings: of the step.
    """
    found: list[str] = []
    for name, source, routing in zip(names, sources, routings, strict=True):
        if source.training:
            source.routing_monitor = source.routing_monitor or Monitor()
            found += [f"layer {name!r} {problem}" for problem in source.routing_monitor.step(routing)]
    if found:
        for source in sources:
            if source.routing_monitor is not None:
                source.routing_monitor.warned = True
        warnings.warn(_advice(found), RoutingWarning, stacklevel=3)


def _advice(found: Sequence[str]) -> str:
    """Says what is wrong, and what to change."""
    text = f"for {EVERY * PATIENCE} steps: {'; '.join(found)}."
    if any("drops" in problem for problem in found):
        text += (
            " The router sends too many tokens to few experts, and tokens beyond the capacity are lost: raise "
            "marginal_entropy (0.1 works on a language model; 0 does not balance at all), then capacity_factor."
        )
    if any("sample size" in problem for problem in found):
        text += (
            " Few tokens carry the router's gradient: bring temperature back to 1, or let it choose itself ('auto'); "
            "raise marginal_entropy so that the router asks for what balancing gives it; or use a router whose weights "
            "are bounded, 'skip-iw' by the load, 'gm-iw-mix' by eps."
        )
    return text
