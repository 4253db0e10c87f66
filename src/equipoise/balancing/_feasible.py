# SPDX-License-Identifier: Apache-2.0
"""Whether a problem has a solution at all, read off its values.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions, b problems in one.
"""

import torch
from torch import Tensor

from equipoise._core import row_name


def require_rows(logits: Tensor, mask: Tensor | None) -> None:
    """Requires rows that are free of NaN and +inf and have an expert to go to; [..., n, k] and [..., n]."""
    # A maximum passes NaN on, so one number a row tells all three.
    best = logits.amax(-1)
    bad = ~best.isfinite()
    if mask is not None:
        bad &= mask
    if not bool(bad.any()):
        return
    value = float(best[bad][0])
    if value == -torch.inf:
        raise ValueError(
            f"logits must leave every row an expert, got -inf for all experts in {row_name(bad)}: mask rows that "
            "should take none (mask=), or allow a pair"
        )
    raise ValueError(
        f"logits must be finite or -inf (a forbidden pair), got {value} in {row_name(bad)}: find where it comes from, "
        "or mask the row (mask=)"
    )


def require_capacity(logits: Tensor, mask: Tensor | None, target: Tensor, rows: Tensor) -> None:
    """Requires targets [..., k] >= 0 that sum to at least the rows [...] and leave every row an expert."""
    if target.numel() == 0:
        return
    least = float(target.min())
    if least < 0:
        raise ValueError(f"capacity must be >= 0, got {least:g}: give the number of rows an expert may take")
    slots = target.sum(-1)
    bad = slots < rows * (1 - 1e-9)
    if bool(bad.any()):
        raise ValueError(
            f"capacity must hold every row: {int(rows[bad][0])} rows need as many slots, got "
            f"{float(slots[bad][0]):g} in {target[bad][0].tolist()}: raise capacity, or mask rows (mask=)"
        )
    if least == 0:
        _require_open_experts(logits, mask, target)


def _require_open_experts(logits: Tensor, mask: Tensor | None, target: Tensor) -> None:
    """Requires that every row may go to an expert whose target is above 0."""
    closed = (target == 0)[..., None, :]
    bad = logits.masked_fill(closed, -torch.inf).amax(-1) == -torch.inf
    if mask is not None:
        bad &= mask
    if bool(bad.any()):
        raise ValueError(
            f"capacity must leave every row an expert, got 0 for all that {row_name(bad)} may go to: raise capacity, "
            "or allow more pairs (logits above -inf)"
        )


def require_pattern(logits: Tensor, mask: Tensor | None, target: Tensor, prices: Tensor) -> None:
    """Raises if forbidden pairs leave some experts more rows than they may take; [b, n, k], [b, n], [b, k], [b, k].

    By Hall's theorem that is what infeasible means: rows that may go to a set S of experts only, more of them than S
    holds. The prices of such a set run away from the others (the dual falls without bound along its indicator), so the
    sets to try are the first m experts in the order of falling prices, for every m.
    """
    if not bool((logits == -torch.inf).any()):
        return
    order = prices.argsort(-1, descending=True)
    rank = order.argsort(-1)
    # The set of the first m experts confines a row when the last of the row's experts is among them.
    last = rank[:, None].expand(logits.shape).masked_fill(logits == -torch.inf, -1).amax(-1)
    confined = torch.zeros_like(target)
    counts = torch.ones_like(last, dtype=target.dtype) if mask is None else mask.to(target.dtype)
    confined.scatter_add_(-1, last.clamp(min=0), counts)
    excess = confined.cumsum(-1) - target.gather(-1, order).cumsum(-1)
    worst, size = excess.max(-1)
    if bool((worst > 1e-6).any()):
        b = int(worst.argmax())
        inside, outside = (sorted(part.tolist()) for part in order[b].tensor_split([int(size[b]) + 1]))
        held = float(target[b, inside].sum())
        names = f"experts {inside}" if len(inside) <= len(outside) else f"experts other than {outside}"
        raise ValueError(
            f"logits must leave a balanced solution, got {held + float(worst[b]):g} rows whose finite logits are all "
            f"at {names}, which may take {held:g}: allow more pairs, or raise capacity"
        )
