# SPDX-License-Identifier: Apache-2.0
"""Dispatchers: how rows reach their experts, and outputs their rows.

Legend: T tokens, K choices a token, E experts, m rows in groups.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import check_one_of, compact_repr
from equipoise.nn._expert_checks import check_tokens, checked_counts
from equipoise.nn._grouped import Grouped
from equipoise.nn._permutation import combine_rows, gather_rows
from equipoise.nn._routing import Routing
from equipoise.ops import count_groups

_LAYOUTS = ("auto", "ragged", "padded")


@runtime_checkable
class Dispatcher(Protocol):
    """The interface of a dispatcher, which brings rows to their experts, and the outputs back to the rows.

    `dispatch` groups rows by expert, and returns them with frozen metadata of the dispatcher's own type. `combine` gets
    the experts' outputs in the layout of the groups, multiplies them by the routing's scores, and adds them up for each
    token.

    Example:
        A dispatcher that keeps the number of rows of every expert:

        >>> import equipoise as eq
        >>> class Counting:
        ...     def __init__(self):
        ...         self.local, self.counts = eq.nn.LocalDispatcher(), []
        ...
        ...     def dispatch(self, x, routing):
        ...         groups, metadata = self.local.dispatch(x, routing)
        ...         self.counts.append(groups.counts.tolist())
        ...         return groups, metadata
        ...
        ...     def combine(self, outputs, metadata):
        ...         return self.local.combine(outputs, metadata)
        >>> moe = eq.nn.MoE(8, 4, router="gm-iw", capacity_factor=1.0, dispatcher=Counting())
        >>> y = moe(torch.randn(12, 8))
        >>> isinstance(moe.dispatcher, Dispatcher), moe.dispatcher.counts
        (True, [[3, 3, 3, 3]])
    """

    def dispatch(self, x: Float[Tensor, "T dim"], routing: Routing) -> tuple[Grouped, Any]:
        """Groups the tokens by expert.

        Args:
            x: the tokens.
            routing: the experts of each token.

        Returns:
            The groups, and what `combine` needs to know.
        """
        ...

    def combine(self, outputs: Float[Tensor, "m dim"], metadata: Any) -> Float[Tensor, "T dim"]:
        """Returns the experts' outputs to the tokens.

        Args:
            outputs: the experts' outputs, in the layout of the groups.
            metadata: from `dispatch`.

        Returns:
            The sum over each token's experts of score times output, in float32 or better, given in the dtype of x;
            zero for a token that no expert processed.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalMetadata:
    """The map between choices (token t, i-th expert: t * K + i) and rows of the groups, in both directions.

    Attributes:
        scores: the factor of each choice.
        choice_of: the choice that each row holds; of an empty row any.
        row_of: the row of each choice; of a dropped choice any.
        empty: rows that hold no choice; None: there is none, or nobody reads them.
        dropped: choices that have no row; None: there is none.
        dtype: of the tokens.
        dim: features of a token.
    """

    scores: Float[Tensor, "T K"]
    choice_of: Int[Tensor, "m"]
    row_of: Int[Tensor, "T K"]
    empty: Bool[Tensor, "m"] | None
    dropped: Bool[Tensor, "T K"] | None
    dtype: torch.dtype
    dim: int


