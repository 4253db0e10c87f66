# SPDX-License-Identifier: Apache-2.0
"""`Grouped`: rows in the order of their experts, the form in which experts take them.

Legend: m rows in groups, E experts.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped:
    """Rows grouped by expert, in one of two layouts, whose shapes do not depend on values.

    - Even (`slots` is a number): expert e owns rows e * slots to (e + 1) * slots - 1. The rows of the expert come
      first, then zero rows as padding. An exactly balanced batch has no padding.
    - Ragged (`slots` is None): the groups follow each other without gaps. Rows after the last group were dropped: they
      belong to no expert, and their output is zero.

    Attributes:
        rows: what the experts process, [m, dim].
        counts: the rows that each expert was given, int64 [E], padding not counted.
        slots: rows reserved for each expert, or None.

    Example:
        >>> groups = Grouped(rows=torch.randn(6, 8), counts=torch.tensor([1, 2, 3]), slots=None)
        >>> groups.num_experts, groups.ends().tolist()
        (3, [1, 3, 6])
    """

    rows: Float[Tensor, "m dim"]
    counts: Int[Tensor, "E"]
    slots: int | None

    @property
    def num_experts(self) -> int:
        """The number of groups, E."""
        return self.counts.shape[0]

    def ends(self) -> Int[Tensor, "E"]:
        """Returns where each group ends, int64, on the device."""
        if self.slots is None:
            return self.counts.cumsum(0)
        return torch.arange(1, self.num_experts + 1, device=self.rows.device) * self.slots
