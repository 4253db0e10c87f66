# SPDX-License-Identifier: Apache-2.0
"""Several experts a row: exact against enumeration and linear programming, certified, and refused in clear words."""

import itertools
import math

import numpy as np
import pytest
import torch

import equipoise as eq
from support.families import FAMILIES, draw_scores


def check_several(scores: torch.Tensor, a: eq.Assignment, top_k: int) -> None:
    """Everything that an `Assignment` of several experts a row promises, recomputed in float64."""
    s, k = scores.detach().double(), scores.shape[-1]
    taken = a.z < k
    assert torch.equal(taken, a.mask.unsqueeze(-1).expand_as(a.z))
    assert torch.equal(a.counts, (a.z.unsqueeze(-1) == torch.arange(k)).sum((-3, -2)))
    assert bool((a.counts <= a.capacity).all())
    assert bool((a.prices.isfinite() & (a.prices >= 0)).all())
    assert bool((a.prices[a.counts < a.capacity] == 0).all())
    order = a.z.sort(-1).values
    assert bool(((order.diff(dim=-1) > 0) | (order[..., 1:] == k)).all()), "a row has an expert twice"
    net = s - a.prices.unsqueeze(-2)
    experts = a.z.clamp(max=k - 1)
    own = net.gather(-1, experts).where(taken, 0.0)
    assert bool((own.diff(dim=-1) <= 0).all()), "best offer first"
    missed = (net.topk(top_k, -1).values.where(taken, 0.0).sum(-1) - own.sum(-1)).clamp_min(0.0)
    gap = missed.sum(-1) + (a.prices * (a.capacity - a.counts)).sum(-1)
    value = s.gather(-1, experts).where(taken, 0.0).sum((-2, -1))
    scale = torch.maximum(value.abs(), s[s.isfinite()].abs().max())
    assert bool(((a.value - value).abs() <= 1e-12 * scale).all())
    assert bool((gap <= 1e-9 * scale).all()), (gap, scale)
    assert bool(((a.gap - gap).abs() <= 1e-12 * scale).all())


