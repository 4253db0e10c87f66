# SPDX-License-Identifier: Apache-2.0
"""The implementation of experts that is called "equipoise" in transformers.

`model.set_experts_implementation("equipoise")`, or `experts_implementation="equipoise"` of `from_pretrained`. Where the
router promises how many rows an expert has at most (exactly balanced, or under a capacity), each expert gets that
many slots, and two batched products compute all of them. Elsewhere it is transformers' own "grouped_mm".

Legend: T rows (tokens), E experts, K experts a row, m rows in groups.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from equipoise.integrations.transformers._layer import LAYER
from equipoise.nn import Grouped, LocalDispatcher, Routing
from equipoise.nn._experts import here

NAME = "equipoise"


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes the experts' outputs and their weighted sum for each row.

    Args:
        experts: the module with stacked parameters.
        hidden_states: the rows, [T, dim].
        top_k_index: the experts of each row, with E for "no expert".
        top_k_weights: their factors.

    Returns:
        [T, dim]; zero for rows without an expert.
    """
    layer = experts.__dict__.get(LAYER)
    routing: Routing | None = None if layer is None else layer.routing
    if layer is not None and routing is not None and layer.dispatcher is not None:
        groups, way = layer.dispatcher.dispatch(hidden_states, replace(routing, scores=top_k_weights))
        outputs = _ragged(experts, groups) if groups.slots is None else _even(experts, groups)
        return layer.dispatcher.combine(outputs, way)
    if routing is None or routing.capacity is None:
        return grouped_mm_experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    dispatcher = LocalDispatcher("padded")
    groups, metadata = dispatcher.dispatch(hidden_states, replace(routing, scores=top_k_weights))
    return dispatcher.combine(_even(experts, groups), metadata)


def _even(experts: Any, groups: Grouped) -> Tensor:
    """Applies every expert to its slots, in two batched products. An empty slot's output is not read."""
    assert groups.slots is not None
    x = groups.rows.reshape(groups.num_experts, groups.slots, groups.rows.shape[1])
    return _apply(experts, x, slice(None)).reshape(groups.rows.shape)


def _ragged(experts: Any, groups: Grouped) -> Tensor:
    """Applies every expert of this rank to its rows, one after the other."""
    parts = groups.rows.split(groups.counts.tolist())
    outputs = [_apply(experts, part.unsqueeze(0), slice(e, e + 1)).squeeze(0) for e, part in enumerate(parts)]
    return torch.cat(outputs)


def _apply(experts: Any, x: Tensor, which: slice) -> Tensor:
    """Applies some of the experts that are here to [e, m, dim]."""
    inner = "gate_up_proj" if experts.has_gate else "up_proj"
    hidden = _linear(experts, inner, x, which)
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    y = _linear(experts, "down_proj", hidden, which)
    if experts.has_post_expert_norm:
        y = experts.post_expert_norm(y)
    return y


def _linear(experts: Any, name: str, x: Tensor, which: slice) -> Tensor:
    """Multiplies by one of the stacked matrices, and adds its bias."""
    weight = here(getattr(experts, name))[which]
    weight = weight if experts.is_transposed else weight.mT
    product = torch.bmm(x.to(weight.dtype), weight)
    return product + here(getattr(experts, f"{name}_bias"))[which].unsqueeze(1) if experts.has_bias else product


def register_experts() -> None:
    """Makes the implementation known to transformers by its name."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
