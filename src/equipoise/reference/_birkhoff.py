# SPDX-License-Identifier: Apache-2.0
"""The Birkhoff decomposition of a balanced n x k matrix into balanced assignments (sec. 2.3, App. D.5).

Legend: n rows (datapoints), k columns (experts), m assignments.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equipoise.reference._checks import check_balanced_matrix
from equipoise.reference._distribution import AssignmentDistribution

# Rounding of a probability after up to n k subtractions of numbers below 1, with room to spare.
NEGLIGIBLE = 1e-14


def birkhoff_decomposition(marginals: Float[Tensor, "n k"]) -> AssignmentDistribution:
    """Writes a balanced row-stochastic matrix as p_ij = sum_z alpha_z z_ij (eq. 10), with few z.

    Greedy: of all balanced assignments take the one whose smallest entry in what is left of the matrix is largest, give
    it that entry as its weight, subtract, repeat. What is left stays balanced (each row sums to the mass left, column j
    to c_j times it), so such an assignment exists until nothing is left: the graph of the positive entries has a
    perfect matching of rows to slots by Hall's theorem. Every round clears at least one entry, so at most n k rounds
    are needed. The result is sparse, with low entropy and strong dependence between rows, which is what it is for: the
    counterpart of `maximum_entropy` with the same marginals.

    Args:
        marginals: p, rows that sum to 1 and columns that sum to whole numbers, which are the capacities.

    Returns:
        The weights and assignments, as a distribution; its marginals are p, as exactly as p is balanced.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> mixture = reference.birkhoff_decomposition(torch.tensor([[0.75, 0.25], [0.25, 0.75]]))
        >>> mixture.z.tolist(), mixture.probability.tolist()
        ([[0, 1], [1, 0]], [0.75, 0.25])

    References:
        G. Birkhoff, Tres observaciones sobre el algebra lineal, 1946.
    """
    capacity = check_balanced_matrix("marginals", marginals).tolist()
    rest = marginals.detach().double().clone()
    every = torch.arange(len(rest))
    assignments: list[list[int]] = []
    weights: list[float] = []
    while (best := _bottleneck_assignment(rest, capacity)) is not None:
        taken = rest[every, best]
        assignments.append(best)
        weights.append(float(taken.amin()))
        rest[every, best] = taken - weights[-1]  # the smallest entry becomes exactly 0, so the loop ends
    probability = torch.tensor(weights, dtype=torch.float64)
    return AssignmentDistribution(torch.tensor(assignments), probability / probability.sum(), rest.shape[1])


def _bottleneck_assignment(rest: Float[Tensor, "n k"], capacity: list[int]) -> list[int] | None:
    """Finds the balanced assignment whose smallest entry is largest, among entries that are not negligible."""
    levels = rest[rest > NEGLIGIBLE].unique()
    best = None
    low, high = 0, len(levels)
    while low < high:
        middle = (low + high) // 2
        z = _assignment_within(rest >= levels[middle], capacity)
        if z is None:
            high = middle
        else:
            best, low = z, middle + 1
    return best


def _assignment_within(allowed: Bool[Tensor, "n k"], capacity: list[int]) -> list[int] | None:
    """Finds an assignment that uses allowed pairs only, by augmenting paths, or None if there is none."""
    choices = [row.nonzero().flatten().tolist() for row in allowed]
    members: list[list[int]] = [[] for _ in capacity]
    if not all(_place(row, choices, members, capacity, set()) for row in range(len(choices))):
        return None
    return [next(j for j, rows in enumerate(members) if row in rows) for row in range(len(choices))]


def _place(row: int, choices: list[list[int]], members: list[list[int]], capacity: list[int], tried: set[int]) -> bool:
    """Finds `row` a slot, moving other rows on if need be; `tried` are the experts already asked."""
    for expert in choices[row]:
        if expert in tried:
            continue
        tried.add(expert)
        if len(members[expert]) < capacity[expert]:
            members[expert].append(row)
            return True
        for slot, other in enumerate(members[expert]):
            if _place(other, choices, members, capacity, tried):
                members[expert][slot] = row
                return True
    return False
