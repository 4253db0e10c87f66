# SPDX-License-Identifier: Apache-2.0
"""The Birkhoff decomposition puts a balanced matrix back together."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equipoise import reference

Draw = Callable[..., Tensor]


def balanced(logits: Tensor) -> Tensor:
    """A balanced matrix that comes with an answer: the marginals of a Gibbs distribution."""
    return reference.gibbs_log_marginals(logits).exp()


SMALL = [(n, k, spread) for n, k in [(1, 1), (2, 2), (6, 2), (6, 3), (5, 5)] for spread in (0.1, 1.0, 5.0)]


@pytest.mark.parametrize(("n", "k", "spread"), [*SMALL, (16, 4, 1.0), (40, 2, 1.0)])
def test_decomposition_gives_the_matrix_back(normal: Draw, n: int, k: int, spread: float) -> None:
    p = balanced(spread * normal(n, k))
    mixture = reference.birkhoff_decomposition(p)
    counts = torch.nn.functional.one_hot(mixture.z, k).sum(1)
    assert torch.equal(counts, torch.full_like(counts, n // k))
    assert mixture.probability.min() > 0
    assert mixture.probability.sum().item() == pytest.approx(1, abs=1e-14)
    torch.testing.assert_close(mixture.marginals(), p, rtol=0, atol=1e-12)


def test_terms_are_no_more_than_entries(normal: Draw) -> None:
    mixture = reference.birkhoff_decomposition(balanced(normal(8, 2)))
    assert len(mixture.z) <= 16
    assert len(mixture.z.unique(dim=0)) == len(mixture.z)


def test_unequal_capacities_and_zeros_are_allowed() -> None:
    z = torch.tensor([[0, 0, 0, 1, 2], [2, 0, 0, 0, 1]])
    p = reference.AssignmentDistribution(z, torch.tensor([0.7, 0.3]).double(), 3).marginals()
    mixture = reference.birkhoff_decomposition(p)
    torch.testing.assert_close(mixture.marginals(), p, rtol=0, atol=1e-15)


def test_certain_matrix_is_one_assignment() -> None:
    mixture = reference.birkhoff_decomposition(torch.eye(3)[[2, 0, 1]])
    assert mixture.z.tolist() == [[2, 0, 1]]
    assert mixture.probability.tolist() == [1.0]


@pytest.mark.parametrize(
    ("p", "message"),
    [
        ([[0.5, 0.4], [0.5, 0.6]], "marginals must have rows that sum to 1, got an error of 1.0e-01"),
        ([[0.5, 0.5], [0.6, 0.4]], "marginals must have columns that sum to whole numbers"),
        ([[1.5, -0.5], [-0.5, 1.5]], "marginals must hold probabilities >= 0, got -0.5"),
    ],
)
def test_bad_input_is_refused(p: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference.birkhoff_decomposition(torch.tensor(p))


def test_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="marginals must have at least one row"):
        reference.birkhoff_decomposition(torch.zeros(0, 2))
