# SPDX-License-Identifier: Apache-2.0
"""The exact joint distribution of skipping: every assignment, and every set of rows that may be kept.

Legend: n rows (datapoints), k columns (experts), m outcomes.
"""

import itertools
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equipoise._core import check_capacity, checked_slots
from equipoise.reference._checks import check_one_problem, check_small_enough
from equipoise.reference._distribution import independent_distribution
from equipoise.reference._enumeration import MAX_LIST, Capacity


@dataclass(frozen=True, slots=True, eq=False)
class SkipOutcomes:
    """Every outcome of skipping, with its probability.

    Attributes:
        z: the expert that each row drew, kept or not.
        kept: the rows that remain.
        keep_weight: n_j / min(n_j, c_j) for each row's expert j (sec. 2.1).
        probability: of each outcome; sums to 1.

    Example:
        >>> from equipoise import reference
        >>> outcomes = reference.skip_outcomes(torch.zeros(2, 2).double().log_softmax(1), capacity=1)
        >>> outcomes.expectation(outcomes.kept.double()).tolist()  # each of two rows is kept with probability 3/4
        [0.75, 0.75]
    """

    z: Int[Tensor, "m n"]
    kept: Bool[Tensor, "m n"]
    keep_weight: Float[Tensor, "m n"]
    probability: Float[Tensor, " m"]

    def expectation(self, values: Float[Tensor, "m *shape"]) -> Float[Tensor, "*shape"]:
        """Computes the expectation of a function of the outcome, where `values` holds it for each."""
        return torch.tensordot(self.probability, values, dims=1)


def skip_outcomes(log_q: Float[Tensor, "n k"], capacity: Capacity = None) -> SkipOutcomes:
    """Writes out the joint distribution of z and delta in eq. (3).

    Rows draw experts independently, z ~ prod_i q(z_i); each expert then keeps min(n_j, c_j) of its n_j rows, every
    subset of that size with the same chance. The expectation of any estimator is a finite sum over these outcomes.

    Args:
        log_q: the proposal's log-probabilities; each row's exponentials sum to 1.
        capacity: the most rows an expert keeps; None means ceil(n / k). At least 1: an expert that keeps nothing
            leaves no estimate to reweight.

    Returns:
        The outcomes; the probabilities carry gradients to `log_q`.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> outcomes = reference.skip_outcomes(torch.zeros(2, 2).double().log_softmax(1), capacity=1)
        >>> outcomes.z.tolist()
        [[0, 0], [0, 0], [0, 1], [1, 0], [1, 1], [1, 1]]
        >>> [round(p, 12) for p in outcomes.probability.tolist()]
        [0.125, 0.125, 0.25, 0.25, 0.125, 0.125]
    """
    check_one_problem("log_q", log_q)
    n, k = log_q.shape
    slots = checked_slots(check_capacity(capacity, [], n, k, None, torch.device("cpu")))
    joint = independent_distribution(log_q)
    source: list[int] = []
    kept: list[list[bool]] = []
    chance: list[float] = []
    for index, z in enumerate(joint.z.tolist()):
        sets = _kept_sets(z, slots.tolist())
        check_small_enough("outcomes", len(kept) + len(sets), MAX_LIST // 8)
        source += [index] * len(sets)
        kept += [[row in rows for row in range(n)] for rows in sets]
        chance += [1 / len(sets)] * len(sets)
    z = joint.z[source]
    counts = torch.nn.functional.one_hot(z, k).sum(1).double()
    weight = (counts / torch.minimum(counts, slots)).gather(1, z)  # 0 / 0 only at experts that no row has drawn
    probability = joint.probability[source] * torch.tensor(chance, dtype=torch.float64)
    return SkipOutcomes(z, torch.tensor(kept, dtype=torch.bool).reshape(-1, n), weight, probability)


def _kept_sets(z: list[int], capacity: list[int]) -> list[set[int]]:
    """Lists every set of rows that can be kept after z was drawn; all are equally likely."""
    choices: list[list[tuple[int, ...]]] = []
    for expert, slots in enumerate(capacity):
        rows = [row for row, drawn in enumerate(z) if drawn == expert]
        choices.append(list(itertools.combinations(rows, min(len(rows), slots))))
    return [set(itertools.chain.from_iterable(choice)) for choice in itertools.product(*choices)]
