# SPDX-License-Identifier: Apache-2.0
"""Moments of distributions that are lists."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equipoise import reference

Draw = Callable[..., Tensor]


def test_independent_distribution_has_the_marginals_it_was_made_of(normal: Draw) -> None:
    log_p = normal(4, 3).log_softmax(1)
    joint = reference.independent_distribution(log_p)
    torch.testing.assert_close(joint.marginals(), log_p.exp(), rtol=0, atol=1e-14)
    torch.testing.assert_close(joint.probability.sum(), torch.ones(()).double(), rtol=0, atol=1e-14)


def test_entropy_of_independent_rows_is_the_sum_of_theirs(normal: Draw) -> None:
    log_p = normal(4, 3).log_softmax(1)
    each = -(log_p.exp() * log_p).sum()
    torch.testing.assert_close(reference.independent_distribution(log_p).entropy(), each, rtol=0, atol=1e-13)


def test_variance_agrees_with_the_covariance_matrix(normal: Draw) -> None:
    joint = reference.gibbs_distribution(normal(4, 2))
    h = normal(4, 2)
    variance = joint.variance(reference.assignment_values(h, joint.z))
    torch.testing.assert_close(h.flatten() @ joint.covariance() @ h.flatten(), variance, rtol=0, atol=1e-14)


def test_independent_rows_do_not_inflate_the_variance(normal: Draw) -> None:
    joint = reference.independent_distribution(normal(4, 3).log_softmax(1))
    assert reference.variance_inflation(joint).item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_rows_that_move_as_one_inflate_the_variance_n_times(n: int) -> None:
    z = torch.stack([torch.zeros(n).long(), torch.ones(n).long()])
    joint = reference.AssignmentDistribution(z, torch.tensor([0.3, 0.7]).double(), 2)
    assert reference.variance_inflation(joint).item() == pytest.approx(n, abs=1e-12)


def test_no_function_exceeds_the_variance_inflation(normal: Draw) -> None:
    joint = reference.gibbs_distribution(normal(4, 2))
    alone = reference.independent_distribution(joint.marginals().log())
    h = normal(200, 4, 2)
    ratio = torch.stack(
        [
            joint.variance(reference.assignment_values(x, joint.z))
            / alone.variance(reference.assignment_values(x, alone.z))
            for x in h
        ]
    )
    worst = reference.variance_inflation(joint)
    assert ratio.max() <= worst + 1e-12
    assert ratio.max() > 0.8 * worst


def test_certain_rows_have_nothing_to_inflate() -> None:
    joint = reference.AssignmentDistribution(torch.tensor([[0, 1]]), torch.ones(1).double(), 2)
    assert reference.variance_inflation(joint).item() == 1
