# SPDX-License-Identifier: Apache-2.0
"""The mean of each estimate is the exact gradient, to 1e-12, or is known not to be.

A sum of q_j times term_j / q_j proves nothing, since q cancels whether it is right or wrong. So probabilities come from
the sampler's choices: where row i's own noise makes it choose expert 0 (see conftest).
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from equipoise.estimators import STRATEGIES, Noise, leave_one_out_baseline
from equipoise.sampling import Sample

EXACT = 1e-12


def constant(losses: Tensor, s: Sample) -> float:
    return 0.7


def for_each_row(losses: Tensor, s: Sample) -> Tensor:
    return torch.linspace(-1.0, 2.0, losses.shape[-1]).double().expand_as(losses)


def from_the_other_rows(losses: Tensor, s: Sample) -> Tensor:
    return leave_one_out_baseline(losses, s, allow_biased=True)


BASELINES = pytest.mark.parametrize("baseline", [constant, for_each_row])
PROPOSALS = pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"sinkhorn_first": True},
        {"temperature": 0.5, "sinkhorn_first": True},
    ],
    ids=lambda how: "-".join(map(str, how.values())) or "on-policy",
)


def error(task, mean: Tensor) -> float:
    return float((mean - task.exact_gradient()).abs().max())


@PROPOSALS
@BASELINES
@pytest.mark.parametrize("name", ["sample", "skip-iw"])
def test_independent_draws(
    name: str, how: dict, baseline, task, bind, probability_of_own_noise, mean_over_all_draws
) -> None:
    problem = task(4, 2)
    draw = bind(STRATEGIES[name], problem, **how)
    probability = probability_of_own_noise(draw, problem.gumbel)
    assert error(problem, mean_over_all_draws(problem, draw, probability, baseline)) < EXACT


@pytest.mark.parametrize("name", ["sample", "skip-iw"])
@pytest.mark.parametrize("capacity", [1, [2, 1, 1], [3, 1, 2]])
def test_three_experts_with_capacities_of_their_own(name: str, capacity, task, bind, mean_over_all_draws) -> None:
    problem = task(4, 3)
    draw = bind(STRATEGIES[name], problem, temperature=0.6, capacity=capacity)
    probability = (problem.logits.detach().log_softmax(-1) / 0.6).softmax(-1)
    assert error(problem, mean_over_all_draws(problem, draw, probability, constant)) < EXACT


@pytest.mark.parametrize("name", ["sample", "skip-iw"])
def test_masked_rows(name: str, task, bind, mean_over_all_draws) -> None:
    problem = task(4, 2, torch.tensor([True, True, False, True]))
    draw = bind(STRATEGIES[name], problem, temperature=2.0, capacity=1)
    probability = (problem.logits.detach() / 2).softmax(-1)
    assert error(problem, mean_over_all_draws(problem, draw, probability, constant)) < EXACT


@PROPOSALS
@BASELINES
@pytest.mark.parametrize("capacity", [None, 4, [2, 5]])
def test_gumbel_matching_for_every_draw_of_the_other_rows(
    capacity, how: dict, baseline, task, bind, probability_of_own_noise, mean_over_own_noise
) -> None:
    problem = task(6, 2)
    draw = bind(STRATEGIES["gm-iw"], problem, capacity=capacity, **how)
    probability = probability_of_own_noise(draw, problem.gumbel)
    assert error(problem, mean_over_own_noise(problem, draw, probability, baseline)) < EXACT


@pytest.mark.parametrize("capacity", [[2, 1, 1], [2, 2, 2], [1, 3, 2]])
def test_gumbel_matching_with_three_experts(capacity: list[int], task, bind, mean_over_own_noise) -> None:
    problem = task(4, 3)
    draw = bind(STRATEGIES["gm-iw"], problem, capacity=capacity, temperature=0.7)
    proposal = problem.logits.detach().log_softmax(-1) / 0.7
    scores = proposal + problem.gumbel
    others = torch.full([4, 3], -torch.inf).double()
    for z in product(range(3), repeat=4):
        if all(z.count(j) <= capacity[j] for j in range(3)):
            for i in range(4):
                rest = sum(float(scores[r, z[r]]) for r in range(4) if r != i)
                others[i, z[i]] = max(float(others[i, z[i]]), rest)
    probability = (others + proposal).softmax(-1)
    assert error(problem, mean_over_own_noise(problem, draw, probability, constant)) < EXACT


def test_gumbel_matching_with_masked_rows(task, bind, probability_of_own_noise, mean_over_own_noise) -> None:
    problem = task(6, 2, torch.tensor([True, True, False, True, True, False]))
    draw = bind(STRATEGIES["gm-iw"], problem)
    probability = probability_of_own_noise(draw, problem.gumbel)
    assert error(problem, mean_over_own_noise(problem, draw, probability, constant)) < EXACT


def test_average_over_what_is_left_is_biased(task, bind, mean_over_all_draws) -> None:
    problem = task(4, 2)
    draw = bind(STRATEGIES["skip"], problem)
    probability = problem.logits.detach().softmax(-1)
    assert error(problem, mean_over_all_draws(problem, draw, probability, constant)) > 1e-3


@pytest.mark.parametrize(("name", "biased"), [("sample", False), ("skip-iw", False), ("skip", True)])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_without_importance_weights(
    name: str, biased: bool, temperature: float, task, bind, mean_over_all_draws
) -> None:
    problem = task(4, 2)
    draw = bind(STRATEGIES[name], problem, temperature=temperature, importance=False)
    probability = (problem.logits.detach() / temperature).softmax(-1)
    off = error(problem, mean_over_all_draws(problem, draw, probability, constant))
    # Unbiased where q = p.
    assert off > 1e-3 if biased or temperature != 1.0 else off < EXACT


def matching_probability(logits: Tensor) -> Tensor:
    """P(z = (0, 1)) and P(z = (1, 0)) for two rows, two experts, capacity 1.

    (0, 1) wins if a difference of logits plus the sum of two independent logistic variables is positive; the
    distribution function of that sum is e^x (e^x - 1 - x) / (e^x - 1)^2.
    """
    x = logits[0, 0] + logits[1, 1] - logits[0, 1] - logits[1, 0]
    first = x.exp() * (x.exp() - 1 - x) / (x.exp() - 1) ** 2
    return torch.stack([first, 1 - first])


def two_outcomes(task, draw, baseline: Callable[[Tensor, Sample], Tensor | float]) -> Tensor:
    """The exact mean gradient for two rows and experts, where the weights do not depend on the noise beyond z."""
    z = torch.tensor([[0, 1], [1, 0]])
    s, weight = draw(Noise(30.0 * torch.nn.functional.one_hot(z, 2).double()))
    assert torch.equal(s.z, z)
    probability = matching_probability(task.logits.detach())
    return task.gradients((probability * task.estimate(s, weight, baseline)).sum())


@pytest.mark.parametrize("name", ["gm", "gm-sh"])
def test_matching_with_other_weights_is_biased(name: str, task, bind) -> None:
    problem = task(2, 2)
    assert error(problem, two_outcomes(problem, bind(STRATEGIES[name], problem), constant)) > 1e-3


def test_sinkhorn_weights_are_closer_than_none(task, bind) -> None:
    problem = task(2, 2)
    errors = [
        error(problem, two_outcomes(problem, bind(STRATEGIES[name], problem), constant)) for name in ("gm-sh", "gm")
    ]
    assert errors[0] < errors[1]


@pytest.fixture
def two_rows(task):
    """Two rows, two experts, capacity 1, with losses such that a baseline from the other row misleads."""
    problem = task(2, 2)
    problem.logits = torch.tensor([[0.0, 0.0], [2.0, 0.0]]).double().requires_grad_()
    problem.parameter = torch.tensor([[2.0, 1.0], [1.0, 3.0]]).double().sqrt().requires_grad_()
    return problem


def shared_logit(gradient: Tensor) -> float:
    """The gradient for a router that adds one number to its logits for expert 0 in every row."""
    return float(gradient[0, :, 0].sum())


def test_leave_one_out_is_unbiased_for_independent_rows(two_rows, bind, mean_over_all_draws) -> None:
    draw = bind(STRATEGIES["sample"], two_rows)
    probability = two_rows.logits.detach().softmax(-1)
    assert error(two_rows, mean_over_all_draws(two_rows, draw, probability, leave_one_out_baseline)) < EXACT


def test_leave_one_out_is_biased_under_gumbel_matching(
    two_rows, bind, probability_of_own_noise, mean_over_own_noise
) -> None:
    draw = bind(STRATEGIES["gm-iw"], two_rows)
    probability = probability_of_own_noise(draw, two_rows.gumbel)
    exact = shared_logit(two_rows.exact_gradient())
    mean = shared_logit(mean_over_own_noise(two_rows, draw, probability, from_the_other_rows))
    p = two_rows.logits.detach().softmax(-1)
    spread = p[:, 0] * p[:, 1]
    assert exact == pytest.approx(float(spread[0] - 2 * spread[1]) / 2, abs=EXACT)
    # Row i at expert j sees the other row at the other expert: f_ij - f_i'j' in place of f_ij - b.
    assert mean == pytest.approx(-float(spread.sum()) / 2, abs=EXACT)
    assert exact > 0.01 > 0 > mean


def test_leave_one_out_is_biased_under_skip(two_rows, bind, mean_over_all_draws) -> None:
    draw = bind(STRATEGIES["skip-iw"], two_rows, capacity=1)
    probability = two_rows.logits.detach().softmax(-1)
    exact = shared_logit(two_rows.exact_gradient())
    mean = shared_logit(mean_over_all_draws(two_rows, draw, probability, from_the_other_rows))
    # The other row is there to compare with only if it drew the other expert.
    p, f = probability, two_rows.parameter.detach() ** 2
    bias = (p[:, 0] * p[:, 1] * ((p * f)[:, 0] - (p * f)[:, 1]).flip(0)).sum() / 2
    assert mean - exact == pytest.approx(float(bias), abs=EXACT)
    assert mean > 5 * exact > 0.05
    assert error(two_rows, mean_over_all_draws(two_rows, draw, probability, constant)) < EXACT
