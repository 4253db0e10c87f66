# SPDX-License-Identifier: Apache-2.0
"""`AllToAllDispatcher`: rows travel to the ranks that hold their experts, and outputs travel back.

Legend: T tokens, K choices a token, m rows in groups, E experts, R ranks of the expert axis, e = E / R experts a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

from equipoise._core import compact_repr
from equipoise.distributed._ranks import Ranks
from equipoise.nn import Grouped, LocalDispatcher, Routing
from equipoise.nn._dispatch import LocalMetadata
from equipoise.nn._permutation import gather_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class _Equal:
    """An exchange in which every rank sends every expert of every rank as many rows.

    Attributes:
        slots: rows from each rank for each expert.
    """

    slots: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Uneven:
    """An exchange whose sizes were told first.

    Attributes:
        sent: rows for each rank.
        received: rows from each rank.
        order: the received row that stands at each place when they are sorted by expert.
        place: the place of each received row.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Int[Tensor, "m"]
    place: Int[Tensor, "m"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangeMetadata:
    """What `combine` needs: the way within this rank, and the way between ranks."""

    home: LocalMetadata
    way: _Equal | _Uneven


class AllToAllDispatcher:
    """Groups rows by expert, exchanges them over the expert axis, and groups what arrives by this rank's experts.

    If the routing of every rank is exactly balanced and all ranks have equally many tokens, the splits are equal: no
    counts are sent and no host waits for a device. (Ranks exchange their numbers of tokens while the router works.)
    Otherwise ranks send the counts first, and the rows afterwards.

    The gradient of an expert's parameters is the average over ranks, as for every other parameter under data
    parallelism: what arrives at the experts in the backward pass is divided by the size of the expert axis.

    Args:
        ranks: the ranks of the mesh.

    Example:
        `parallelize` gives every layer such a dispatcher; here on one rank:

        >>> import torch.distributed as dist
        >>> import equipoise as eq
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("expert",))
        >>> eq.distributed.parallelize(eq.nn.MoE(8, 4), mesh).dispatcher
        AllToAllDispatcher(ranks=Ranks(experts=1, data=1))
        >>> dist.destroy_process_group()
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._local = LocalDispatcher("ragged")

    def __repr__(self) -> str:
        return compact_repr(self, ranks=self.ranks)

    def dispatch(self, x: Float[Tensor, "T dim"], routing: Routing) -> tuple[Grouped, ExchangeMetadata]:
        """Takes the tokens to their experts; see `equipoise.nn.Dispatcher`."""
        groups, home = self._local.dispatch(x, routing)
        alike = routing.scope.alike  # read by all ranks, so that a disagreement is found by all
        if alike and routing.exactly_balanced:
            rows, way = self._send_equal(groups)
        else:
            rows, way = self._send_uneven(groups)
        return rows, ExchangeMetadata(home=home, way=way)

    def combine(self, outputs: Float[Tensor, "m dim"], metadata: ExchangeMetadata) -> Float[Tensor, "T dim"]:
        """Returns the experts' outputs to the tokens; see `equipoise.nn.Dispatcher`."""
        way, size = metadata.way, self.ranks.expert_size
        if isinstance(way, _Equal):
            by_rank = outputs.reshape(-1, size, way.slots, outputs.shape[1]).transpose(0, 1)
            rows = self._exchange(by_rank.reshape(outputs.shape), None, None, 1 / size)
        else:
            by_rank = gather_rows(outputs, way.place, way.order.unsqueeze(1), None, None)
            rows = self._exchange(by_rank, way.sent, way.received, 1 / size)
        absent = metadata.home.choice_of.shape[0] - rows.shape[0]  # choices that no expert takes come last
        if absent:
            rows = torch.cat([rows, rows.new_zeros([absent, rows.shape[1]])])
        return self._local.combine(rows, metadata.home)

    def _send_equal(self, groups: Grouped) -> tuple[Grouped, _Equal]:
        """Exchanges [R, e, slots] for [e, R, slots]."""
        size, each, slots = self.ranks.expert_size, groups.num_experts // self.ranks.expert_size, groups.slots
        assert slots is not None
        dim = groups.rows.shape[1]
        arrived = self._exchange(groups.rows, None, None, float(size)).reshape(size, each, slots, dim)
        rows = arrived.transpose(0, 1).reshape(groups.rows.shape)
        counts = torch.full([each], size * slots, dtype=torch.int64, device=rows.device)
        return Grouped(rows=rows, counts=counts, slots=size * slots), _Equal(slots=slots)

    def _send_uneven(self, groups: Grouped) -> tuple[Grouped, _Uneven]:
        """Exchanges counts, then rows, and sorts what arrives by expert."""
        size = self.ranks.expert_size
        outgoing = groups.counts.reshape(size, -1)
        incoming = self.ranks.all_to_all(outgoing)
        sent, received = (tuple(x.sum(1).tolist()) for x in (outgoing, incoming))
        arrived = self._exchange(groups.rows[: sum(sent)], received, sent, float(size))
        expert = torch.arange(incoming.shape[1], device=incoming.device).repeat(size)
        expert = expert.repeat_interleave(incoming.reshape(-1), output_size=sum(received))
        order = expert.argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        rows = gather_rows(arrived, order, place.unsqueeze(1), None, None)
        way = _Uneven(sent=sent, received=received, order=order, place=place)
        return Grouped(rows=rows, counts=incoming.sum(0), slots=None), way

    def _exchange(self, x: Tensor, receive: Sequence[int] | None, send: Sequence[int] | None, factor: float) -> Tensor:
        return _Exchange.apply(x, receive, send, factor, self.ranks)  # pyright: ignore[reportReturnType]


class _Exchange(Function):
    """An all-to-all of rows; the gradient goes the other way, times a factor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, receive: Sequence[int] | None, send: Sequence[int] | None, factor: float, ranks: Ranks
    ) -> Tensor:
        ctx.how = (send, receive, factor, ranks)
        return ranks.all_to_all(x, receive, send)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        receive, send, factor, ranks = ctx.how
        return _Exchange.apply(gradients[0] * factor, receive, send, 1.0, ranks), None, None, None, None
