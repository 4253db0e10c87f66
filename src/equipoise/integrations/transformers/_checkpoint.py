# SPDX-License-Identifier: Apache-2.0
"""What a Trainer's checkpoint needs beyond what the Trainer does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from torch import nn
from transformers import PreTrainedModel

from equipoise.integrations.transformers._layer import ROUTER, routed_blocks


def router_states(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns the state of every router, by the name of its layer.

    Args:
        model: with routers of ours.
    """
    return {name: block.routed_gate.router.state_dict() for name, block in routed_blocks(model)}


def load_router_states(model: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Loads the state of every router.

    Args:
        model: with routers of ours in the same layers.
        states: from `router_states`.

    Raises:
        ValueError: the layers are others.
    """
    blocks = dict(routed_blocks(model))
    if sorted(blocks) != sorted(states):
        raise ValueError(
            f"the checkpoint's routed layers must be the model's, {', '.join(blocks)}, got {', '.join(states)}: "
            "swap the routers of the same layers before training goes on"
        )
    for name, block in blocks.items():
        block.routed_gate.router.load_state_dict(states[name])


def load_renamed(model: nn.Module, folder: str) -> None:
    """Loads parameters that a checkpoint holds under other names.

    `save_pretrained` stores the experts of some architectures one by one and under the names of an older layout
    (Mixtral: `block_sparse_moe.experts.0.w1`). `from_pretrained` converts them back; the Trainer of transformers 5.22,
    when it resumes, does not, and would go on with the parameters that the model happens to have.

    Args:
        model: the Trainer's.
        folder: the checkpoint.
    """
    stored = [name for file in Path(folder).glob("*.safetensors") for name in _names(file)]
    wanted = {name for name, _ in model.named_parameters() if f".{ROUTER}." not in name}
    if not stored or not isinstance(model, PreTrainedModel) or wanted <= set(stored):
        return
    loaded = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(loaded.state_dict(), strict=False)


def _names(file: Path) -> list[str]:
    """Returns the names of the tensors in a file."""
    with safetensors.safe_open(file, framework="pt") as opened:
        return list(opened.keys())
