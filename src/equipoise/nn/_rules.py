# SPDX-License-Identifier: Apache-2.0
"""What a routing rule is: from logits to experts for each row. A router of your own is one function or module.

Legend: T rows (tokens), E experts, K experts a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise.estimators import read_traits
from equipoise.nn._router_checks import check_choice
from equipoise.nn._routing import Routing
from equipoise.nn._scoring import Scoring
from equipoise.ops import count_groups
from equipoise.sampling import THIS_PROCESS, Scope, this_process


@dataclass(frozen=True, kw_only=True, eq=False)
class RouteRequest:
    """What a rule may take into account besides the logits.

    Attributes:
        logits: the router's, with gradient; at least float32.
        log_p: log_softmax(logits), with gradient.
        capacity: rows that an expert may take; None: no limit.
        mask: rows that take an expert; None for all of them.
        token_ids: an integer for each row, if the caller gave them.
        positions: the index of each row along the last of the leading dimensions of the input: its place in its
            sequence.
        training: whether the layer is in training mode.
        temperature: the temperature of the proposal, for rules that sample.
        eps: the mixture weight of the proposal, for rules that mix; None: the rule's own.
        generator: where randomness comes from; None is torch's global stream.
        shape: the leading dimensions of the input, x [*shape, dim]; None: there was one, of T rows.
        scoring: what the logits mean; None: a softmax, and factors by the rule.
        selection: what the rule compares, if that is not the logits.
        scope: the rows that share the capacity: those of the logits, or those of several ranks.

    Example:
        A rule that sends every row to expert 0:

        >>> import equipoise as eq
        >>> def first(logits, request):
        ...     return request.route(torch.zeros(len(logits), 1, dtype=torch.int64), logits.new_ones(len(logits), 1))
        >>> eq.nn.make_router(first, 8, 4)(torch.randn(6, 8)).stats.load.tolist()
        [6, 0, 0, 0]
    """

    logits: Float[Tensor, "T E"]
    log_p: Float[Tensor, "T E"]
    capacity: int | None
    mask: Bool[Tensor, "T"] | None
    token_ids: Int[Tensor, "T"] | None
    positions: Int[Tensor, "T"]
    training: bool
    temperature: float | int | Float[Tensor, ""]
    generator: torch.Generator | None
    eps: Float[Tensor, ""] | None = None
    shape: tuple[int, ...] | None = None
    scoring: Scoring | None = None
    selection: Float[Tensor, "T E"] | None = None
    scope: Scope = field(default_factory=this_process)

    def route(
        self,
        indices: Int[Tensor, "..."],
        scores: Float[Tensor, "..."],
        weight: Float[Tensor, "T"] | None = None,
        **known: Any,
    ) -> Routing:
        """Makes the record of a rule's decision: masked rows lose their experts, and rows without one their factor.

        Args:
            indices: the experts of each row, int64 [T, K]; E stands for "no expert". A row's experts differ from each
                other.
            scores: the factor of each expert's output, [T, K].
            weight: the weight of each row's loss; None: 1 for rows that are not masked.
            known: other fields of `Routing` that the rule knows: sample, prices, gap, work, capacity, score_function,
                exactly_balanced.

        Returns:
            The record.
        """
        rows, mask = self.logits.shape[0], self.mask
        check_choice(indices, scores, rows)
        if mask is not None:
            indices = torch.where(mask.unsqueeze(1), indices, self.num_experts)
            scores = torch.where(mask.unsqueeze(1), scores, 0.0)
        if weight is None:
            weight = self.logits.new_ones(rows) if mask is None else mask.to(self.logits.dtype)
        return Routing(
            logits=self.logits,
            log_p=self.log_p,
            indices=indices,
            scores=scores,
            weight=weight.detach(),
            mask=mask,
            shape=(rows,) if self.shape is None else self.shape,
            selection=self.selection,
            scope=self.scope,
            **known,
        )

    @property
    def num_experts(self) -> int:
        """The number of experts, E."""
        return self.log_p.shape[-1]


@runtime_checkable
class RoutingRule(Protocol):
    """Anything callable like this: a function, an object, or, where there is state, an `nn.Module` with buffers.

    `RuleTraits` lists the optional attributes of a rule, with their defaults.

    Example:
        >>> import equipoise as eq
        >>> def largest(logits, request):
        ...     return eq.nn.choose_top(logits.detach(), request)
        >>> eq.nn.MoE(8, 4, router=largest)(torch.randn(5, 8)).shape
        torch.Size([5, 8])
    """

    def __call__(self, logits: Float[Tensor, "T E"], request: RouteRequest, /) -> Routing:
        """Chooses experts.

        Args:
            logits: what to compare: the router's logits, with gradient; at least float32. With a `Scoring`, what it
                compares.
            request: everything else.

        Returns:
            The decision, from `request.route(indices, scores, ...)`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RuleTraits:
    """The optional attributes of a rule, with their defaults.

    Attributes:
        top_k: K, which multiplies the capacity.
        limited: whether the layer's capacity factor applies in training.
        assigns_all: whether every row gets an expert. If the rule is limited too, it needs a capacity factor of at
            least 1.
        mixes: whether it takes `RouteRequest.eps`.
        reads_logits: whether its choice depends on the logits. If not, prices in logit units mean nothing.
        gated: whether the router's probabilities multiply the experts' outputs, for `evaluation="priced"`.
        factors: computes the factors of the experts' outputs from log_p and indices, for `evaluation="priced"`; None:
            those of `choose_top`.
        observe: called with each `Routing` after its step, to update the rule's state; None: it has none.

    Example:
        >>> RuleTraits().top_k, RuleTraits().assigns_all
        (1, False)
    """

    top_k: int = 1
    limited: bool = True
    assigns_all: bool = False
    mixes: bool = False
    reads_logits: bool = True
    gated: bool = True
    factors: Callable[[Tensor, Tensor], Tensor] | None = None
    observe: Callable[..., object] | None = None

    @property
    def holds_all(self) -> bool:
        """Whether the capacity must hold every row."""
        return self.assigns_all and self.limited


