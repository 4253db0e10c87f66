# SPDX-License-Identifier: Apache-2.0
"""Does a loss depend on a layer's output? A walk over the autograd graph, in plain Python."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from equipoise.nn._capture import Emission


def missing_outputs(losses: Tensor, emissions: "Sequence[Emission]") -> list[int]:
    """Finds the layers whose output the losses do not depend on.

    Layers without a node are not looked for: those that ran without a graph, or had nothing to learn. A compiled
    graph is a single node, so there the node that made the logits is also the one that made the output.

    Args:
        losses: with a graph; without one there is nothing to walk, and nothing is missing.
        emissions: what was captured.

    Returns:
        Positions in `emissions`.
    """
    if losses.grad_fn is None:
        return []
    nodes = {index: _node(emission) for index, emission in enumerate(emissions)}
    reached = _reachable(losses.grad_fn, {node for node in nodes.values() if node is not None})
    return [index for index, node in nodes.items() if node is not None and node not in reached]


def _node(emission: "Emission") -> "Node | None":
    """Returns the node that made the layer's output."""
    if not emission.compiled:
        return emission.node
    node = emission.routing.logits.grad_fn
    return node if node is not None and "CompiledFunction" in node.name() else None


def _reachable(root: "Node", targets: "set[Node]") -> "set[Node]":
    """Returns the targets that can be reached, stopping when all are found."""
    found: set[Node] = set()
    seen, stack = {root}, [root]
    while stack and len(found) < len(targets):
        node = stack.pop()
        if node in targets:
            found.add(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found
