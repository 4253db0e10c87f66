# SPDX-License-Identifier: Apache-2.0
"""`Scope`: which rows a decision is made over, and how they are added up.

Whatever is computed over a batch as a whole (counts, capacities, the solver, mean probabilities, the number of rows)
calls a scope. Here all rows are in this process. `equipoise.distributed` has a scope whose rows are spread over ranks.

Legend: n rows (datapoints) of this process, k columns (experts).
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equipoise._core import Capacity, check_capacity
from equipoise.assignment import Assignment, assign, detour_costs
from equipoise.balancing import Balanced, sinkhorn
from equipoise.ops import rank_within_groups


class Scope:
    """The rows of a batch, all of them in this process.

    Attributes:
        ranks: the processes that the rows of a decision are spread over.
        alike: whether every rank that exchanges rows with this one has as many as it, none of them masked.

    Example:
        >>> scope = Scope()
        >>> scope.count(8), scope.slots(None, [8, 4], None, torch.device("cpu")).tolist()
        (8, [2, 2, 2, 2])
    """

    ranks: int = 1
    alike: bool = False

    def begin(self, num_rows: int, *, whole: bool, training: bool, exact: bool) -> "Scope":
        """Begins a forward pass.

        Args:
            num_rows: n.
            whole: whether no row is masked.
            training: whether the layer is in training mode.
            exact: whether the router may balance its rows exactly.

        Returns:
            The scope of this forward pass.
        """
        del num_rows, whole, training, exact
        return self

    def generator(self, given: torch.Generator | None, device: torch.device) -> torch.Generator | None:
        """Returns where this process takes its noise from, independent of other ranks; None is the global stream.

        Args:
            given: the caller's.
            device: of the rows.
        """
        del device
        return given

    def count(self, num_rows: int) -> int:
        """Returns the rows of the scope, of which `num_rows` are in this process; masked ones count."""
        return num_rows

    def slots(
        self, capacity: Capacity, shape: Sequence[int], mask: Tensor | None, device: torch.device
    ) -> Int[Tensor, "*batch k"]:
        """Turns any legal capacity into int64 [..., k]; None is ceil(rows of the scope that are not masked / k).

        Args:
            capacity: of the scope.
            shape: [..., n, k].
            mask: rows that take an expert.
            device: of the result.
        """
        *batch, n, k = shape
        return check_capacity(capacity, batch, n, k, mask, device)

    def first(self, x: Tensor) -> Tensor:
        """Returns the first rank's value of a number that all rows of the scope share."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """Adds up a statistic over the ranks of the scope.

        With gradient. Training averages gradients over ranks. So the gradient of this rank's part is multiplied by the
        number of ranks, to make that average the gradient of a loss of the total.
        """
        return x

    def largest(self, x: Tensor) -> Tensor:
        """Returns the largest value of a statistic over the ranks of the scope."""
        return x

    def everywhere(self, x: Tensor) -> Tensor:
        """Adds up a statistic over all ranks, whatever the scope: for what is learnt from past batches."""
        return x

    def rows(self, x: Tensor) -> Tensor:
        """Returns the rows of x of all ranks of the scope, rank after rank, for what needs each row and not a sum."""
        return x

    def assign(self, scores: Float[Tensor, "*batch n k"], capacity: Any = None, **how: Any) -> Assignment:
        """Solves the balanced assignment of the scope's rows; see `equipoise.assign`.

        Args:
            scores: of the rows of this process.
            capacity: of the scope; needs to be given where rows are on several ranks.
            how: top_k, mask.

        Returns:
            z and mask of the rows of this process; counts, value, prices and gap of the scope.
        """
        return assign(scores, capacity, **how)

    def detour_costs(self, scores: Float[Tensor, "*batch n k"], a: Assignment) -> Float[Tensor, "*batch k k"]:
        """Computes what it costs to take a slot at one expert and give one back at another, over the scope's rows."""
        return detour_costs(scores, a)

    def sinkhorn(self, logits: Float[Tensor, "*batch n k"], capacity: Any = None, **how: Any) -> Balanced:
        """Balances in expectation; see `equipoise.sinkhorn`. log_p of the rows of this process, the rest of the scope.

        Args:
            logits: of the rows of this process.
            capacity: of the scope.
            how: mask, tolerance.
        """
        return sinkhorn(logits, capacity, **how)

    def rank_within_groups(
        self, groups: Int[Tensor, "*batch n"], keys: Float[Tensor, "*batch n"], counts: Int[Tensor, "*batch g"]
    ) -> Int[Tensor, "*batch n"]:
        """Ranks the rows of this process among the scope's of their group; see `equipoise.ops.rank_within_groups`.

        Args:
            groups: the label of each row.
            keys: what to order by. Of equal ones those of lower ranks come first, then those of lower position.
            counts: the rows of each group, of the scope.
        """
        return rank_within_groups(groups, keys, counts)

    def __repr__(self) -> str:
        """Names the kind."""
        return f"{type(self).__name__}()"


THIS_PROCESS = Scope()
"""The default scope: all rows are in this process."""


def this_process() -> Scope:
    """Returns `THIS_PROCESS`; the default factory of the field `scope` of records.

    A factory, because `torch.compile` can trace an object that a function returns, and cannot trace the default value
    of a dataclass field.

    Example:
        >>> this_process() is THIS_PROCESS
        True
    """
    return THIS_PROCESS
