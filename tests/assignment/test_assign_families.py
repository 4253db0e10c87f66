# SPDX-License-Identifier: Apache-2.0
"""Every family of scores is solved exactly, tight and with slack, in every dtype, and the result proves it."""

import math
from collections.abc import Callable

import numpy as np
import ot
import pytest
import torch
from scipy.optimize import linear_sum_assignment

import equipoise as eq
from support.families import FAMILIES, draw_scores
from support.methods import EXACT

# Up to 128 rows, or as many as experts, the solver takes a shorter way, so one size is below and two are above.
SIZES = [(120, 8), (600, 8), (3000, 32)]
FACTORS = [1.0, 1.25]
Check = Callable[[torch.Tensor, eq.Assignment], None]


def capacity_for(n: int, k: int, factor: float) -> int:
    return math.ceil(n * factor / k)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_certified(family: str, n: int, k: int, factor: float, check_certified: Check) -> None:
    scores = draw_scores(family, n, k, seed=n)
    single = eq.assign(scores, capacity_for(n, k, factor))
    double = eq.assign(scores.double(), capacity_for(n, k, factor))
    check_certified(scores, single)
    check_certified(scores, double)
    # The same numbers in a wider type are the same problem.
    largest = float(scores[scores.isfinite()].double().abs().max())
    assert abs(float(single.value - double.value)) <= 2e-9 * max(abs(float(double.value)), largest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("family", ["gumbel", "logits", "favourite", "forbidden"])
def test_half_precision_is_solved_as_its_values_are(
    family: str, factor: float, dtype: torch.dtype, check_certified: Check
) -> None:
    # Rounded to 8 or 11 bits, a thousand rows have many exact ties.
    scores = draw_scores(family, 1500, 16, seed=3).to(dtype)
    capacity = capacity_for(1500, 16, factor)
    a = eq.assign(scores, capacity)
    check_certified(scores, a)
    assert float(a.value) == pytest.approx(float(eq.assign(scores.double(), capacity).value), rel=2e-9)


def best_by_scipy(scores: torch.Tensor, capacity: int) -> float:
    columns = np.repeat(scores.double().numpy(), capacity, axis=1)
    rows, chosen = linear_sum_assignment(columns, maximize=True)
    return float(columns[rows, chosen].sum())


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_value_of_scipy_on_repeated_columns(family: str, factor: float) -> None:
    n, k = 360, 30  # above 128 rows and above four rows for each expert: the whole solver runs
    scores = draw_scores(family, n, k, seed=1)
    capacity = capacity_for(n, k, factor)
    best = best_by_scipy(scores, capacity)
    assert float(eq.assign(scores, capacity).value) == pytest.approx(best, rel=2e-9, abs=0.0)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("family", "n", "k"), [("gumbel", 4096, 16), ("clustered", 2048, 16), ("rank-2", 2048, 8)])
def test_value_of_pot(family: str, n: int, k: int, factor: float) -> None:
    scores = draw_scores(family, n, k, seed=2).double()
    capacity = capacity_for(n, k, factor)
    # A free slot is a row that is worth the same anywhere; all of them together are one source of mass.
    free = k * capacity - n
    cost = -torch.cat([scores, torch.zeros(1 if free else 0, k, dtype=torch.float64)]).numpy()
    mass = np.concatenate([np.ones(n), np.full(1 if free else 0, float(free))])
    best = -float((ot.emd(mass, np.full(k, float(capacity)), cost, numItermax=10**8) * cost).sum())
    assert float(eq.assign(scores, capacity).value) == pytest.approx(best, rel=2e-9)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "k"), [(40, 4), (600, 8), (3000, 32)])
@pytest.mark.parametrize("method", EXACT)
def test_a_score_that_stands_for_forbidden_does_not_blur_the_others(
    method: str, n: int, k: int, dtype: torch.dtype, factor: float
) -> None:
    """Many routers mask with the smallest float; what is left must be as exact as with -inf."""
    if method == "cycle-cancelling" and n > 1000:
        pytest.skip("same code at any size, and slow")
    scores = draw_scores("gumbel", n, k, seed=5).to(dtype)
    barred = torch.rand(n, k, generator=torch.Generator().manual_seed(6)) < 0.5
    rows = torch.arange(n)
    barred[rows, rows % k] = False
    capacity = capacity_for(n, k, factor)
    hard = eq.assign(scores.masked_fill(barred, -math.inf), capacity, method=method)
    soft = eq.assign(scores.masked_fill(barred, torch.finfo(torch.float32).min), capacity, method=method)
    assert not bool(barred.gather(-1, soft.z[:, None]).any())
    assert float(soft.value) == pytest.approx(float(hard.value), rel=2e-9)
    assert float(soft.gap) <= 1e-9 * float(hard.value)