class LocalDispatcher:
    """Groups rows within one process. No shape depends on values, and no table of T x E is made.

    An exactly balanced routing gives even groups without padding. Otherwise rows are sorted by expert without gaps
    ("ragged", dropped choices last), or, where a capacity is known, each expert has that many slots and zero rows pad
    them ("padded"). Ragged groups have no padding to compute; even ones need no count on the host.

    Args:
        layout: "auto" takes ragged groups on a CPU and without a capacity, padded ones on other devices. "ragged" and
            "padded" are used as they are; padded groups without a capacity have T slots an expert.

    Example:
        >>> import equipoise as eq
        >>> rule = lambda logits, request: request.route(logits.argmax(-1, True), logits.new_ones(4, 1))
        >>> router = eq.nn.Router(2, 2, rule)
        >>> x = torch.randn(4, 2)
        >>> dispatcher = eq.nn.LocalDispatcher()
        >>> groups, metadata = dispatcher.dispatch(x, router(x))
        >>> torch.equal(dispatcher.combine(groups.rows, metadata), x)
        True
    """

    def __init__(self, layout: str = "auto") -> None:
        check_one_of("layout", layout, _LAYOUTS)
        self.layout = layout

    def __repr__(self) -> str:
        return compact_repr(self, layout=self.layout)

    def dispatch(self, x: Float[Tensor, "T dim"], routing: Routing) -> tuple[Grouped, LocalMetadata]:
        """Groups the tokens by expert; see `Dispatcher`."""
        (num_tokens, k), num_experts = routing.indices.shape, routing.num_experts
        check_tokens("x", x, num_tokens, None)
        experts = routing.indices.reshape(-1)
        # Stable, so that the rows of a group are in the order of the tokens; "no expert" is the largest label.
        order = experts.argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        counts = count_groups(experts, num_experts + 1)[:num_experts]
        slots = self._slots(routing, x.device)
        dropped = None if routing.exactly_balanced else routing.indices >= num_experts
        choice_of, row_of, empty = order, place, None
        if slots is not None and x.device.type == "cpu":  # elsewhere looking would make the host wait
            counts = checked_counts(counts, slots, routing.exactly_balanced)
        if slots is not None and not routing.exactly_balanced:
            choice_of, row_of, empty = _padded(experts, place, counts, slots)
        metadata = LocalMetadata(
            scores=routing.scores,
            choice_of=choice_of,
            row_of=row_of.reshape(num_tokens, k),
            empty=empty,
            dropped=dropped,
            dtype=x.dtype,
            dim=x.shape[1],
        )
        rows = gather_rows(x, choice_of, metadata.row_of, empty, dropped)
        return Grouped(rows=rows, counts=counts, slots=slots), metadata

    def combine(self, outputs: Float[Tensor, "m dim"], metadata: LocalMetadata) -> Float[Tensor, "T dim"]:
        """Returns the experts' outputs to the tokens; see `Dispatcher`."""
        m = metadata
        check_tokens("outputs", outputs, m.choice_of.shape[0], m.dim)
        return combine_rows(outputs, m.scores, m.choice_of, m.row_of, m.empty, m.dropped).to(m.dtype)

    def _slots(self, routing: Routing, device: torch.device) -> int | None:
        """The rows to reserve for each expert; None for ragged groups."""
        num_tokens, each = routing.indices.shape
        if routing.exactly_balanced:
            return num_tokens * each // routing.num_experts
        if self.layout == "padded":
            return num_tokens if routing.capacity is None else min(routing.capacity, num_tokens)
        if self.layout == "ragged" or device.type == "cpu" or routing.capacity is None:
            return None
        return min(routing.capacity, num_tokens)


def _padded(experts: Tensor, place: Tensor, counts: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Spreads sorted choices over slots; returns the choice of each slot, the slot of each choice, the empty slots."""
    num_experts = counts.shape[0]
    num_rows = num_experts * slots
    starts = torch.cat([counts.cumsum(0) - counts, counts.new_zeros(1)])
    row_of = experts * slots + place - starts[experts]
    # One slot too many takes in the choices without an expert; what it holds is cut off.
    target = torch.where(experts < num_experts, row_of, num_rows)
    choices = torch.arange(experts.shape[0], device=experts.device)
    choice_of = torch.full([num_rows + 1], -1, device=experts.device).scatter_(0, target, choices)[:num_rows]
    empty = choice_of < 0
    return choice_of.clamp_min(0), target.clamp_max(max(num_rows - 1, 0)), empty
