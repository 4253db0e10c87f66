# SPDX-License-Identifier: Apache-2.0
"""The layers of the layer benchmark, ours, the dense one of the same active size and the peer's, and their steps.

Legend: T tokens, E experts, K experts a token.
"""

import importlib
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from equipoise.nn import ROUTERS, MoE, Surrogate, capture, make_router

# The routers that the limits compare, with the capacity factor that each is compared at.
CONTENDERS = {"switch": 1.25, "gm-iw": 1.0, "skip-iw": 1.0}
# The memory of each is held against the dense layer behind it: same kind, same width of what a token passes through.
# The router `dense` passes every token through all experts, and is no sparse layer.
MEMORY = {
    **{name: "dense" for name in ROUTERS if name != "dense"},
    "topk-1": "dense-swiglu",
    "topk-2": "dense-swiglu-2",
}
_DROPPING_CAPACITY = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSize:
    """The sizes of a layer and its batch."""

    tokens: int  # T
    dim: int  # features of a token
    hidden_dim: int  # width of an expert
    num_experts: int  # E


class _DenseSwiGLU(nn.Module):
    """The gated feed-forward block, without bias."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def named_layer(name: str, size: LayerSize, seed: int) -> Any:
    """Builds a layer of the memory measurement: a key or a value of `MEMORY`.

    "topk-2" has `topk` and gated experts, as the peer has; "dense-swiglu-2" is the block that a token of it passes
    through, twice as wide as an expert.
    """
    if name == "dense":
        return nn.Sequential(nn.Linear(size.dim, size.hidden_dim), nn.GELU(), nn.Linear(size.hidden_dim, size.dim))
    if name.startswith("dense-swiglu"):
        width = int(name.removeprefix("dense-swiglu").removeprefix("-") or 1)
        return _DenseSwiGLU(size.dim, size.hidden_dim * width)
    if name.startswith("topk-"):
        return build_moe(size, seed, router="topk", top_k=int(name.removeprefix("topk-")), experts="swiglu")
    return build_moe(size, seed, router=name)


def build_moe(size: LayerSize, seed: int, *, router: str, **options: Any) -> MoE:
    """Builds one of our layers, in training mode, with parameters that depend on the seed alone.

    A router that never drops a token has the capacity factor 1, unless it is a contender.
    """
    holds_all = make_router(router, 1, 1).traits.holds_all
    options["capacity_factor"] = CONTENDERS.get(router, 1.0 if holds_all else _DROPPING_CAPACITY)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MoE(size.dim, size.num_experts, hidden_dim=size.hidden_dim, router=router, **options)


def build_peer(ours: MoE, mode: str) -> nn.Module:
    """Builds the peer's block, `MixtralSparseMoeBlock` of Hugging Face transformers, with the parameters of ours.

    The mode says how it computes experts: "eager", "grouped_mm" or "batched_mm". It takes [batch, sequence, dim].
    """
    # By name: an extra that most environments, and the type checker's, do not have.
    mixtral: Any = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    experts: Any = ours.experts
    config = mixtral.MixtralConfig(
        hidden_size=ours.dim,
        intermediate_size=experts.hidden_dim,
        num_local_experts=ours.num_experts,
        num_experts_per_tok=cast(Any, ours.router.rule).top_k,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    # What from_pretrained(..., experts_implementation=mode) sets.
    config._experts_implementation = mode
    block: nn.Module = mixtral.MixtralSparseMoeBlock(config)
    weights = {"experts.gate_up_proj": experts.up, "experts.down_proj": experts.down}
    block.load_state_dict({"gate.weight": ours.router.weight, **weights})
    return block


def plain_step(layer: nn.Module, x: Float[Tensor, "T dim"], grad: Float[Tensor, "T dim"]) -> None:
    """Forward and backward through the output alone."""
    layer.zero_grad(set_to_none=True)
    x.grad = None
    # A sequence of T tokens, because the peer wants one.
    layer(x.unsqueeze(0)).backward(grad.unsqueeze(0))


def training_step(layer: nn.Module, x: Float[Tensor, "T dim"], grad: Float[Tensor, "T dim"]) -> None:
    """Forward and backward with all that trains the router: score function, weights, balance losses."""
    layer.zero_grad(set_to_none=True)
    x.grad = None
    with capture(layer) as routings:
        y = layer(x)
    Surrogate(0.0)((y * grad).sum(-1), routings).backward()


def routing_step(layer: MoE, x: Float[Tensor, "T dim"]) -> None:
    """Forward and backward of the router alone, gate included."""
    layer.router.zero_grad(set_to_none=True)
    x.grad = None
    routing = layer.router(x)
    loss = routing.log_p.mean() + routing.scores.mean() + sum(routing.balance_losses.values())
    loss.backward()


def difference(ours: MoE, peer: nn.Module, x: Float[Tensor, "T dim"]) -> float:
    """The largest difference between our output, with factors that sum to 1 as the peer's do, and the peer's."""
    with torch.no_grad():
        routing = ours.router(x)
        routing = replace(routing, scores=routing.scores / routing.scores.sum(1, keepdim=True))
        groups, metadata = ours.dispatcher.dispatch(x, routing)
        theirs = peer(x.unsqueeze(0)).squeeze(0)
        return float((ours.dispatcher.combine(ours.experts(groups), metadata) - theirs).abs().max())
