# SPDX-License-Identifier: Apache-2.0
"""Choosing the experts with the largest numbers: the deterministic half of every router, and all of evaluation.

Legend: T rows (tokens), E experts, K experts a row.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equipoise._core import checked_choice
from equipoise.nn._routing import Routing
from equipoise.nn._rules import RouteRequest, at_experts, drop_overflow


def choose_top(
    selection: Float[Tensor, "T E"],
    request: RouteRequest,
    *,
    top_k: int = 1,
    gated: bool = True,
    prices: Float[Tensor, "E"] | None = None,
    work: Int[Tensor, ""] | None = None,
) -> Routing:
    r"""Sends each row to the experts with the largest `selection`, within the capacity if there is one.

    The factor of an expert's output is p_j, with gradient; of several experts, p_j over the sum of those chosen (the
    softmax over the chosen logits). With one expert that ratio would be 1, and the router would get no gradient, so the
    factor is p_j itself. A `Scoring` computes the factors in its own way. If not gated, the factor is 1.

    Args:
        selection: what to compare, any numbers; no gradient flows through it.
        request: of the rule.
        top_k: K.
        gated: whether the router's probabilities multiply the outputs.
        prices: to be passed on.
        work: to be passed on.

    Returns:
        The decision. Ties go to the lowest index when K is 1.

    Raises:
        ValueError: a row that is not masked has NaN or +inf, or nothing but -inf.

    Example:
        >>> import equipoise as eq
        >>> def by_price(logits, request):
        ...     return choose_top(logits.detach() - torch.tensor([9.0, 0.0]), request)
        >>> router = eq.nn.make_router(by_price, None, 2)
        >>> router.route(torch.tensor([[3.0, 0.0], [0.0, 1.0]])).indices.flatten().tolist()
        [1, 1]
    """
    wanted = _largest(selection.detach(), request, top_k)
    return choose(wanted, request, gated=gated, prices=prices, work=work)


def choose(
    wanted: Int[Tensor, "T K"],
    request: RouteRequest,
    *,
    gated: bool,
    prices: Float[Tensor, "E"] | None = None,
    work: Int[Tensor, ""] | None = None,
) -> Routing:
    """Gives each row the experts that a rule chose for it, within the capacity, with their factors as in `choose_top`.

    Args:
        wanted: the experts that the rule chose for each row.
        request: of the rule.
        gated: whether the router's probabilities multiply the outputs.
        prices: to be passed on.
        work: to be passed on.

    Returns:
        The decision.

    Example:
        >>> import equipoise as eq
        >>> def alternate(logits, request):
        ...     return choose(torch.arange(len(logits))[:, None] % request.num_experts, request, gated=False)
        >>> eq.nn.make_router(alternate, 8, 4)(torch.randn(8, 8)).stats.load.tolist()
        [2, 2, 2, 2]
    """
    indices = drop_overflow(wanted, request.num_experts, request.capacity, request.mask, request.scope)
    chosen = indices < request.num_experts
    if gated:
        scores = torch.where(chosen, _gates(wanted, request), 0.0)
    else:
        scores = chosen.to(request.log_p.dtype)
    return request.route(indices, scores, prices=prices, work=work, capacity=request.capacity)


def _gates(wanted: Tensor, request: RouteRequest) -> Tensor:
    """Returns the factors of gated outputs, with gradient."""
    if request.scoring is not None:
        return request.scoring.factors(request.logits, wanted)
    log_p_z = at_experts(request.log_p, wanted)
    return log_p_z.exp() if wanted.shape[1] == 1 else log_p_z.softmax(-1)


def _largest(selection: Tensor, request: RouteRequest, top_k: int) -> Tensor:
    """Returns the top_k experts of each row, in decreasing order, with a check of the values."""
    if request.scoring is not None:
        selection = request.scoring.limit(selection)
    if top_k == 1:
        best, z = selection.max(-1, keepdim=True)
    else:
        best, z = selection.topk(top_k, dim=-1)
    best = best[:, 0] if request.mask is None else torch.where(request.mask, best[:, 0], 0.0)
    return checked_choice(z, best)