def rule_traits(rule: RoutingRule) -> RuleTraits:
    """Reads the attributes of a rule, with the defaults for those that it does not have.

    Args:
        rule: any rule.

    Returns:
        The attributes.
    """
    return read_traits(RuleTraits, rule)


def drop_overflow(
    indices: Int[Tensor, "T K"],
    num_experts: int,
    capacity: int | None,
    mask: Bool[Tensor, "T"] | None = None,
    scope: Scope = THIS_PROCESS,
) -> Int[Tensor, "T K"]:
    """Limits every expert to its first `capacity` rows, by position; all first choices come before all second ones.

    Args:
        indices: the experts that each row chose; `num_experts` stands for "no expert".
        num_experts: E.
        capacity: rows that an expert may take; None: no limit.
        mask: rows that take an expert; the others take up no room.
        scope: the rows that share the capacity; those of lower ranks come first.

    Returns:
        The experts that process each row; `num_experts` where one has no room, or the row is masked.

    Example:
        >>> drop_overflow(torch.tensor([[0], [0], [1], [0]]), 2, 2).flatten()
        tensor([0, 0, 1, 2])
    """
    if mask is not None:
        indices = torch.where(mask.unsqueeze(-1), indices, num_experts)
    if capacity is None:
        return indices
    asked = indices.T.reshape(-1)  # choice by choice, rows in order
    choice = torch.arange(indices.shape[1], dtype=torch.float32, device=asked.device)
    keys = choice.repeat_interleave(indices.shape[0])
    rank = scope.rank_within_groups(asked, keys, scope.total(count_groups(asked, num_experts + 1)))
    kept = torch.where(rank < capacity, asked, num_experts)
    return kept.reshape(indices.shape[1], indices.shape[0]).T


def at_experts(x: Float[Tensor, "T E"], indices: Int[Tensor, "T K"]) -> Float[Tensor, "T K"]:
    """Gathers x at the experts of each row; 0 where there is none.

    Args:
        x: one number for each row and expert.
        indices: experts, with E for "no expert".

    Returns:
        [T, K], with gradient for x.
    """
    num_experts = x.shape[-1]
    return torch.where(indices < num_experts, x.gather(1, indices.clamp_max(num_experts - 1)), 0.0)
