# SPDX-License-Identifier: Apache-2.0
"""The balance losses of a layer, by name."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from equipoise.estimators import conditional_entropy_loss, load_balance_loss, marginal_entropy_loss, z_loss
from equipoise.nn._rules import RouteRequest

_OF_LOG_P: dict[str, Callable[..., Tensor]] = {
    "load-balance": load_balance_loss,
    "marginal-entropy": marginal_entropy_loss,
    "conditional-entropy": conditional_entropy_loss,
}


def balance_losses(weights: Mapping[str, float], logits: Tensor, request: RouteRequest) -> dict[str, Tensor]:
    """Computes the losses that have a weight, each times its weight.

    Args:
        weights: of "load-balance", "marginal-entropy", "conditional-entropy" and "z"; the others are not computed.
        logits: the router's.
        request: with log p, mask and scope.

    Returns:
        Scalars, with gradient.
    """
    over: dict[str, Any] = {"mask": request.mask, "scope": request.scope}
    return {
        name: weight * (z_loss(logits, **over) if name == "z" else _OF_LOG_P[name](request.log_p, **over))
        for name, weight in weights.items()
    }
