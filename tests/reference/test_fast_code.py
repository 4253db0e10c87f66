# SPDX-License-Identifier: Apache-2.0
"""Solver, conditionals and estimator against the oracles, on problems small enough to write out."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equipoise import reference
from equipoise.assignment import assign, conditional_values
from equipoise.estimators import importance_weight, reinforce
from equipoise.sampling import sample_gumbel_matching

Draw = Callable[..., Tensor]

SIZES = [(1, 1, None), (2, 2, None), (4, 2, None), (6, 3, None), (4, 4, None), (5, 2, [2, 3]), (4, 2, 3)]
SIZES += [(5, 3, [4, 1, 2]), (3, 2, [3, 0]), (2, 4, None), (5, 3, None)]


@pytest.mark.parametrize(("n", "k", "capacity"), SIZES)
def test_solver_and_conditional_values(normal: Draw, n: int, k: int, capacity: list[int] | None) -> None:
    for scores in 2 * normal(5, n, k):
        found = assign(scores, capacity)
        value, z = reference.best_assignment(scores, capacity)
        assert torch.equal(found.z, z)
        torch.testing.assert_close(found.value, value, rtol=0, atol=1e-12)
        expected = reference.conditional_values(scores, capacity)
        torch.testing.assert_close(conditional_values(scores, found), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize(("n", "k", "capacity"), SIZES)
def test_conditional_of_a_row_is_what_redrawing_it_gives(
    normal: Draw, gumbel: Draw, n: int, k: int, capacity: list[int] | None, temperature: float
) -> None:
    logits, noise = normal(n, k), gumbel(n, k)
    sample = sample_gumbel_matching(logits, noise, temperature=temperature, capacity=capacity)
    for row in range(n):
        q = reference.gumbel_matching_conditional(logits, noise, row, temperature=temperature, capacity=capacity)
        torch.testing.assert_close(sample.log_q[row].exp(), q, rtol=0, atol=1e-12)


def test_conditional_with_padding_is_that_of_the_rows_that_count(normal: Draw, gumbel: Draw) -> None:
    logits, noise = normal(7, 3), gumbel(7, 3)
    mask = torch.tensor([True, True, False, True, True, False, True])
    sample = sample_gumbel_matching(logits, noise, mask=mask)
    for row, q in enumerate(sample.log_q[mask].exp()):
        expected = reference.gumbel_matching_conditional(logits[mask], noise[mask], row)
        torch.testing.assert_close(q, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize(("n", "k", "capacity"), [(4, 2, None), (3, 3, None), (4, 2, 3), (5, 3, [4, 1, 2])])
def test_estimator_is_exact_for_every_draw_of_the_other_rows(
    normal: Draw, gumbel: Draw, n: int, k: int, capacity: list[int] | None, temperature: float
) -> None:
    # Only row i's noise is random. Each outcome z_i = j is brought about by noise that forces it, goes through sampler,
    # weight and surrogate, and counts with its probability as found without log_q.
    losses, logits, noise = normal(n, k), normal(n, k).requires_grad_(), gumbel(n, k)
    exact = reference.exact_logit_gradient(logits, losses)
    for row in range(n):
        q = reference.gumbel_matching_conditional(logits, noise, row, temperature=temperature, capacity=capacity)
        mean = torch.zeros(k, dtype=torch.float64)
        for expert in range(k):
            forced = noise.clone()
            forced[row] = 100.0 * torch.nn.functional.one_hot(torch.tensor(expert), k)
            log_p = logits.log_softmax(1)
            sample = sample_gumbel_matching(log_p, forced, temperature=temperature, capacity=capacity)
            assert sample.z[row] == expert
            drawn = losses.gather(1, sample.z[:, None])[:, 0]
            weight = importance_weight(log_p, sample)
            estimate = reinforce(log_p, sample, drawn, baseline=0.3, weight=weight)
            mean += q[expert] * torch.autograd.grad(estimate, [logits])[0][row]
        torch.testing.assert_close(mean, exact[row], rtol=0, atol=1e-12)
