# SPDX-License-Identifier: Apache-2.0
"""Experts in plain torch, one after the other: what every faster way to compute them is compared with.

Everything torch can do to its own operations works here: derivatives of any order, `torch.func`.

Legend: m rows in groups, E experts, D = dim, H = hidden, U = H, or 2 H for gated experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from equipoise.nn._grouped import Grouped


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """The parameters of all experts, stacked: y = activation(x up^T + up_bias) down^T + down_bias.

    Attributes:
        up: [E, U, D].
        up_bias: [E, U] or None.
        down: [E, D, H].
        down_bias: [E, D] or None.
        activation: "gelu", "relu" or "swiglu".
    """

    up: Float[Tensor, "E U D"]
    up_bias: Float[Tensor, "E U"] | None
    down: Float[Tensor, "E D H"]
    down_bias: Float[Tensor, "E D"] | None
    activation: str


def activate(pre: Tensor, activation: str) -> Tensor:
    """Applies the activation of an expert; "swiglu" halves the columns: silu of the first half times the second."""
    if activation == "swiglu":
        gate, up = pre.chunk(2, -1)
        return F.silu(gate) * up
    return F.gelu(pre) if activation == "gelu" else F.relu(pre)


def plain_experts(groups: Grouped, weights: Weights) -> Tensor:
    """Applies each expert to its group of rows; zero for rows behind the last group."""
    w = weights

    def expert(e: int, x: Tensor) -> Tensor:
        pre = F.linear(x, w.up[e], None if w.up_bias is None else w.up_bias[e])
        return F.linear(activate(pre, w.activation), w.down[e], None if w.down_bias is None else w.down_bias[e])

    return experts_by_loop(groups, expert)


def experts_by_loop(groups: Grouped, expert: Callable[[int, Tensor], Any], *, skip_empty: bool = False) -> Tensor:
    """Applies one expert after the other, the obvious way: the twin of every faster path, and how modules are run.

    Args:
        groups: the rows.
        expert: `(e, rows [c, dim]) -> [c, dim]`, the function of expert e.
        skip_empty: do not call an expert that has no rows.

    Returns:
        The outputs, in the layout of the rows; zero for rows behind the last group.

    Example:
        >>> rows = torch.ones(3, 1)
        >>> groups = Grouped(rows=rows, counts=torch.tensor([2, 0]), slots=None)
        >>> experts_by_loop(groups, lambda e, x: 5 * x).flatten()
        tensor([5., 5., 0.])
    """
    even = groups.slots is not None
    sizes: list[int] = [groups.slots or 0] * groups.num_experts if even else groups.counts.tolist()
    parts = groups.rows.split([*sizes, groups.rows.shape[0] - sum(sizes)])
    outputs = [part if skip_empty and part.shape[0] == 0 else expert(e, part) for e, part in enumerate(parts[:-1])]
    return torch.cat([*outputs, torch.zeros_like(parts[-1])])