def best_by_enumeration(scores: np.ndarray, capacity: np.ndarray, top_k: int) -> float:
    n, k = scores.shape
    choices = list(itertools.combinations(range(k), top_k))
    best = -math.inf
    for rows in itertools.product(choices, repeat=n):
        counts = np.bincount(np.array(rows).ravel(), minlength=k)
        if (counts <= capacity).all():
            best = max(best, sum(float(scores[i, list(row)].sum()) for i, row in enumerate(rows)))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_best_of_all_assignments(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, k = int(rng.integers(1, 5)), int(rng.integers(2, 5))
    top_k = int(rng.integers(1, k + 1))
    scores = rng.normal(size=(n, k)) if seed % 2 else rng.integers(0, 3, (n, k)).astype(float)
    scores[rng.random((n, k)) < 0.15] = -np.inf
    capacity = np.full(k, -(-top_k * n // k)) + rng.integers(0, 2, k)
    best = best_by_enumeration(scores, capacity, top_k)
    if best == -math.inf:
        with pytest.raises(ValueError, match="scores must leave"):
            eq.assign(torch.from_numpy(scores), capacity, top_k=top_k)
        return
    a = eq.assign(torch.from_numpy(scores), capacity, top_k=top_k)
    check_several(torch.from_numpy(scores), a, top_k)
    assert float(a.value) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize(("n", "k", "top_k"), [(60, 7, 3), (300, 12, 2), (700, 16, 5)])
def test_value_of_the_linear_program(n: int, k: int, top_k: int, factor: float) -> None:
    optimize, sparse = pytest.importorskip("scipy.optimize"), pytest.importorskip("scipy.sparse")
    scores, capacity = draw_scores("gumbel", n, k, seed=n), math.ceil(factor * top_k * n / k)
    rows, columns = sparse.kron(sparse.eye(n), np.ones((1, k))), sparse.kron(np.ones((1, n)), sparse.eye(k))
    program = optimize.linprog(
        -scores.double().numpy().ravel(),
        A_eq=rows,
        b_eq=np.full(n, top_k),
        A_ub=columns,
        b_ub=np.full(k, capacity),
        bounds=(0, 1),
        method="highs",
    )
    a = eq.assign(scores, capacity, top_k=top_k)
    check_several(scores, a, top_k)
    assert float(a.value) == pytest.approx(-program.fun, rel=1e-9)


@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_at_a_size_that_is_sampled(family: str, factor: float) -> None:
    n, k, top_k = 2000, 16, 3
    scores = draw_scores(family, n, k, seed=5)
    a = eq.assign(scores, math.ceil(factor * top_k * n / k), top_k=top_k)
    check_several(scores, a, top_k)
    warm = eq.assign(scores, math.ceil(factor * top_k * n / k), top_k=top_k, prices=a.prices)
    check_several(scores, warm, top_k)
    assert float(warm.value) == pytest.approx(float(a.value), rel=1e-9)


@pytest.mark.parametrize("method", ["primal-dual", "settle"])
@pytest.mark.parametrize(("k", "top_k"), [(3, 2), (4, 2), (4, 3), (8, 4)])
def test_a_row_whose_offers_are_tied_but_for_the_best_is_not_taken_for_content(k: int, top_k: int, method: str) -> None:
    """Rows want one expert each and are indifferent between the others; some experts have room for few."""
    rng = np.random.default_rng(k)
    for n in (129, 200):
        for _ in range(30):
            scores = torch.nn.functional.one_hot(torch.from_numpy(rng.integers(0, k, n)), k).float()
            capacity = torch.from_numpy(rng.integers(1, n, k))
            capacity[: top_k + 1] = n
            check_several(scores, eq.assign(scores, capacity, top_k=top_k, method=method), top_k)


@pytest.mark.parametrize("n", [30, 1500])
def test_one_expert_a_row_is_the_usual_problem(n: int) -> None:
    scores = draw_scores("gumbel", n, 8, seed=1)
    one, usual = eq.assign(scores, top_k=1), eq.assign(scores)
    assert one.z.shape == (n, 1)
    assert torch.equal(one.z[:, 0], usual.z)
    assert torch.equal(one.prices, usual.prices)


@pytest.mark.parametrize("n", [30, 1500])
def test_all_experts_of_a_row(n: int) -> None:
    scores = draw_scores("gumbel", n, 8, seed=2)
    a = eq.assign(scores, top_k=8)
    check_several(scores, a, 8)
    assert a.counts.tolist() == [n] * 8


@pytest.mark.parametrize("n", [40, 1600])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_batches_masks_forbidden_pairs_and_types(n: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    scores = torch.randn(2, 2, n, 8, generator=generator).to(dtype)
    scores[torch.rand(scores.shape, generator=generator) < 0.1] = -torch.inf
    mask = torch.rand(2, 2, n, generator=generator) < 0.9
    a = eq.assign(scores, top_k=2, mask=mask, capacity=n // 3)
    for i, j in itertools.product(range(2), repeat=2):
        part = eq.Assignment(*(x[i, j] for x in (a.z, a.counts, a.capacity, a.mask, a.value, a.prices, a.gap)))
        check_several(scores[i, j], part, 2)
        assert torch.equal(part.z, eq.assign(scores[i, j], top_k=2, mask=mask[i, j], capacity=n // 3).z)
    default = eq.assign(torch.randn(2, n, 8, generator=generator), top_k=2, mask=mask[0])
    assert default.capacity[:, 0].tolist() == [-(-2 * int(rows) // 8) for rows in mask[0].sum(-1)]


def test_same_result_for_any_number_of_threads() -> None:
    scores = draw_scores("gumbel", 20_000, 16, seed=3)
    torch.set_num_threads(1)
    one = eq.assign(scores, top_k=2)
    torch.set_num_threads(2)
    two = eq.assign(scores, top_k=2)
    assert torch.equal(one.z, two.z)
    assert torch.equal(one.prices, two.prices)


def test_gradient_of_the_value_is_the_assignment() -> None:
    scores = draw_scores("gumbel", 12, 4, seed=4).requires_grad_()
    a = eq.assign(scores, top_k=2)
    a.value.backward()
    expected = torch.zeros(12, 4).scatter(1, a.z, 1.0)
    assert scores.grad is not None
    assert torch.equal(scores.grad, expected)


def test_bad_input() -> None:
    scores = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"top_k must be between 1 and the number of experts, 3, got 4: "):
        eq.assign(scores, top_k=4)
    with pytest.raises(ValueError, match=r"top_k must be between 1 and the number of experts, 3, got 0: "):
        eq.assign(scores, top_k=0)
    with pytest.raises(ValueError, match=r"at least 2 times the number of rows, 8, got 6: raise it"):
        eq.assign(scores, capacity=2, top_k=2)
    with pytest.raises(
        ValueError, match=r'top_k needs the method "auto", "primal-dual" or "settle", got \'auction\': '
    ):
        eq.assign(scores, top_k=2, method="auction")
    forbidden = torch.zeros(4, 3)
    forbidden[2, 1:] = -torch.inf
    with pytest.raises(ValueError, match=r"leave every row 2 experts, but row 2 is -inf for all but 1: allow it more"):
        eq.assign(forbidden, top_k=2)
    narrow = torch.zeros(4, 4)
    narrow[:, 2:] = -torch.inf
    with pytest.raises(ValueError, match=r"confines 4 places of 4 rows, among them row 0, to experts 0, which hold 2"):
        eq.assign(narrow, top_k=2)


def test_conditional_values_are_of_one_expert_a_row() -> None:
    scores = torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"assignment.z must have shape"):
        eq.conditional_values(scores, eq.assign(scores, top_k=2))
