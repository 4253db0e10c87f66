# SPDX-License-Identifier: Apache-2.0
"""The stages of the default solver, each by the property that it promises."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from equipoise.assignment import _primal_dual
from equipoise.assignment._kernels import _books, _contested, _flow, _newton, _smoothing
from support.families import FAMILIES, draw_scores

Draw = Callable[[int, int, torch.Generator], torch.Tensor]

N, K = 3000, 12


def problem(
    scores: torch.Tensor, top_k: int = 1, slack: float = 1.0, capacity: int | None = None
) -> _primal_dual._Problem:
    n, k = scores.shape
    each = -(-int(slack * top_k * n) // k) if capacity is None else capacity
    z, mask = np.empty((n, top_k), np.int32), np.ones(n, np.bool_)
    return _primal_dual._Problem(scores.numpy(), mask, np.full(k, each), np.zeros(k), z, 0, False)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("family", ["gumbel", "clustered", "duplicates", "forbidden"])
def test_settled_rows_keep_their_experts_wherever_prices_go(family: str, top_k: int) -> None:
    scores = draw_scores(family, N, K, seed=1)
    rng = np.random.default_rng(1)
    p = problem(scores, top_k)
    p.prices[:] = rng.random(K).astype(np.float32)
    radius = 0.2 * rng.random(K)
    before = p.prices.copy()
    (rows, need, first, cols, _), _ = p._collect(p.prices, radius, 1)
    is_settled = np.ones(N, np.bool_)
    is_settled[rows] = False
    assert is_settled.any()
    for _ in range(20):
        prices = before + radius * rng.uniform(-0.999, 0.999, K)
        best = np.sort(np.argsort(-(scores.double().numpy() - prices), kind="stable")[:, :top_k])
        assert (best[is_settled] == np.sort(p.z)[is_settled]).all()
        for a, row in enumerate(rows):
            held = set(best[row].tolist())
            certain = set(p.z[row, : top_k - need[a]].tolist())
            candidates = set(cols[first[a] : first[a + 1]].tolist())
            assert certain <= held <= certain | candidates


@pytest.mark.parametrize("top_k", [1, 3])
def test_leads_are_the_least_over_settled_rows(top_k: int) -> None:
    scores = draw_scores("gumbel", N, K, seed=2)
    p = problem(scores, top_k)
    (rows, need, *_), (counts, leads) = p._collect(p.prices, np.full(K, 0.1), 1)
    expected = np.full((K, K), np.inf, np.float32)
    s = scores.numpy()
    for i in set(range(N)) - set(rows.tolist()):
        others = np.setdiff1d(np.arange(K), p.z[i])
        for j in p.z[i]:
            expected[j, others] = np.minimum(expected[j, others], s[i, j] - s[i, others])
    off = ~np.eye(K, dtype=bool)
    assert (leads[off] == expected[off]).all()
    assert counts.sum() == top_k * (N - len(rows)) + sum(top_k - need)


def test_a_lead_that_prices_exceed_is_noticed() -> None:
    leads = np.full((2, 2), np.inf, np.float32)
    leads[0, 1] = 1.0
    assert _books.settled_for_sure(leads, np.array([0.9, 0.0]))
    assert not _books.settled_for_sure(leads, np.array([1.1, 0.0]))
    assert _books.settled_for_sure(leads, np.array([0.0, 5.0]))


@pytest.mark.parametrize("need", [2, 3, 5])
def test_shares_sum_to_what_a_row_takes(need: int) -> None:
    rng = np.random.default_rng(need)
    for width in range(need, 9):
        offers, x, weight = rng.normal(size=width), np.empty(width), np.empty(width)
        _smoothing.shares(offers, width, need, 0.1, x, weight)
        assert x.sum() == pytest.approx(need, abs=0.02)
        assert ((x >= 0) & (x <= 1)).all()
        assert (np.diff(x[np.argsort(offers)]) >= 0).all()


@pytest.mark.parametrize("need", [1, 2])
def test_curvature_is_the_slope_of_demand(need: int) -> None:
    rng = np.random.default_rng(0)
    m, k, mu = 400, 5, 0.3
    rows, needs, first = np.arange(m, dtype=np.int32), np.full(m, need, np.int32), np.arange(0, m * k + 1, k)
    lists = (rows, needs, first, np.tile(np.arange(k, dtype=np.int32), m), rng.normal(size=m * k))

    def demand(prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        total, pairs = np.zeros(k), np.zeros((k, k))
        _smoothing.demand_of_lists(lists, prices, mu, total, pairs)
        _newton.laplacian(pairs)
        return total, pairs

    prices, step = rng.normal(size=k), 0.05
    _, pairs = demand(prices)
    for j in range(k):
        shift = step * (np.arange(k) == j)
        slope = (demand(prices - shift)[0] - demand(prices + shift)[0]) / (2 * step)
        # (1 + x/16)^16 is not quite its own derivative.
        assert slope == pytest.approx(pairs[j] / mu, abs=0.3 * pairs[j, j] / mu)


def test_conjugate_gradients_solve_a_laplacian() -> None:
    rng = np.random.default_rng(3)
    weights = rng.random((20, 20)) * (rng.random((20, 20)) < 0.3)
    weights = weights + weights.T
    matrix = np.diag(weights.sum(1) + 1e-2) - weights
    np.fill_diagonal(matrix, weights.sum(1) - np.diag(weights) + 1e-2)
    right = rng.normal(size=20)
    assert _newton.conjugate_gradients(matrix, right) == pytest.approx(np.linalg.solve(matrix, right), abs=1e-2)


@pytest.mark.parametrize("slack", [1.0, 1.3])
@pytest.mark.parametrize("top_k", [1, 2])
def test_flow_from_any_prices_ends_at_an_optimum(top_k: int, slack: float) -> None:
    scores = draw_scores("duplicates", 200, 6, seed=4)
    p = problem(scores, top_k, slack)
    scores, mask, capacity, target, _ = p.problem
    for start in (np.zeros(6), np.arange(6.0), np.array([0.0, 0.0, 3.0, 0.0, 3.0, 1.0])):
        p.prices[:] = start
        lists, _ = _contested.all_candidates(scores, mask, capacity, top_k)
        held = np.empty(len(lists[3]), np.bool_)
        stuck, _ = _flow.exact_flow(lists, target.astype(np.int64), p.prices, held)
        assert stuck < 0
        _books.take_held(lists, held, p.z)
        _, missed, proved = _books.prove(scores, lists[0], capacity, p.prices, p.z)
        assert proved, missed


def test_flow_says_who_is_stuck() -> None:
    """Two rows may only go to expert 0, which takes one."""
    rows, need, first = np.arange(2, dtype=np.int32), np.ones(2, np.int32), np.array([0, 1, 2])
    lists = (rows, need, first, np.zeros(2, np.int32), np.zeros(2))
    stuck, _ = _flow.exact_flow(lists, np.array([1, 1]), np.zeros(2), np.empty(2, np.bool_))
    assert stuck == 0


def passes(p: _primal_dual._Problem) -> int:
    return sum(line.startswith("every 1:") for line in p.log)


@pytest.mark.parametrize("slack", [1.0, 1.25])
@pytest.mark.parametrize("seed", range(4))
def test_usual_problems_take_one_pass_and_few_chains(seed: int, slack: float) -> None:
    scores = draw_scores("gumbel", 8192, 16, seed=seed) + torch.randn(16, generator=torch.Generator().manual_seed(seed))
    p = problem(scores, slack=slack)
    p.solve(warm=False)
    assert passes(p) <= 2
    assert int(p.log[-1].split()[-2]) <= 256  # of 8192 rows


def _saturated(n: int, k: int, generator: torch.Generator) -> torch.Tensor:
    return torch.sigmoid(3.0 * (torch.randn(n, k, generator=generator) + torch.randn(k, generator=generator)))


def _many_clusters(n: int, k: int, generator: torch.Generator) -> torch.Tensor:
    prototypes, member = torch.randn(32, k, generator=generator), torch.randint(32, (n,), generator=generator)
    return prototypes[member] + 1e-4 * torch.randn(n, k, generator=generator)


@pytest.mark.parametrize("draw", [_saturated, _many_clusters])
@pytest.mark.parametrize(("n", "k", "top_k"), [(8192, 16, 1), (4096, 16, 4), (4096, 64, 4)])
def test_prices_that_are_lost_are_looked_for_with_wider_lists(draw: Draw, n: int, k: int, top_k: int) -> None:
    """Offers are nearly tied, so that prices move further than the first lists reach; yet chains stay few."""
    for seed in range(3):
        p = problem(draw(n, k, torch.Generator().manual_seed(seed)), top_k)
        _, gap = p.solve(warm=False)
        assert gap < 1e-9 * n
        assert passes(p) <= 8, p.log
        assert sum(int(line.split()[-2]) for line in p.log if line.endswith("chains")) <= n / 8, p.log


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("slack", [1.0, 1.25])
def test_newton_steps_leave_few_rows_to_chains(slack: float, top_k: int) -> None:
    """And the rows that they drop hold what they take for certain: with what chains find, the whole is optimal."""
    scores = draw_scores("gumbel", 8192, 16, seed=5) + torch.randn(16, generator=torch.Generator().manual_seed(5))
    p = problem(scores, top_k, slack)
    _, gap = p.solve(warm=False)
    few, contested = int(p.log[-1].split()[0]), int(p.log[-1].split()[2])
    assert 0 < few < contested / 4
    assert gap < 1e-8
    counts, capacity = np.bincount(p.z.ravel(), minlength=16), p.problem[2]
    assert (counts <= capacity).all()
    offers = scores.double().numpy() - p.prices
    held = np.take_along_axis(offers, p.z.astype(np.int64), 1)
    missed = np.sort(offers, 1)[:, ::-1][:, :top_k].sum() - held.sum() + ((capacity - counts) * p.prices).sum()
    assert missed == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize("over", [1.01, 1.03, 1.1])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_where_only_the_most_popular_expert_is_full_chains_stay_few(top_k: int, over: float) -> None:
    scores = draw_scores("gumbel", 8192, 8, seed=3) + torch.randn(8, generator=torch.Generator().manual_seed(3))
    counts = torch.bincount(scores.topk(top_k).indices.flatten())
    p = problem(scores, top_k, capacity=int(counts.max() / over))
    _, gap = p.solve(warm=False)
    assert gap < 1e-9
    assert sum(int(line.split()[-2]) for line in p.log if line.endswith("chains")) <= 256  # of 8192 rows


def test_a_sample_of_masked_rows_asks_for_as_much_as_it_has_rows() -> None:
    """Of an expert that all rows may take, a sample has more rows than a seventh of the capacity."""
    n, k, top_k = 9000, 24, 8
    p = problem(draw_scores("popular", n, k, seed=3), top_k)
    mask = np.arange(n) % 10 < 6
    mask[::7] = True
    capacity = np.full(k, int(1.05 * top_k * mask.sum()) // k)
    capacity[:4] = mask.sum()
    q = _primal_dual._Problem(p.problem[0], mask, capacity, np.zeros(k), p.z, 0, False)
    _, gap = q.solve(warm=False)
    assert gap < 1e-9 * n
    assert len(q.log) <= 6, q.log
    assert sum(int(line.split()[-2]) for line in q.log if line.endswith("chains")) <= n / 8, q.log


def test_equal_prices_and_a_warm_start_are_used_where_a_sample_accepts_them() -> None:
    plain = draw_scores("gumbel", 8192, 16, seed=1)
    p = problem(plain)
    p.solve(warm=False)
    assert p.log[0].startswith("start from equal prices")
    biased = plain + 3.0 * torch.randn(16, generator=torch.Generator().manual_seed(2))
    cold = problem(biased)
    cold.solve(warm=False)
    assert cold.log[0].startswith("start from sampled prices")
    warm = problem(biased)
    warm.prices[:] = cold.prices
    warm.solve(warm=True)
    assert warm.log[0].startswith("start from given prices")
    assert warm.prices == pytest.approx(cold.prices, abs=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_prices_of_another_problem_do_no_harm(family: str) -> None:
    scores = draw_scores(family, N, K, seed=6)
    p, q = problem(scores), problem(scores)
    value, _ = p.solve(warm=False)
    q.prices[:] = 10.0 * np.arange(K)
    again, _ = q.solve(warm=True)
    assert again == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_sample_accepts_prices_only_where_rows_would_be_balanced(top_k: int) -> None:
    p = problem(draw_scores("gumbel", 8192, K, seed=7), top_k)
    assert p._accepts(np.zeros(K), 3)
    for j in range(K):
        assert not p._accepts(0.7 * (np.arange(K) == j), 3)
    assert problem(torch.zeros(8192, K), top_k)._accepts(np.zeros(K), 3)  # rows that are tied go where there is room
    slack = problem(draw_scores("gumbel", 8192, K, seed=7), top_k, slack=1.5)
    assert slack._accepts(np.zeros(K), 3)
    assert not slack._accepts(0.7 * (np.arange(K) == 0), 3)  # a price above the least asks for a full expert
