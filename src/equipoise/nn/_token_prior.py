# SPDX-License-Identifier: Apache-2.0
"""A prior of the router for each token id: experts specialise from the first step on, and the router learns the rest.

Legend: T rows (tokens), E experts, V token ids.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from equipoise._core import check_at_least
from equipoise.nn._peer_rules import hash_integers
from equipoise.nn._router_checks import check_strength, check_token_ids


@dataclass(frozen=True)
class TokenPrior:
    """A learnt table of logits by token id, which starts at a hash; the option `token_prior` of a router.

    A router starts out nearly uniform, so every expert gets random tokens, and all experts learn the same. A hash of
    the token gives each expert tokens of its own from the first step, but does not learn. With a token prior the
    router's logits are

    .. math::
        a_{ij} = (W x_i)_j + A_{t_i j},

    with t_i the id of token i and A a table that is trained with the rest. A starts at `strength` where j is the hashed
    expert of the id, and at 0 elsewhere: at strength 0 nothing is preferred, and at 6 with 8 experts a token takes its
    hashed expert with probability 0.98. The table is part of the logits, so estimators that are unbiased stay so.

    Attributes:
        vocab_size: V; ids are in [0, V).
        strength: the initial logit of the hashed expert. Routers that sample need a larger one than those that take the
            largest logit.
        seed: picks the hash function. The hash is balanced: every expert has V / E ids, rounded up or down.

    Example:
        >>> import equipoise as eq
        >>> moe = eq.nn.MoE(16, 4, router="switch", token_prior=TokenPrior(256, strength=3.0))
        >>> ids = torch.randint(256, [2, 10])
        >>> moe(torch.nn.Embedding(256, 16)(ids), token_ids=ids).shape
        torch.Size([2, 10, 16])
    """

    vocab_size: int
    strength: float = 6.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        check_at_least("vocab_size", self.vocab_size, 1)
        check_strength(self.strength)


class TokenTable(nn.Module):
    """The table A of a `TokenPrior`: one number for each token id and expert.

    Attributes:
        no_weight_decay: names of parameters that weight decay would pull away from where they start; read by
            `parameter_groups`.

    Example:
        >>> table = TokenTable(TokenPrior(6, strength=2.0), 3)
        >>> table.weight.sum(0).tolist()  # two ids each
        [4.0, 4.0, 4.0]
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self,
        prior: TokenPrior,
        num_experts: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Starts at the hash.

        Args:
            prior: sizes and start.
            num_experts: E.
            device: of the table.
            dtype: of the table.
        """
        super().__init__()
        self.prior = prior
        self.weight = nn.Parameter(torch.empty(prior.vocab_size, num_experts, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Goes back to the hash: ids in the order of their hashes take the experts in turn."""
        vocab_size, num_experts = self.weight.shape
        ids = torch.arange(vocab_size, device=self.weight.device)
        place = hash_integers(ids, self.prior.seed).argsort().argsort()
        chosen = F.one_hot(place % num_experts, num_experts)
        self.weight.copy_(self.prior.strength * chosen.to(self.weight.dtype))

    def forward(self, token_ids: Int[Tensor, "T"], mask: Bool[Tensor, "T"] | None) -> Float[Tensor, "T E"]:
        """Looks ids up.

        Args:
            token_ids: the ids.
            mask: False for rows that are padding, whose ids may be anything.

        Returns:
            What to add to the logits.
        """
        ids = token_ids if mask is None else torch.where(mask, token_ids, 0)
        check_token_ids(ids, self.prior.vocab_size)
        return F.embedding(ids, self.weight)

    def extra_repr(self) -> str:
        """Shows the sizes and the start."""
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}, strength={self.prior.strength}, seed={self.prior.seed}"
