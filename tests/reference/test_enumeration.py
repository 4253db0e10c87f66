# SPDX-License-Identifier: Apache-2.0
"""Lists of assignments, and optima read off them, against counts known in advance and scipy."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equipoise import reference
from equipoise.reference._checks import check_one_problem

Draw = Callable[..., Tensor]


@pytest.mark.parametrize(("n", "k"), [(0, 1), (1, 1), (1, 3), (3, 2), (5, 3)])
def test_without_capacity_every_assignment_is_listed_once(n: int, k: int) -> None:
    z = reference.enumerate_assignments(n, k)
    assert z.shape == (k**n, n)
    assert len({tuple(row) for row in z.tolist()}) == k**n


@pytest.mark.parametrize("capacity", [[2, 2, 2], [3, 2, 1], [1, 5, 0]])
def test_without_slack_the_number_of_assignments_is_multinomial(capacity: list[int]) -> None:
    z = reference.enumerate_assignments(6, 3, capacity)
    assert len(z.unique(dim=0)) == math.factorial(6) // math.prod(math.factorial(c) for c in capacity)


def test_with_slack_the_list_is_the_whole_list_filtered() -> None:
    everything = reference.enumerate_assignments(5, 3)
    counts = torch.nn.functional.one_hot(everything, 3).sum(1)
    within = everything[(counts <= torch.tensor([3, 2, 1])).all(1)]
    assert torch.equal(reference.enumerate_assignments(5, 3, [3, 2, 1]), within)


def test_list_is_lexicographic() -> None:
    z = reference.enumerate_assignments(4, 3, 2)
    assert z.tolist() == sorted(z.tolist())


@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 2), (6, 3), (5, 3), (2, 4)])
def test_best_assignment_is_that_of_scipy(normal: Draw, n: int, k: int) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    scores = normal(n, k)
    rows, slots = optimize.linear_sum_assignment(scores.repeat_interleave(-(-n // k), 1).numpy(), maximize=True)
    value, z = reference.best_assignment(scores)
    assert rows.tolist() == list(range(n))
    assert z.tolist() == (torch.from_numpy(slots) // -(-n // k)).tolist()
    assert value.item() == pytest.approx(scores[torch.arange(n), z].sum().item(), abs=1e-12)


@pytest.mark.parametrize("capacity", [None, 3, [1, 2, 3]])
def test_conditional_values_are_those_of_problems_that_allow_one_pair(normal: Draw, capacity: list[int] | None) -> None:
    scores = normal(5, 3)
    found = reference.conditional_values(scores, capacity)
    for i in range(5):
        for j in range(3):
            forced = scores.clone()
            forced[i] = -torch.inf
            forced[i, j] = scores[i, j]
            assert found[i, j] == reference.best_assignment(forced, capacity)[0]


def test_conditional_value_of_an_impossible_pair_is_minus_infinity() -> None:
    scores = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    assert reference.conditional_values(scores).tolist() == [[0.0, -torch.inf], [-torch.inf, 0.0]]


def test_best_of_the_conditional_values_is_the_best(normal: Draw) -> None:
    scores = normal(6, 3)
    value, z = reference.best_assignment(scores)
    conditional = reference.conditional_values(scores)
    assert torch.equal(conditional.argmax(1), z)
    assert torch.equal(conditional.amax(1), value.expand(6))


def test_value_carries_gradient_to_the_scores(normal: Draw) -> None:
    scores = normal(4, 2).requires_grad_()
    value, z = reference.best_assignment(scores)
    value.backward()
    assert scores.grad is not None
    assert torch.equal(scores.grad, torch.nn.functional.one_hot(z, 2).double())


@pytest.mark.parametrize(
    ("scores", "capacity", "message"),
    [
        (torch.zeros(3, 2), 1, "capacity must hold every row: 3 rows need 3 slots, got 2"),
        (torch.tensor([[torch.nan, 0.0]]), None, r"scores must be finite or -inf .*, got nan at index \[0, 0\]"),
        (torch.tensor([[0.0, torch.inf]]), None, r"scores must be finite or -inf .*, got inf at index \[0, 1\]"),
        (torch.zeros(40, 2), None, "assignments must number at most"),
    ],
)
def test_bad_input_is_refused(scores: Tensor, capacity: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference.best_assignment(scores, capacity)


def test_batch_is_refused() -> None:
    # Through a public function the shape in the signature would speak first: shapes are checked in the tests.
    with pytest.raises(ValueError, match=r"scores must be one problem of shape \[n, k\], got \[2, 2, 2\]"):
        check_one_problem("scores", torch.zeros(2, 2, 2))
