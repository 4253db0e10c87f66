# SPDX-License-Identifier: Apache-2.0
"""Conditional values against enumeration, and against solving again with one row fixed."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.assignment import detour_costs
from equipoise.assignment._conditional import add_detours, conditional_values, detours_from_costs
from equipoise.assignment._move_cost import move_cost
from equipoise.ops import draw_gumbel
from support.methods import EXACT

INF = float("inf")


@pytest.mark.parametrize("method", EXACT)
def test_equals_enumeration_on_random_problems(enumerate_all: Callable, random_problem: Callable, method: str) -> None:
    checked = 0
    for seed in range(400):
        scores, capacity, mask = random_problem(seed)
        exact = enumerate_all(scores, capacity, mask)
        if not exact.feasible:
            continue
        a = eq.assign(scores, capacity, mask=mask, method=method)
        found = conditional_values(scores, a).numpy()
        assert found.dtype == np.float64
        assert np.array_equal(found == -np.inf, exact.conditional == -np.inf), seed
        largest = float(np.abs(scores[scores.isfinite()].numpy()).max(initial=0.0))
        tolerance = 1e-12 * max(abs(exact.value), largest)
        possible = found > -np.inf
        np.testing.assert_allclose(found[possible], exact.conditional[possible], rtol=0, atol=tolerance)
        checked += 1
    assert checked >= 200


def values_by_solving_again(scores: torch.Tensor, capacity: int | torch.Tensor) -> torch.Tensor:
    """n k problems, each with all other experts forbidden to one row, as one batch."""
    n, k = scores.shape
    fixed = scores.repeat(n, k, 1, 1)
    for i in range(n):
        for j in range(k):
            fixed[i, j, i, torch.arange(k) != j] = -INF
    return eq.assign(fixed, capacity, method="cycle-cancelling").value


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("family", ["gumbel", "identical", "clusters", "binary"])
@pytest.mark.parametrize("capacity", [5, 6, 30])
def test_equals_solving_again(family: str, capacity: int, method: str, generator: torch.Generator) -> None:
    n, k = 30, 6
    scores = {
        "gumbel": draw_gumbel([n, k], generator=generator, dtype=torch.float64),
        "identical": torch.randn(1, k, generator=generator, dtype=torch.float64).expand(n, k),
        "clusters": torch.randn(3, k, generator=generator, dtype=torch.float64)[torch.arange(n) % 3],
        "binary": torch.randint(0, 2, (n, k), generator=generator).double(),
    }[family]
    found = conditional_values(scores, eq.assign(scores, capacity, method=method))
    expected = values_by_solving_again(scores, capacity)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_ties_in_many_experts_do_not_blow_up_rounding(generator: torch.Generator) -> None:
    # With all rows identical every cycle costs zero but for rounding, and moving one row anywhere changes nothing.
    scores = (torch.pi * torch.randn(1, 64, generator=generator, dtype=torch.float64)).expand(256, 64)
    a = eq.assign(scores, method="cycle-cancelling")
    found = conditional_values(scores, a)
    torch.testing.assert_close(found, a.value.expand(256, 64), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("method", EXACT)
def test_own_column_holds_the_value_and_no_other_more(method: str, generator: torch.Generator) -> None:
    scores = draw_gumbel([4, 50, 6], generator=generator)
    a = eq.assign(scores, method=method)
    found = conditional_values(scores, a)
    assert torch.equal(found.gather(-1, a.z.unsqueeze(-1)).squeeze(-1), a.value.unsqueeze(-1).expand(4, 50))
    assert bool((found <= a.value[:, None, None]).all())


def test_the_conditional_distribution_ignores_the_rows_own_noise(generator: torch.Generator) -> None:
    # App. D.4: q(z_i = j | G_-i) is the softmax of the conditional values minus the row's own noise.
    logits = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    noise = draw_gumbel([20, 5], generator=generator, dtype=torch.float64)
    other = noise.clone()
    other[7] = draw_gumbel([5], generator=generator, dtype=torch.float64)

    def log_q(gumbel: torch.Tensor) -> torch.Tensor:
        scores = logits + gumbel
        return torch.log_softmax(conditional_values(scores, eq.assign(scores)) - gumbel, -1)

    torch.testing.assert_close(log_q(noise)[7], log_q(other)[7], rtol=1e-11, atol=1e-11)
    assert not torch.allclose(log_q(noise)[8], log_q(other)[8], atol=1e-3)


def test_an_expert_without_capacity_is_impossible() -> None:
    scores = torch.tensor([[1.0, 5.0, 0.0], [2.0, 5.0, 1.0]])
    a = eq.assign(scores, [1, 0, 1], method="cycle-cancelling")
    assert conditional_values(scores, a).tolist() == [[2.0, -INF, 2.0], [2.0, -INF, 2.0]]


def test_fewer_rows_than_experts() -> None:
    # Every expert has a free slot: nobody has to make room.
    scores = torch.tensor([[3.0, 1.0, 0.0, -INF]])
    a = eq.assign(scores, method="cycle-cancelling")
    assert conditional_values(scores, a).tolist() == [[3.0, 1.0, 0.0, -INF]]


def test_no_chain_can_make_room() -> None:
    # Row 1 may only be at expert 0, whose one slot it therefore keeps.
    scores = torch.tensor([[9.0, 0.0], [1.0, -INF]])
    a = eq.assign(scores, 1, method="cycle-cancelling")
    assert conditional_values(scores, a).tolist() == [[-INF, 1.0], [1.0, -INF]]


@pytest.mark.parametrize("shape", [(2, 3, 6, 4), (6, 4), (0, 6, 4), (2, 0, 4), (2, 6, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_batch_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> None:
    scores = draw_gumbel(shape, generator=generator).to(dtype).requires_grad_()
    a = eq.assign(scores, method="cycle-cancelling")
    found = conditional_values(scores, a)
    assert found.shape == shape
    assert found.dtype == torch.float64
    assert not found.requires_grad
    flat = scores.detach().double().reshape(-1, *shape[-2:]) if scores.numel() else []
    for problem, one in enumerate(flat):
        expected = conditional_values(one, eq.assign(one, method="cycle-cancelling"))
        assert torch.equal(found.reshape(-1, *shape[-2:])[problem], expected)


def test_masked_rows_are_zero_whatever_they_hold(generator: torch.Generator) -> None:
    scores = draw_gumbel([5, 3], generator=generator)
    mask = torch.tensor([True, False, True, True, False])
    scores[1], scores[4, 0] = float("nan"), INF
    a = eq.assign(scores, mask=mask, method="cycle-cancelling")
    found = conditional_values(scores, a)
    kept = conditional_values(scores[mask], eq.assign(scores[mask], method="cycle-cancelling"))
    assert torch.equal(found[mask], kept)
    assert bool((found[~mask] == 0).all())


def test_an_assignment_that_is_not_optimal_is_refused() -> None:
    scores = torch.tensor([[2.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
    a = eq.assign(scores, method="cycle-cancelling")
    worse = replace(a, z=1 - a.z, value=torch.tensor(1.0).double(), gap=torch.tensor(4.0).double())
    with pytest.raises(ValueError, match="assignment must be optimal, got one with a gap of 4 at a value of 1"):
        conditional_values(scores, worse)


def test_scores_and_assignment_must_fit() -> None:
    scores = torch.zeros(4, 2)
    a = eq.assign(scores, method="cycle-cancelling")
    with pytest.raises(ValueError, match=r"assignment.z must have shape \[5\]"):
        conditional_values(torch.zeros(5, 2), a)
    with pytest.raises(ValueError, match=r"assignment.counts must have shape \[3\]"):
        conditional_values(torch.zeros(4, 3), a)


def test_scores_must_be_those_that_were_assigned(generator: torch.Generator) -> None:
    scores = draw_gumbel([6, 3], generator=generator)
    a = eq.assign(scores)
    conditional_values(scores.double(), a)
    with pytest.raises(
        ValueError, match="assignment must be of these scores, got a value of .* add up to .*: pass what"
    ):
        conditional_values(-scores, a)


def test_the_operators_pass_opcheck(generator: torch.Generator) -> None:
    scores = draw_gumbel([2, 6, 3], generator=generator)
    a = eq.assign(scores, method="cycle-cancelling")
    operators = torch.ops.equipoise
    checks = [
        (operators.detour_costs.default, (scores, a.z, a.counts, a.capacity, a.value, a.prices, a.gap)),
        (operators.conditional_values.default, (scores, a.z, a.mask, a.value, detour_costs(scores, a))),
    ]
    for operator, arguments in checks:
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def test_the_kernels_equal_their_twins_in_torch(random_problem: Callable) -> None:
    checked = 0
    for seed in range(200):
        scores, capacity, mask = random_problem(seed)
        try:
            a = eq.assign(scores, capacity, mask=mask)
        except ValueError:
            continue
        wide = scores.double().where(a.mask.unsqueeze(-1), 0.0)[None]
        largest = float(wide[wide.isfinite()].abs().numpy().max(initial=0.0))
        twin = detours_from_costs(move_cost(wide, a.z[None], a.capacity[None], a.counts[None]), a.prices[None])[0]
        torch.testing.assert_close(detour_costs(scores, a), twin, rtol=1e-12, atol=1e-12 * largest)
        values = add_detours(*(x[None] for x in (scores, a.z, a.mask, a.value, detour_costs(scores, a))))[0]
        torch.testing.assert_close(conditional_values(scores, a), values, rtol=1e-12, atol=1e-12 * largest)
        checked += 1
    assert checked >= 100
