# SPDX-License-Identifier: Apache-2.0
"""Telemetry of a routing decision, the same for every router.

Legend: T rows (tokens), E experts, K experts a row, n rows that are not masked.
"""

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equipoise.ops import count_groups

if TYPE_CHECKING:
    from equipoise.nn._routing import Routing


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingStats:
    """How one layer routed one batch. Every number is a tensor, so reading the record makes nothing wait.

    Attributes:
        load: rows that each expert processes.
        max_violation: the largest load over the mean load, minus 1 (MaxVio); 0 is balanced.
        load_entropy: the entropy of load / sum(load) as a fraction of log E; 1 is balanced.
        router_entropy: the entropy of a row's router distribution, in nats, averaged over rows.
        fraction_dropped: of the experts that rows asked for, the fraction that does not process them; masked rows ask
            for none.
        effective_sample_size: (sum w)^2 / (n sum w^2), with w the weights of the losses; 1 where all are equal.
        largest_weight: the largest w.
        gap: the optimality gap of the assignment; None where none was solved.
        work: passes over the matrix that a solver took; None where none counts them.
    """

    load: Int[Tensor, "E"]
    max_violation: Float[Tensor, ""]
    load_entropy: Float[Tensor, ""]
    router_entropy: Float[Tensor, ""]
    fraction_dropped: Float[Tensor, ""]
    effective_sample_size: Float[Tensor, ""]
    largest_weight: Float[Tensor, ""]
    gap: Float[Tensor, ""] | None
    work: Int[Tensor, ""] | None

    def to_dict(self) -> dict[str, float | int | list[int]]:
        """Converts to plain numbers, for any logger. What the router does not have is left out.

        Returns:
            Each attribute under its name; `load` as a list.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value.tolist() for name, value in values.items() if value is not None}


@torch.no_grad()
def routing_stats(routing: "Routing") -> RoutingStats:
    """Computes the telemetry of a routing decision. A batch without rows counts as balanced.

    Args:
        routing: of any router.

    Returns:
        The numbers, detached.
    """
    num_experts, k, scope = routing.num_experts, routing.indices.shape[1], routing.scope
    load = scope.total(count_groups(routing.indices.reshape(-1), num_experts + 1)[:num_experts])
    log_p, weight = routing.log_p.detach(), routing.weight.detach()
    entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)
    if routing.mask is not None:
        entropy = torch.where(routing.mask, entropy, 0.0)
    n = torch.as_tensor(routing.num_points, device=log_p.device).to(log_p.dtype)
    sums = torch.stack([n, entropy.sum(), weight.sum(), weight.square().sum()])
    n, uncertainty, weights, squares = scope.total(sums).unbind()
    asked = (n * k).clamp_min(1)
    total = load.sum().to(log_p.dtype)
    share = load / total.clamp_min(1)
    spread = -torch.special.xlogy(share, share).sum() / max(math.log(num_experts), 1e-9)
    sample_size = weights.square() / (n * squares).clamp_min(torch.finfo(log_p.dtype).tiny)
    return RoutingStats(
        load=load,
        max_violation=torch.where(total > 0, share.amax() * num_experts - 1, 0.0),
        load_entropy=torch.where(total > 0, spread, 1.0) if num_experts > 1 else torch.ones_like(spread),
        router_entropy=uncertainty / n.clamp_min(1),
        fraction_dropped=torch.where(n > 0, 1 - total / asked, 0.0),
        effective_sample_size=torch.where(n > 0, sample_size, 1.0),
        largest_weight=scope.largest(weight.amax() if weight.numel() else torch.zeros_like(total)),
        gap=routing.gap,
        work=routing.work,
    )
