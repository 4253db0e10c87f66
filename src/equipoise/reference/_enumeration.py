# SPDX-License-Identifier: Apache-2.0
"""Assignments written out in full, and what can be read off such a list.

Nothing here is clever: an optimum is the largest entry of a list, a conditional optimum the largest entry of a part of
it. That is the point, because the fast solvers are compared with it.

Legend: n rows (datapoints), k columns (experts), m assignments.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equipoise._core import check_capacity
from equipoise.reference._checks import check_enough_slots, check_no_nan, check_one_problem, check_small_enough

Capacity = int | Sequence[int] | Tensor | None

MAX_LIST = 2**20


def one_problem(
    name: str, x: Float[Tensor, "n k"], capacity: Capacity
) -> tuple[Float[Tensor, "n k"], Int[Tensor, " k"]]:
    """Checks one problem; returns its matrix in float64 and its capacities, None meaning ceil(n / k)."""
    check_one_problem(name, x)
    check_no_nan(name, x)
    n, k = x.shape
    slots = check_capacity(capacity, [], n, k, None, x.device)
    check_enough_slots(slots, n)
    return x.double(), slots


def enumerate_assignments(num_points: int, num_experts: int, capacity: Capacity = None) -> Int[Tensor, "m n"]:
    """Lists every z in {0, ..., k - 1}^n, or those of them that respect a capacity, in lexicographic order.

    Args:
        num_points: n, the rows.
        num_experts: k, the experts.
        capacity: the most rows an expert may take, one number or one for each expert. None, other than in the solvers,
            means no limit: all k^n assignments.

    Returns:
        z, one assignment a row. Without rows there is one assignment, the empty one.

    Example:
        >>> from equipoise import reference
        >>> reference.enumerate_assignments(2, 2).tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1]]
        >>> reference.enumerate_assignments(2, 2, capacity=1).tolist()
        [[0, 1], [1, 0]]
    """
    limit = num_points if capacity is None else capacity
    slots = check_capacity(limit, [], num_points, num_experts, None, torch.device("cpu"))
    z = torch.zeros(1, 0, dtype=torch.int64)
    free = slots[None]
    for _ in range(num_points):
        # nonzero walks row by row, so a lexicographic list of prefixes stays lexicographic.
        prefix, expert = (free > 0).nonzero().unbind(1)
        check_small_enough("assignments", len(prefix), MAX_LIST)
        z = torch.cat([z[prefix], expert[:, None]], 1)
        free = free[prefix] - torch.nn.functional.one_hot(expert, num_experts)
    return z


def assignment_values(scores: Float[Tensor, "n k"], z: Int[Tensor, "m n"]) -> Float[Tensor, " m"]:
    """Computes sum_i scores[i, z_i] for each of m assignments.

    Args:
        scores: the value of each pair.
        z: the assignments.

    Returns:
        One sum for each assignment; it carries gradients to the scores.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> reference.assignment_values(torch.eye(2), torch.tensor([[0, 1], [1, 1]])).tolist()
        [2.0, 1.0]
    """
    return scores[torch.arange(len(scores), device=scores.device), z].sum(-1)


def best_assignment(
    scores: Float[Tensor, "n k"], capacity: Capacity = None
) -> tuple[Float[Tensor, ""], Int[Tensor, " n"]]:
    """Solves max_z sum_i scores[i, z_i] subject to capacity (eq. 4) by looking at every assignment.

    Args:
        scores: float [n, k]; -inf forbids a pair.
        capacity: as in `equipoise.assign`; None means ceil(n / k).

    Returns:
        The best value and an assignment that attains it (the lexicographically first of those that tie).

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> value, z = reference.best_assignment(torch.tensor([[3.0, 0.0], [2.0, 1.0]]))
        >>> value.item(), z.tolist()
        (4.0, [0, 1])
    """
    scores, slots = one_problem("scores", scores, capacity)
    n, k = scores.shape
    z = enumerate_assignments(n, k, slots)
    values = assignment_values(scores, z)
    best = int(values.argmax())
    return values[best], z[best]


def conditional_values(scores: Float[Tensor, "n k"], capacity: Capacity = None) -> Float[Tensor, "n k"]:
    """Finds v* given z_ij = 1 (App. D.3): the value of the best assignment in which row i has expert j.

    Args:
        scores: float [n, k]; -inf forbids a pair.
        capacity: as in `equipoise.assign`; None means ceil(n / k).

    Returns:
        A value for every i and j; -inf where no assignment has the pair.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> reference.conditional_values(torch.tensor([[3.0, 0.0], [2.0, 1.0]])).tolist()
        [[4.0, 2.0], [2.0, 4.0]]
    """
    scores, slots = one_problem("scores", scores, capacity)
    n, k = scores.shape
    z = enumerate_assignments(n, k, slots)
    values = assignment_values(scores, z)
    best = scores.new_full((n, k), -torch.inf)
    return best.scatter_reduce(1, z.T, values.expand(n, -1), "amax")
