# SPDX-License-Identifier: Apache-2.0
"""The balance losses of a layer, by name."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from equipoise.estimators import load_balance_loss, marginal_entropy_loss, z_loss
from equipoise.nn._rules import RouteRequest


def balance_losses(weights: Mapping[str, float], logits: Tensor, request: RouteRequest) -> dict[str, Tensor]:
    """Computes the losses that have a weight, each times its weight.

    Args:
        weights: of "load-balance", "marginal-entropy" and "z"; those that are missing are not computed.
        logits: the router's.
        request: with log p, mask and scope.

    Returns:
        Scalars, with gradient.
    """
    over: dict[str, Any] = {"mask": request.mask, "scope": request.scope}
    losses: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name == "load-balance":
            losses[name] = weight * load_balance_loss(request.log_p, **over)
        elif name == "marginal-entropy":
            losses[name] = weight * marginal_entropy_loss(request.log_p, **over)
        else:
            losses[name] = weight * z_loss(logits, **over)
    return losses
