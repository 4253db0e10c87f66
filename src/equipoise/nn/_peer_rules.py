# SPDX-License-Identifier: Apache-2.0
"""Rules without state that people would compare with: Switch, top-k, BASE, S-BASE, hash, and all experts at once.

To add a router, write its rule and add a row to the table at the end.

Legend: T rows (tokens), E experts, K experts a row.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equipoise._core import check_at_least, check_seed
from equipoise.nn._named_router import NamedRouter, without_buffers
from equipoise.nn._routing import Routing
from equipoise.nn._rules import RouteRequest
from equipoise.nn._selection import choose, choose_top


@dataclass(frozen=True)
class TopK:
    """Sends each row to the K experts of largest probability, gated.

    With K = 1 and a limit this is Switch: rows beyond an expert's capacity are dropped, the last of the batch first.
    With K = 2 and no limit it is Mixtral's.

    Attributes:
        top_k: K.
        limited: whether the layer's capacity holds in training.

    References:
        Shazeer, Mirhoseini, Maziarz, Davis, Le, Hinton, Dean, Outrageously large neural networks (2017).
        Fedus, Zoph, Shazeer, Switch transformers (2021).
        Jiang and others, Mixtral of experts (2024).
    """

    top_k: int = 1
    limited: bool = False
    gated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Checks the number of experts a row."""
        check_at_least("top_k", self.top_k, 1)

    def __call__(self, logits: Float[Tensor, "T E"], request: RouteRequest) -> Routing:
        """Chooses experts.

        Args:
            logits: the router's.
            request: everything else.

        Returns:
            The decision.
        """
        return choose_top(logits, request, top_k=self.top_k)


@dataclass(frozen=True)
class _BalancedInTraining(ABC):
    """Balances the batch in training; in evaluation each row takes the expert of largest probability. Gated by p."""

    gated: ClassVar[bool] = True
    limited: ClassVar[bool] = True
    top_k: int = 1

    def __post_init__(self) -> None:
        """Checks the number of experts a row."""
        check_at_least("top_k", self.top_k, 1)

    def __call__(self, logits: Float[Tensor, "T E"], request: RouteRequest) -> Routing:
        """Chooses experts.

        Args:
            logits: the router's.
            request: everything else.

        Returns:
            The decision; in training with the prices, and what the solver says of itself.
        """
        if request.training:
            return self._balance(logits, request)
        return choose_top(logits, request, top_k=self.top_k)

    @abstractmethod
    def _balance(self, logits: Float[Tensor, "T E"], request: RouteRequest) -> Routing: ...


@dataclass(frozen=True)
class Base(_BalancedInTraining):
    """Solves the balanced assignment of the logits exactly, without noise (temperature 0), gated by p.

    With `top_k` = K every row takes K different experts. In evaluation the rule takes the experts of largest
    probability, as BASE layers do. Nothing balances those: on a language model nearly all tokens of a layer took
    the same expert. So the router `base` evaluates by prices unless told otherwise.

    Attributes:
        top_k: K.

    References:
        Lewis, Bhosale, Dettmers, Goyal, Zettlemoyer, BASE layers (2021).
    """

    assigns_all: ClassVar[bool] = True

    def _balance(self, logits: Float[Tensor, "T E"], request: RouteRequest) -> Routing:
        scope, (rows, num_experts) = request.scope, logits.shape
        capacity = max(scope.count(rows), 1) if request.capacity is None else request.capacity
        a = scope.assign(logits.detach(), capacity, top_k=self.top_k, mask=request.mask)
        return replace(
            choose(a.z, replace(request, capacity=None), gated=True, prices=a.prices),
            gap=a.gap,
            capacity=request.capacity,
            exactly_balanced=scope.ranks == 1 and request.mask is None and capacity * num_experts == self.top_k * rows,
        )


@dataclass(frozen=True)
class SinkhornBase(_BalancedInTraining):
    """Balances the router's distribution in expectation, and takes the largest balanced probability; gated by p.

    The argmax of a balanced distribution is not quite balanced, so that rows beyond the capacity are dropped. In
    evaluation each row takes the expert of largest probability.

    References:
        Clark and others, Unified scaling laws for routed language models (2022), section 3.1.
    """

    def _balance(self, logits: Float[Tensor, "T E"], request: RouteRequest) -> Routing:
        balanced = request.scope.sinkhorn(logits.detach(), mask=request.mask)
        return choose_top(balanced.log_p, request, top_k=self.top_k, prices=balanced.prices, work=balanced.iterations)


