# SPDX-License-Identifier: Apache-2.0
"""`Routing`: where the rows of one forward pass of one layer went, and why.

Legend: T rows (tokens), E experts, K experts a row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import Record, compact_repr
from equipoise.nn._stats import RoutingStats, routing_stats
from equipoise.sampling import Sample, Scope, this_process


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Routing(Record):
    """A router's decision for T rows, the same record for every router.

    Iterating over it gives (logits, scores, indices), the triple that Hugging Face's routers return.

    Attributes:
        logits: the router's logits, with gradient; float32, or float64 for float64 input.
        log_p: log_softmax(logits), with gradient.
        indices: the experts of each row; E stands for "no expert" (dropped, masked).
        scores: the factor of each expert's output, 0 where there is no expert. With gradient where the router learns
            through it.
        weight: the weight of each row's loss, detached; 0 for masked rows. With a strategy it is p/q times the
            correction for dropped rows, and 0 for dropped rows. With any other router it is 1, for dropped rows too.
        sample: the draw of a strategy in training; None for other routers and in evaluation. If rows draw several
            experts, it has all rounds.
        prices: what each expert costs in logit units, where the router solved for it or keeps an average of it; of
            the first round.
        gap: the gap of the assignment, if one was solved; the sum over rounds.
        work: the passes that a solver took, if it counts them.
        capacity: an upper bound on the rows of any expert; None: no bound. With a bound, all experts are computed in
            one batched product, and a load beyond it is an error.
        mask: rows that take an expert; None for all of them.
        shape: the leading dimensions of the input, x [*shape, dim]; their product is T.
        score_function: whether the router learns by the score function: a surrogate adds the gradient of
            `log_prob()`, times weight and loss.
        own_log_p: log_p with gradient for the router's own parameters and nothing before them, for the score
            function; None: the score function differentiates log_p. See `upstream` of `RoutingOptions`.
        exactly_balanced: whether it is known, without reading a tensor, that every expert has exactly K T / E rows
            and that none is dropped or masked.
        scope: the rows that shared the capacity, which telemetry is computed over.
        balance_losses: scalars to add to the loss, already multiplied by their weights; only those whose weight is not
            0.
        selection: what was compared before any prices, if that is not the logits (see `Scoring`).

    Example:
        >>> import equipoise as eq
        >>> routing = eq.nn.make_router("topk", 8, 4, top_k=2)(torch.randn(3, 5, 8))
        >>> logits, scores, indices = routing
        >>> indices.shape, routing.shape, routing.stats.to_dict()["fraction_dropped"]
        (torch.Size([15, 2]), (3, 5), 0.0)
    """

    logits: Float[Tensor, "T E"]
    log_p: Float[Tensor, "T E"]
    indices: Int[Tensor, "T K"]
    scores: Float[Tensor, "T K"]
    weight: Float[Tensor, "T"]
    mask: Bool[Tensor, "T"] | None
    shape: tuple[int, ...]
    sample: Sample | None = None
    prices: Float[Tensor, "E"] | None = None
    gap: Float[Tensor, ""] | None = None
    work: Int[Tensor, ""] | None = None
    capacity: int | None = None
    score_function: bool = False
    own_log_p: Float[Tensor, "T E"] | None = None
    exactly_balanced: bool = False
    scope: Scope = field(default_factory=this_process)
    balance_losses: Mapping[str, Tensor] = field(default_factory=dict)
    selection: Float[Tensor, "T E"] | None = None

    def __repr__(self) -> str:
        """Shows the sizes, and how the router learns."""
        (rows, experts), k = self.logits.shape, self.indices.shape[1]
        learns = {"capacity": self.capacity, "score_function": self.score_function, "gap": self.gap}
        return compact_repr(self, T=rows, E=experts, K=k, shape=self.shape, **learns)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The draw of every round; empty where nothing was drawn."""
        return () if self.sample is None else self.sample.rounds

    @cached_property
    def kept(self) -> Bool[Tensor, "T"]:
        """Whether at least one expert processes the row."""
        return (self.indices < self.num_experts).any(1)

    def log_prob(self) -> Float[Tensor, "T"]:
        """Computes log p of what each row drew, with gradient, as the score function differentiates it.

        Returns:
            One number a row: of several experts, of all of them in their order; 0 for masked rows, and where nothing
            was drawn.
        """
        if self.sample is None:
            return self.log_p.new_zeros(self.log_p.shape[0])
        return self.sample.log_prob(self.score_log_p)

    @property
    def score_log_p(self) -> Float[Tensor, "T E"]:
        """The log-probabilities as the score function differentiates them: `own_log_p`, or `log_p`."""
        return self.log_p if self.own_log_p is None else self.own_log_p

    @property
    def compared(self) -> Float[Tensor, "T E"]:
        """The numbers that were compared, before prices are subtracted; prices have their units. No gradient."""
        return self.logits.detach() if self.selection is None else self.selection

    @property
    def num_experts(self) -> int:
        """The number of experts, E; also the index that stands for "no expert"."""
        return self.logits.shape[-1]

    @property
    def num_points(self) -> int | Int[Tensor, ""]:
        """Rows that are not masked: a number without a mask, else a tensor, so that nothing waits for a device."""
        return self.logits.shape[0] if self.mask is None else self.mask.sum()

    @cached_property
    def stats(self) -> RoutingStats:
        """Telemetry. It is computed when it is first read, not in the forward pass."""
        return routing_stats(self)

    def __iter__(self) -> Iterator[Tensor]:
        """Yields logits, scores and indices, in this order."""
        yield from (self.logits, self.scores, self.indices)

    def to_routing_map(self) -> tuple[Float[Tensor, "T E"], Bool[Tensor, "T E"]]:
        """Converts to Megatron-core's form.

        Returns:
            The factors as a matrix that is 0 wherever an expert does not process a row, with gradient; and where
            they are not absent, as booleans.
        """
        rows, experts = self.logits.shape
        probs = self.scores.new_zeros([rows, experts + 1]).scatter(1, self.indices, self.scores)
        routing_map = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, self.indices, True)
        return probs[:, :experts], routing_map[:, :experts]
