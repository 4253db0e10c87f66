# SPDX-License-Identifier: Apache-2.0
"""The layers of the layer benchmark: ours, the dense one of the same active size, the peer's."""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.nn import MoE

Model = nn.Module


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSize:
    """The sizes of a layer and its batch.

    Attributes:
        tokens: rows of a batch, T.
        dim: features of a token.
        hidden_dim: width of an expert.
        num_experts: E.
    """

    tokens: int
    dim: int
    hidden_dim: int
    num_experts: int


class _DenseSwiGLU(nn.Module):
    """The gated feed-forward block, without bias."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def build_dense(size: LayerSize, kind: str = "mlp") -> Model:
    """Builds the feed-forward block that a token of the sparse layer passes through.

    Args:
        size: of the layer.
        kind: "mlp" or "swiglu".
    """
    if kind == "swiglu":
        return _DenseSwiGLU(size.dim, size.hidden_dim)
    return nn.Sequential(nn.Linear(size.dim, size.hidden_dim), nn.GELU(), nn.Linear(size.hidden_dim, size.dim))


def build_moe(size: LayerSize, seed: int, **options: Any) -> MoE:
    """Builds one of our layers, with parameters that depend on the seed alone.

    Returns:
        The layer, in training mode.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MoE(size.dim, size.num_experts, hidden_dim=size.hidden_dim, **options)


def peer_missing() -> str | None:
    """Says how to install the peer where it is missing."""
    if importlib.util.find_spec("transformers") is None:
        return "needs transformers: pip install 'equipoise[transformers]'"
    return None


def build_peer(ours: MoE, mode: str) -> Model:
    """Builds the peer's block, `MixtralSparseMoeBlock` of Hugging Face transformers, with the parameters of ours.

    Args:
        ours: a layer with the router `topk` and gated experts.
        mode: how the peer computes experts: "eager", "grouped_mm" or "batched_mm".

    Returns:
        The block, which takes [batch, sequence, dim].
    """
    # By name: an extra that most environments, and the type checker's, do not have.
    mixtral: Any = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    experts: Any = ours.experts
    rule: Any = ours.router.rule
    config = mixtral.MixtralConfig(
        hidden_size=ours.dim,
        intermediate_size=experts.hidden_dim,
        num_local_experts=ours.num_experts,
        num_experts_per_tok=rule.top_k,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    # What from_pretrained(..., experts_implementation=mode) sets.
    config._experts_implementation = mode
    block: Model = mixtral.MixtralSparseMoeBlock(config)
    block.load_state_dict(
        {
            "gate.weight": ours.router.weight,
            "experts.gate_up_proj": experts.up,
            "experts.down_proj": experts.down,
        }
    )
    return block
