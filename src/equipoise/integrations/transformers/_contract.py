# SPDX-License-Identifier: Apache-2.0
"""How gates and experts of a transformers model meet: finding them, and finding out what a gate computes.

The contract. A block has a gate and experts side by side. `gate(h)` returns logits [T, E], scores [T, K] and indices
[T, K]; `experts(h, indices, scores)` has stacked parameters. What a gate makes of its logits (softmax or sigmoid,
normalised or not, scaled, limited to groups, corrected by a bias) is written in its code alone, so it is found by
trial: the gate runs once on random rows with random parameters, and the one `Scoring` that gives the same answer is
taken. A gate that no `Scoring` reproduces is refused.

Legend: T rows (tokens), E experts, K experts a row.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.nn import Scoring

CORRECTION_BIAS = "e_score_correction_bias"
_GATES = ("gate", "router")
_ROWS = 32
_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class FoundLayer:
    """A block with a gate and stacked experts.

    Attributes:
        name: of the block in the model.
        block: the module that calls both.
        gate: returns logits, scores and indices.
        experts: takes rows, indices and scores.
        num_experts: E.
        top_k: K.
    """

    name: str
    block: nn.Module
    gate: nn.Module
    experts: nn.Module
    num_experts: int
    top_k: int


def find_layers(model: nn.Module) -> list[FoundLayer]:
    """Finds every block with a gate next to stacked experts.

    Args:
        model: any module.

    Returns:
        The layers, in the order of `model.named_modules()`.

    Raises:
        ValueError: there is none.
    """
    layers = [layer for name, block in model.named_modules() for layer in _layers_of(name, block)]
    if not layers:
        raise ValueError(
            "model must have a gate next to stacked experts (a child 'gate' or 'router' with top_k and num_experts, "
            f"and a child 'experts'), got {type(model).__name__}, which has none: see the table in docs/transformers.md"
        )
    return layers


def _layers_of(name: str, block: nn.Module) -> Iterator[FoundLayer]:
    """Yields the layer that a module is, if it is one."""
    children = dict(block.named_children())
    experts = children.get("experts")
    gates = [children[key] for key in _GATES if key in children and _is_gate(children[key])]
    if experts is None or len(gates) != 1 or not hasattr(experts, "_is_expert_parallel"):
        return
    gate: Any = gates[0]
    stacked = any(p.ndim == 3 and p.shape[0] == gate.num_experts for p in experts.parameters(recurse=False))
    if stacked:
        yield FoundLayer(
            name=name, block=block, gate=gate, experts=experts, num_experts=gate.num_experts, top_k=gate.top_k
        )


def _is_gate(module: nn.Module) -> bool:
    """Tells whether a module has what a gate has."""
    return isinstance(getattr(module, "top_k", None), int) and isinstance(getattr(module, "num_experts", None), int)


def find_scoring(layer: FoundLayer) -> Scoring:
    """Finds out by trial what a gate makes of its logits.

    Args:
        layer: its gate is called once, on the CPU, with random parameters in place of its own, which stay as they are.

    Returns:
        The scoring that gives the gate's own answer.

    Raises:
        ValueError: the gate does not meet the contract, or no scoring gives its answer.
    """
    logits, scores, indices, bias = _trial(layer)
    expected = _dense(scores, indices, layer.num_experts)
    for scoring in _candidates(layer.gate):
        selection = scoring.limit(scoring.compared(logits, bias))
        chosen = selection.topk(layer.top_k, dim=-1).indices
        if torch.allclose(
            _dense(scoring.factors(logits, chosen), chosen, layer.num_experts), expected, atol=_TOLERANCE
        ):
            return scoring
    raise ValueError(
        f"the gate of every layer must score by softmax or sigmoid, got {type(layer.gate).__name__} of {layer.name!r}, "
        "which computes something else: leave it out with layers="
    )


def _candidates(gate: Any) -> Iterator[Scoring]:
    """Yields what a gate may compute; what it says of itself is taken at its word, and tried."""
    scale = float(getattr(gate, "routed_scaling_factor", 1.0) or 1.0)
    groups = int(getattr(gate, "num_group", None) or getattr(gate, "n_group", None) or 1)
    kept = int(getattr(gate, "topk_group", None) or groups)
    for function, normalise in itertools.product(("softmax", "sigmoid"), (True, False)):
        yield Scoring(function=function, normalise=normalise, scale=scale, num_groups=groups, kept_groups=kept)


@torch.no_grad()
def _trial(layer: FoundLayer) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Runs a gate on random rows with random parameters; returns logits, scores, indices and the correction bias."""
    gate, training = layer.gate, layer.gate.training
    draw = torch.Generator().manual_seed(0)
    own = {**dict(gate.named_parameters()), **dict(gate.named_buffers())}
    matrices = [x for x in own.values() if x.ndim == 2]
    dim = matrices[0].shape[1] if matrices else 1
    # Logits of standard deviation 1: neither flat, where a softmax looks like a sigmoid, nor one-hot.
    drawn = {name: torch.randn(x.shape, generator=draw) / dim**0.5 for name, x in own.items()}
    rows = torch.randn(_ROWS, dim, generator=draw)
    gate.eval()
    try:
        found: Any = torch.func.functional_call(gate, drawn, (rows,))
    except TypeError as error:  # a gate that wants more than rows
        raise ValueError(
            f"a gate must take rows and nothing else, got {type(gate).__name__} of {layer.name!r}, which does not "
            f"({error}): leave it out with layers="
        ) from error
    finally:
        gate.train(training)
    shapes = [list(x.shape) for x in found] if isinstance(found, tuple) and len(found) == 3 else None  # pyright: ignore
    if shapes != [[_ROWS, layer.num_experts], [_ROWS, layer.top_k], [_ROWS, layer.top_k]]:
        raise ValueError(
            f"a gate must return logits [T, E], scores [T, K] and indices [T, K], got {shapes or type(found).__name__} "
            f"from {type(gate).__name__} of {layer.name!r} for T = {_ROWS}: leave it out with layers="
        )
    logits, scores, indices = found
    return logits.float(), scores.float(), indices, drawn.get(CORRECTION_BIAS)


def _dense(scores: Tensor, indices: Tensor, num_experts: int) -> Tensor:
    """Writes factors into a matrix of all experts: which order a gate names them in does not matter."""
    return torch.zeros(scores.shape[0], num_experts).scatter(1, indices, scores)
