# SPDX-License-Identifier: Apache-2.0
"""The language model: a small transformer whose feed-forward blocks are mixtures of experts.

Legend: B sequences, S positions, V bytes of the vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from equipoise.nn import MoE
from equipoise_lab.compare.lm._text import VOCABULARY


class Block(nn.Module):
    """Causal attention, then a feed-forward block or experts, each beside a residual connection."""

    def __init__(self, dim: int, heads: int, feed_forward: nn.Module) -> None:
        """Puts the layers together.

        Args:
            dim: features of a token.
            heads: of the attention.
            feed_forward: an `MoE`, or any module [..., dim] -> [..., dim].
        """
        super().__init__()
        self.heads, self.feed_forward = heads, feed_forward
        self.attention_norm, self.norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Float[Tensor, "B S dim"], token_ids: Int[Tensor, "B S"]) -> Float[Tensor, "B S dim"]:
        """Computes the residual stream behind the block.

        Args:
            x: the residual stream.
            token_ids: for routers that look at them.

        Returns:
            The new one.
        """
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
    """Bytes in, logits for the next byte out."""

    def __init__(
        self,
        dim: int,
        heads: int,
        context: int,
        feed_forwards: list[nn.Module],
        *,
        id_bytes: int = 1,
        init: Callable[[], object] | None = None,
    ) -> None:
        """Builds the model.

        Args:
            dim: features of a token.
            heads: of the attention.
            context: positions at most.
            feed_forwards: one for each block.
            id_bytes: what routers see as the id of a token: 1, the byte; 2, the byte and the one before.
            init: called before the parameters outside the feed-forward blocks are drawn, so that models with different
                ones can share all others.
        """
        super().__init__()
        self.id_bytes = id_bytes
        if init is not None:
            init()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.positions = nn.Parameter(0.02 * torch.randn(context, dim))
        self.blocks = nn.ModuleList([Block(dim, heads, feed_forward) for feed_forward in feed_forwards])
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, token_ids: Int[Tensor, "B S"]) -> Float[Tensor, "B S V"]:
        """Predicts the next byte at every position.

        Args:
            token_ids: bytes.

        Returns:
            The logits.
        """
        x: Tensor = self.embedding(token_ids) + self.positions[: token_ids.shape[1]]
        ids = router_ids(token_ids, self.id_bytes)
        for block in self.blocks:
            x = block(x, ids)
        return self.head(self.norm(x))


def router_ids(token_ids: Int[Tensor, "B S"], id_bytes: int) -> Int[Tensor, "B S"]:
    """Makes the ids that routers see, in [0, VOCABULARY**id_bytes); before the first byte there is byte 0.

    Example:
        >>> router_ids(torch.tensor([[1, 2]]), 2).tolist()
        [[1, 130]]
    """
    ids, before = token_ids, token_ids
    for place in range(1, id_bytes):
        before = F.pad(before, (1, 0))[:, :-1]
        ids = ids + before * VOCABULARY**place
    return ids


def make_mlp(dim: int, hidden_dim: int) -> nn.Module:
    """Makes the dense feed-forward block that has the size of one expert."""
    return nn.Sequential(nn.Linear(dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, dim))
