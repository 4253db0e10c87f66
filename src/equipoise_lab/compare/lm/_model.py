# SPDX-License-Identifier: Apache-2.0
"""The language model: a small transformer whose feed-forward blocks are mixtures of experts.

Legend: B sequences, S positions, V token ids.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from equipoise.nn import MoE
from equipoise.nn._peer_rules import hash_integers

MOST_IDS = 1 << 14
"""How many ids routers see at most."""
_IDS_SEED = 99


class Block(nn.Module):
    """Causal attention, then a feed-forward block or experts, each beside a residual connection."""

    def __init__(self, dim: int, heads: int, feed_forward: nn.Module) -> None:
        """Puts the layers together; `feed_forward` is an `MoE`, or any module [..., dim] -> [..., dim]."""
        super().__init__()
        self.heads, self.feed_forward = heads, feed_forward
        self.attention_norm, self.norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Float[Tensor, "B S dim"], token_ids: Int[Tensor, "B S"]) -> Float[Tensor, "B S dim"]:
        """Computes the residual stream behind the block; token ids are for routers that look at them."""
        batch, positions, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, positions, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, positions, dim))
        hidden = self.norm(x)
        if isinstance(self.feed_forward, MoE):
            return x + self.feed_forward(hidden, token_ids=token_ids)
        return x + self.feed_forward(hidden)


class LanguageModel(nn.Module):
    """Tokens in, logits for the next token out."""

    def __init__(
        self,
        dim: int,
        heads: int,
        context: int,
        feed_forwards: list[nn.Module],
        *,
        vocabulary: int,
        id_length: int = 1,
        init: Callable[[], object] | None = None,
    ) -> None:
        """Builds a model with a block for each of `feed_forwards`, for at most `context` positions.

        `init` is called before the parameters outside the feed-forward blocks are drawn, so that models with different
        ones can share all others.
        """
        super().__init__()
        self.vocabulary, self.id_length = vocabulary, id_length
        if init is not None:
            init()
        self.embedding = nn.Embedding(vocabulary, dim)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.positions = nn.Parameter(0.02 * torch.randn(context, dim))
        self.blocks = nn.ModuleList([Block(dim, heads, feed_forward) for feed_forward in feed_forwards])
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, token_ids: Int[Tensor, "B S"]) -> Float[Tensor, "B S V"]:
        """Predicts the next token at every position, as logits."""
        x: Tensor = self.embedding(token_ids) + self.positions[: token_ids.shape[1]]
        ids = router_ids(token_ids, self.vocabulary, self.id_length)
        for block in self.blocks:
            x = block(x, ids)
        return self.head(self.norm(x))


def router_ids(token_ids: Int[Tensor, "B S"], vocabulary: int, id_length: int) -> Int[Tensor, "B S"]:
    """Makes the ids that routers see, of a token and those before it; before the first token there is token 0.

    They are below `num_router_ids`, hashed where there are more.

    Example:
        >>> router_ids(torch.tensor([[1, 2]]), 128, 2).tolist()
        [[1, 130]]
    """
    ids, before = token_ids, token_ids
    for place in range(1, id_length):
        before = F.pad(before, (1, 0))[:, :-1]
        ids = ids + before * vocabulary**place
    return ids if vocabulary**id_length <= MOST_IDS else hash_integers(ids, _IDS_SEED) % MOST_IDS


def num_router_ids(vocabulary: int, id_length: int) -> int:
    """Returns how many ids routers see."""
    return min(vocabulary**id_length, MOST_IDS)


def make_mlp(dim: int, hidden_dim: int) -> nn.Module:
    """Makes the dense feed-forward block that has the size of one expert."""
    return nn.Sequential(nn.Linear(dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, dim))
