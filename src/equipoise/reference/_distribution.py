# SPDX-License-Identifier: Apache-2.0
"""A distribution over assignments that is small enough to be a list, and the moments of such a list.

Legend: n rows (datapoints), k columns (experts), m assignments.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equipoise.reference._checks import check_one_problem
from equipoise.reference._enumeration import assignment_values, enumerate_assignments


@dataclass(frozen=True, slots=True, eq=False)
class AssignmentDistribution:
    """A joint distribution of z_1, ..., z_n: every assignment that can occur, with its probability.

    Attributes:
        z: the assignments.
        probability: of each assignment; sums to 1.
        num_experts: k.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> z, probability = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0.75, 0.25]).double()
        >>> coin = reference.AssignmentDistribution(z, probability, 2)
        >>> coin.marginals().tolist()
        [[0.75, 0.25], [0.25, 0.75]]
    """

    z: Int[Tensor, "m n"]
    probability: Float[Tensor, " m"]
    num_experts: int

    def marginals(self) -> Float[Tensor, "n k"]:
        """Computes P(z_i = j)."""
        return self.expectation(self._one_hot())

    def entropy(self) -> Float[Tensor, ""]:
        """Computes -sum_z P(z) log P(z)."""
        return torch.special.entr(self.probability).sum()

    def expectation(self, values: Float[Tensor, "m *shape"]) -> Float[Tensor, "*shape"]:
        """Computes E[h(z)], where `values` holds h of each assignment."""
        return torch.tensordot(self.probability, values, dims=1)

    def variance(self, values: Float[Tensor, "m *shape"]) -> Float[Tensor, "*shape"]:
        """Computes Var[h(z)], elementwise, where `values` holds h of each assignment."""
        return self.expectation((values - self.expectation(values)) ** 2)

    def covariance(self) -> Float[Tensor, "nk nk"]:
        """Computes the covariance of the one-hot assignment z_ij, flattened row by row."""
        centred = (self._one_hot() - self.marginals()).flatten(1)
        return centred.T @ (self.probability[:, None] * centred)

    def _one_hot(self) -> Float[Tensor, "m n k"]:
        return torch.nn.functional.one_hot(self.z, self.num_experts).to(self.probability)


def independent_distribution(log_p: Float[Tensor, "n k"]) -> AssignmentDistribution:
    """Writes out prod_i p(z_i), the distribution of rows that choose independently.

    Args:
        log_p: log-probabilities; each row's exponentials sum to 1.

    Returns:
        All k^n assignments; the probabilities carry gradients to `log_p`.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> log_p = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).double().log()
        >>> [round(p, 12) for p in reference.independent_distribution(log_p).probability.tolist()]
        [0.125, 0.375, 0.125, 0.375]
    """
    check_one_problem("log_p", log_p)
    n, k = log_p.shape
    z = enumerate_assignments(n, k)
    return AssignmentDistribution(z, assignment_values(log_p.double(), z).exp(), k)


def variance_inflation(distribution: AssignmentDistribution) -> Float[Tensor, ""]:
    """Finds how far dependence between rows can raise the variance of a mean over rows.

    The largest ratio, over all functions h, of Var[sum_i h_i(z_i)] to sum_i Var[h_i(z_i)], the variance that rows with
    the same marginals would have if they were independent. It is 1 for independent rows and at most n. Every estimator
    of eq. (2) is such a sum with h_i = weight times loss times score, so this bounds what dependence can do to it.

    With h_i centred under the marginals p_i, the denominator is sum_ij p_ij h_ij^2, and the ratio is a Rayleigh
    quotient of the covariance of the one-hot assignment, scaled by 1 / sqrt(p_ij) on both sides.

    Args:
        distribution: any distribution over assignments.

    Returns:
        The ratio; 1 if no row is random.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> together = torch.tensor([[0, 1], [1, 0]])
        >>> coin = reference.AssignmentDistribution(together, torch.tensor([0.5, 0.5]).double(), 2)
        >>> round(reference.variance_inflation(coin).item(), 12)
        2.0
    """
    p = distribution.marginals().flatten()
    live = (p > 0) & (p < 1)
    if not bool(live.any()):
        return p.new_ones(())
    scale = p[live].rsqrt()
    scaled = scale[:, None] * distribution.covariance()[live][:, live] * scale
    return torch.linalg.eigvalsh(scaled)[-1]