@dataclass(frozen=True)
class Hash:
    """Sends each row to an expert by a fixed hash of its token id; of its position where no ids are given. No gate.

    Nothing is learnt: the logits are computed for the record, and no gradient reaches them.

    Attributes:
        seed: picks one of many hash functions; give each layer its own.

    References:
        Roller, Sukhbaatar, Szlam, Weston, Hash layers for large sparse models (2021).
    """

    seed: int = 0
    reads_logits: ClassVar[bool] = False
    gated: ClassVar[bool] = False
    top_k: ClassVar[int] = 1
    limited: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Checks the seed."""
        check_seed("seed", self.seed)

    def __call__(self, logits: Float[Tensor, "T E"], request: RouteRequest) -> Routing:
        """Chooses experts.

        Args:
            logits: only their shape matters.
            request: everything else.

        Returns:
            The decision.
        """
        keys = request.positions if request.token_ids is None else request.token_ids
        z = hash_integers(keys, self.seed) % logits.shape[-1]
        return choose(z.unsqueeze(1), request, gated=False)


def hash_integers(keys: Int[Tensor, "..."], seed: int = 0) -> Int[Tensor, "..."]:
    """Scrambles integers: three rounds of multiply and xor-shift on 62 bits, each of which is invertible.

    Args:
        keys: any integers.
        seed: picks the function.

    Returns:
        int64 in [0, 2^62).

    Example:
        >>> (hash_integers(torch.arange(8)) % 4).tolist()
        [...]
    """
    bits = (1 << 62) - 1
    x = (keys.long() + (seed * 0x1E3779B97F4A7C15) % bits) & bits
    for multiplier in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB, 0x2545F4914F6CDD1D):
        x = ((x ^ (x >> 31)) * multiplier) & bits  # int64 products wrap around, as they should
    return x ^ (x >> 31)


@dataclass(frozen=True)
class Dense:
    r"""Runs every expert on every row and averages their outputs with the router's probabilities: K = E.

    The layer's output is :math:`\sum_j p_j e_j(x)`, differentiable in everything, so its gradient is exact: that of
    the loss of the **average output**. The paper's objective is the **average loss** :math:`\sum_j p_j f(e_j(x))`, an
    expectation over experts of the loss under each. The two agree only where the loss is linear in the layer's output;
    for a convex loss that of the average output is smaller (Jensen's inequality). So this is what a mixture without
    sparsity reaches, at E times the cost, not the gradient that `skip-iw` or `gm-iw` estimate. That one needs the
    loss under every expert, which a layer does not see; `equipoise.reference` enumerates it.
    """

    gated: ClassVar[bool] = True
    top_k: ClassVar[int] = 1  # when it is evaluated by prices, which is sparse
    limited: ClassVar[bool] = False

    def __call__(self, logits: Float[Tensor, "T E"], request: RouteRequest) -> Routing:
        """Takes all experts.

        Args:
            logits: the router's.
            request: everything else.

        Returns:
            The decision.
        """
        rows, num_experts = logits.shape
        indices = torch.arange(num_experts, device=logits.device).expand(rows, num_experts)
        scoring = request.scoring
        p = request.log_p.exp() if scoring is None else scoring.factors(request.logits, indices)
        return request.route(indices, p, capacity=max(rows, 1))


PEER_ROUTERS = (
    NamedRouter(
        name="switch",
        make=without_buffers(partial(TopK, 1, limited=True)),
        balance_loss=0.01,
        doc="the most probable expert, gated; rows beyond the capacity are dropped",
    ),
    NamedRouter(
        name="topk",
        make=without_buffers(TopK),
        options=("top_k",),
        balance_loss=0.01,
        doc="the K most probable experts, gated by their renormalised probabilities; no capacity",
    ),
    NamedRouter(
        name="base",
        make=without_buffers(Base),
        options=("top_k",),
        evaluation="priced",
        doc="the exact balanced assignment of the logits, with K experts a row, gated",
    ),
    NamedRouter(
        name="s-base",
        make=without_buffers(SinkhornBase),
        doc="the largest probability after balancing in expectation, gated",
    ),
    NamedRouter(
        name="hash",
        make=without_buffers(Hash),
        options=("seed",),
        inert="a hash routes without looking at the router's probabilities",
        doc="a fixed hash of the token ids if given, else of the position; not gated",
    ),
    NamedRouter(
        name="dense",
        make=without_buffers(Dense),
        doc="all experts, averaged with the router's probabilities; no capacity",
    ),
)
"""The rules of this file as routers with a name."""
