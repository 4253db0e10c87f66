# SPDX-License-Identifier: Apache-2.0
"""Which losses a routing decision answers for, and with what weight.

Legend: T rows (tokens), all sequences one after the other.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise.nn._routing import Routing
from equipoise.sampling import THIS_PROCESS, Scope

CREDITS = ("token", "sequence", "batch")
WEIGHTS = ("router", "all", "none")


def counted_rows(mask: Bool[Tensor, " T"] | None, routings: Sequence[Routing]) -> Bool[Tensor, " T"] | None:
    """Finds the rows whose losses count: those that the caller does not leave out, and no layer has masked.

    Args:
        mask: the caller's; None for all rows.
        routings: of all layers.

    Returns:
        None for all rows.
    """
    for layer in routings:
        if layer.mask is not None:
            mask = layer.mask if mask is None else mask & layer.mask
    return mask


@torch.no_grad()
def product_weight(routings: Sequence[Routing], dtype: torch.dtype) -> Float[Tensor, " T"]:
    """Multiplies the weights of each row over the layers: W_i = prod_l w_i^l.

    Args:
        routings: of all layers.
        dtype: of the result.

    Returns:
        W, detached.
    """
    weight = routings[0].weight.to(dtype)
    for layer in routings[1:]:
        weight = weight * layer.weight
    return weight


@torch.no_grad()
def credited(
    advantage: Float[Tensor, " T"], shape: Sequence[int], credit: str, scope: Scope = THIS_PROCESS
) -> Float[Tensor, " T"]:
    """Adds up, for each row, the advantages that its decisions answer for.

    Args:
        advantage: f_i - b_i, times W_i where all terms carry weights.
        shape: of the tokens; the last axis is the position in a sequence.
        credit: "token": its own; "sequence": its own and those after it in its sequence; "batch": all.
        scope: the rows that credit "batch" is about: those that share a capacity.

    Returns:
        [T].

    Example:
        >>> credited(torch.tensor([1.0, 2.0, 3.0, 4.0]), [2, 2], "sequence")
        tensor([3., 2., 7., 4.])
    """
    if credit == "token":
        return advantage
    if credit == "batch":
        return scope.total(advantage.sum()).expand_as(advantage)
    by_sequence = advantage.reshape(*shape) if len(shape) > 0 else advantage
    return by_sequence.flip(-1).cumsum(-1).flip(-1).reshape(-1)
