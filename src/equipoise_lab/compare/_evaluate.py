# SPDX-License-Identifier: Apache-2.0
"""How models do on a split: each row at its most probable expert, with and without a capacity.

Legend: r runs, n rows, k experts, C classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.ops import largest
from equipoise_lab.compare._model import MixtureBatch, at_expert, row_losses, within_capacity
from equipoise_lab.compare._task import Split


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How models do on a split.

    Attributes:
        loss: the mean cross-entropy in nats; a dropped row has no output, and so the loss log C.
        accuracy: the fraction of rows whose largest class score is the label's; a dropped row counts as wrong.
        dropped: the fraction of rows that no expert processed.
    """

    loss: Float[Tensor, "r"]
    accuracy: Float[Tensor, "r"]
    dropped: Float[Tensor, "r"]


def slots(factor: float, rows: int, num_experts: int) -> int:
    """Computes how many of the rows an expert may take, as `equipoise.nn.Router` does: rounded up, at least 1.

    Args:
        factor: in units of an even share.
        rows: of the batch.
        num_experts: k.

    Example:
        >>> slots(1.25, 128, 8), slots(1.0, 100, 8)
        (20, 13)
    """
    # In whole numbers: 1.1 * 10 is a little more than 11 in floats.
    return max(math.ceil(Fraction(factor).limit_denominator(10**6) * rows / num_experts), 1)


@torch.no_grad()
def evaluate(
    model: MixtureBatch, split: Split, *, gated: bool, capacity_factors: Sequence[float | None]
) -> list[Evaluation]:
    """Sends each row of a split, as one batch, to its most probable expert, as `equipoise.nn.MoE` does in evaluation.

    Args:
        model: the models.
        split: the rows.
        gated: whether outputs are multiplied by the router's probability.
        capacity_factors: of the experts; None: no limit. Beyond it rows are dropped, the last of the split first.

    Returns:
        How the models do, for each capacity factor.
    """
    runs, num_experts = model.gate.shape[:2]
    y = split.y.expand(runs, -1)
    log_p, outputs = model(split.x.expand(runs, -1, -1))
    best, z = largest(log_p)
    scores = at_expert(outputs, z)
    if gated:
        scores = scores * best.exp().unsqueeze(-1)
    found: list[Evaluation] = []
    for factor in capacity_factors:
        limit = len(split) if factor is None else slots(factor, len(split), num_experts)
        kept = within_capacity(z, num_experts, limit)
        left = scores * kept.unsqueeze(-1)
        right = (left.argmax(-1) == y) & kept
        dropped = 1 - kept.float().mean(-1)
        found.append(Evaluation(row_losses(left, y).mean(-1), right.float().mean(-1), dropped))
    return found
