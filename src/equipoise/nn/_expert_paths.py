# SPDX-License-Identifier: Apache-2.0
"""The ways to compute two-layer experts, all with the same result, and the choice between them.

Legend: m rows in groups, E experts, D = dim, H = hidden, U = H, or 2 H for gated experts.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise._core import in_transform
from equipoise.nn._fused import fused_experts
from equipoise.nn._grouped import Grouped
from equipoise.nn._permutation import reshaped
from equipoise.nn._plain_experts import Weights, activate, plain_experts

# Below this many multiplications an expert and product, a batched product over all experts beats one call for each.
_FEW_MULTIPLICATIONS = 2**24
# grouped_mm wants rows of a whole number of these.
_ALIGNMENT_BYTES = 16


def pick_path(groups: Grouped, weights: Weights) -> str:
    """Chooses how to compute: a matter of layout, device, dtype and size, never of values.

    On a CPU "fused", which beats batched products from sizes on that matter; small even groups go through "bmm". On an
    accelerator "bmm" for even groups; for ragged ones "grouped" where `grouped_mm` takes dtype and sizes, else "fused",
    which makes the host wait for the counts.

    Args:
        groups: the rows.
        weights: of the dtype to compute in.

    Returns:
        A key of `PATHS`.
    """
    if groups.rows.device.type == "cpu":
        multiplications = (groups.slots or 0) * weights.down.shape[1] * weights.down.shape[2]
        return "bmm" if groups.slots is not None and multiplications < _FEW_MULTIPLICATIONS else "fused"
    if groups.slots is not None:
        return "bmm"
    return "grouped" if _takes_grouped_mm(weights) else "fused"


def _takes_grouped_mm(weights: Weights) -> bool:
    # Inductor lowers grouped_mm for bfloat16 only; in eager mode float32 and float16 would do too, but the path should
    # not depend on whether a model is compiled.
    if weights.up.dtype != torch.bfloat16:
        return False
    sizes = (weights.up.shape[1], weights.up.shape[2], weights.down.shape[2])
    return all(size * weights.up.element_size() % _ALIGNMENT_BYTES == 0 for size in sizes)


def _fused(groups: Grouped, weights: Weights) -> Tensor:
    w = weights
    if in_transform():  # the operator has no rules for torch.func
        return plain_experts(groups, weights)
    return fused_experts(
        groups.rows.contiguous(), groups.counts, groups.slots, w.up, w.up_bias, w.down, w.down_bias, w.activation
    )


def _bmm(groups: Grouped, weights: Weights) -> Tensor:
    """Two batched products over [E, slots, D]: nothing is read back from the device."""
    if groups.slots is None:
        raise ValueError(
            "compute='bmm' must have even groups, got ragged ones: dispatch with layout='padded', or compute='auto'"
        )
    x = groups.rows.reshape(groups.num_experts, groups.slots, groups.rows.shape[1])
    hidden = activate(_batched_linear(x, weights.up, weights.up_bias), weights.activation)
    return reshaped(_batched_linear(hidden, weights.down, weights.down_bias), groups.rows.shape)


def _batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def _grouped(groups: Grouped, weights: Weights) -> Tensor:
    """Two grouped products with offsets that stay on the device; float32, bfloat16 or float16."""
    places = torch.arange(groups.rows.shape[0], device=groups.rows.device)
    ends = groups.ends()
    owned = (places < ends[-1]).unsqueeze(-1)
    expert = torch.searchsorted(ends, places, right=True).clamp_max(groups.num_experts - 1)
    pre = _grouped_linear(groups.rows, weights.up, weights.up_bias, ends.int(), expert, owned)
    hidden = activate(pre, weights.activation)
    return _grouped_linear(hidden, weights.down, weights.down_bias, ends.int(), expert, owned)


def _grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, expert: Tensor, owned: Tensor
) -> Tensor:
    # Rows behind the last group come back uninitialised, and so do their gradients: neither may get any further.
    out: Tensor = F.grouped_mm(torch.where(owned, x, 0.0), weight.mT, offs=ends)
    return torch.where(owned, out if bias is None else out + bias.index_select(0, expert), 0.0)


PATHS: dict[str, Callable[[Grouped, Weights], Tensor]] = {
    "fused": _fused,
    "bmm": _bmm,
    "grouped": _grouped,
    "loop": plain_experts,
}
