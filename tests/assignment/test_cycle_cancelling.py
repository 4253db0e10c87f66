# SPDX-License-Identifier: Apache-2.0
"""Cycle cancelling against enumeration and scipy, on every family of scores."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from equipoise.assignment import _cycles
from equipoise.assignment._cycle_cancelling import cycle_cancelling, to_grid
from equipoise.assignment._cycles import cancel_cycles, find_moves
from equipoise.assignment._move_cost import move_cost
from equipoise.assignment._proof import certify
from equipoise.ops import count_groups, draw_gumbel

INF = float("inf")


def solve_and_check(
    scores: torch.Tensor,
    capacity: torch.Tensor,
    mask: torch.Tensor | None = None,
    prices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solves; checks feasibility, the convention of prices and the certificate; returns z, value, gap."""
    k = scores.shape[-1]
    rows = torch.ones(scores.shape[:2], dtype=torch.bool) if mask is None else mask
    z, final_prices = cycle_cancelling(scores, capacity, mask, prices)
    _, _, counts, value, _, _, gap = certify(scores, z, final_prices, capacity, mask)
    assert bool((z[rows] < k).all())
    assert bool((z[~rows] == k).all())
    assert bool((counts <= capacity).all())
    assert bool(final_prices.isfinite().all())
    assert bool((final_prices >= 0).all())
    assert bool((final_prices[counts < capacity] == 0).all())
    assert bool((final_prices.amin(-1) == 0).all())
    if scores.numel():
        largest = scores.double().where(scores.isfinite() & rows.unsqueeze(-1), 0.0).abs().amax((1, 2))
        assert bool((gap <= 1e-12 * torch.maximum(value.abs(), largest)).all()), (gap, value)
    return z, value, gap


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_equals_enumeration(enumerate_all: Callable, random_problem: Callable, seed: int, warm: bool) -> None:
    scores, capacity, mask = random_problem(seed)
    exact = enumerate_all(scores, capacity, mask)
    prices = torch.linspace(3, 0, len(capacity), dtype=torch.float64)[None] if warm else None
    if not exact.feasible:
        with pytest.raises(ValueError, match="scores must leave"):
            cycle_cancelling(scores[None], capacity[None], mask[None], prices)
        return
    _, value, _ = solve_and_check(scores[None], capacity[None], mask[None], prices)
    largest = float(scores[scores.isfinite()].abs().max()) if scores.isfinite().any() else 0.0
    assert abs(value.item() - exact.value) <= 1e-13 * max(abs(exact.value), largest)


def best_by_scipy(scores: torch.Tensor, capacity: torch.Tensor) -> float:
    columns = np.repeat(scores.numpy(), capacity.numpy(), axis=1)
    rows, chosen = linear_sum_assignment(columns, maximize=True)
    return float(columns[rows, chosen].sum())


@pytest.mark.parametrize("slots", ["tight", "slack", "unequal"])
@pytest.mark.parametrize(("n", "k"), [(7, 3), (60, 6), (150, 8), (5, 12)])
def test_equals_scipy_on_repeated_columns(n: int, k: int, slots: str, generator: torch.Generator) -> None:
    scores = torch.randn(4, n, k, generator=generator).double()
    scores += draw_gumbel(scores.shape, generator=generator, dtype=torch.float64)
    least = -(-n // k)
    capacity = {
        "tight": torch.full([k], least),
        "slack": torch.full([k], least + 1 + least // 4),
        "unequal": torch.arange(k) * 2 * least // (k - 1) + 1,
    }[slots].expand(4, k)
    _, value, _ = solve_and_check(scores, capacity)
    for problem in range(4):
        assert value[problem].item() == pytest.approx(best_by_scipy(scores[problem], capacity[problem]), rel=1e-13)


def families(n: int, k: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    noise = draw_gumbel([n, k], generator=g, dtype=torch.float64)
    missing = torch.rand(n, k, generator=g) < 0.3
    return {
        "gumbel": noise + normal(n, k),
        "logits": normal(n, k),
        "sharp": 8 * normal(n, k) + noise,
        "one preferred": noise + 10.0 * (torch.arange(k) == 0),
        "skewed": noise + 3 * normal(1, k),
        "clustered": normal(4, k)[torch.randint(4, (n,), generator=g)] + 1e-3 * normal(n, k),
        "clusters": normal(4, k)[torch.randint(4, (n,), generator=g)],
        "identical": normal(1, k).expand(n, k),
        "equal": torch.zeros(n, k, dtype=torch.float64),
        "binary": torch.randint(0, 2, (n, k), generator=g).double(),
        "duplicates": (4 * normal(n, k)).round() / 4,
        "large": 1e30 * noise,
        "small": 1e-30 * noise,
        "rank 1": normal(n, 1) @ normal(1, k),
        "rank 2": normal(n, 2) @ normal(2, k),
        "heavy": normal(n, k) / normal(n, k),
        "row offsets": noise + 1e6 * normal(n, 1),
        "forbidden": noise.masked_fill(missing, -INF),
        "nearly forbidden": noise.masked_fill(missing, float(torch.finfo(torch.float32).min)),
    }


@pytest.mark.parametrize("slack", [1.0, 1.25])
@pytest.mark.parametrize("family", families(1, 1))
def test_every_family_is_certified(family: str, slack: float) -> None:
    scores = families(192, 12)[family][None]
    capacity = torch.full([1, 12], int(16 * slack))
    _, value, gap = solve_and_check(scores, capacity)
    # A score that stands for "forbidden" must not blur the others: this is measured by what was chosen.
    assert float(gap) <= 1e-13 * float(value.abs().clamp(min=1e-300)) or family == "equal"


@pytest.mark.parametrize("slack", [1.0, 1.25])
def test_identical_rows_in_many_experts_end(slack: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every cycle costs zero but for rounding, and there are 64! of them. From a start without any bids.
    monkeypatch.setattr("equipoise.assignment._auction._MAX_ROUNDS", 0)
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(1, 64, generator=generator, dtype=torch.float64) * torch.pi
    scores = rows.expand(640, 64)[None]
    solve_and_check(scores, torch.full([1, 64], int(10 * slack)))


def test_tied_rows_move_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # 500 rows of each of two kinds, each started at the wrong expert: one round, not 500.
    rounds = 0

    def count(*arguments: Any) -> _cycles.Moves:
        nonlocal rounds
        rounds += 1
        return find_moves(*arguments)

    monkeypatch.setattr(_cycles, "find_moves", count)
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64).repeat_interleave(500, 0)[None]
    wrong = torch.tensor([1, 0]).repeat_interleave(500)[None]
    z = cancel_cycles(scores, wrong, torch.full([1, 2], 500))
    assert torch.equal(z, 1 - wrong)
    assert rounds == 2  # one moves everything, one finds nothing left


def test_disjoint_cycles_are_cancelled_in_one_round() -> None:
    # Four pairs of experts, each with its rows exchanged; between the pairs nothing can be gained.
    scores = torch.full([1, 8, 8], -9.0, dtype=torch.float64)
    scores[0, range(8), range(8)] = torch.arange(1.0, 9.0, dtype=torch.float64)
    exchanged = torch.tensor([[1, 0, 3, 2, 5, 4, 7, 6]])
    moves = find_moves(scores, exchanged, torch.ones(1, 8, dtype=torch.int64))
    assert moves.apply(exchanged).tolist() == [list(range(8))]
    assert torch.equal(moves.successor, exchanged)


def test_free_slots_take_part_in_cycles() -> None:
    # Expert 1 is worth more to all four rows and has two free slots: two rows move there, two stay.
    scores = torch.tensor([[0.0, 1.0], [0.0, 4.0], [0.0, 3.0], [0.0, 2.0]], dtype=torch.float64)[None]
    z = cancel_cycles(scores, torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[4, 2]]))
    assert z[0].tolist() == [0, 1, 1, 0]


def test_a_batch_is_solved_as_its_problems_are() -> None:
    generator = torch.Generator().manual_seed(6)
    scores = draw_gumbel([9, 40, 5], generator=generator) * torch.logspace(-3, 3, 9)[:, None, None]
    capacity = torch.randint(8, 12, (9, 5), generator=generator)
    mask = torch.rand(9, 40, generator=generator) < 0.9
    z, prices = cycle_cancelling(scores, capacity, mask, None)
    for problem in range(9):
        one = slice(problem, problem + 1)
        alone, alone_prices = cycle_cancelling(scores[one], capacity[one], mask[one], None)
        assert torch.equal(z[one], alone)
        assert torch.equal(prices[one], alone_prices)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_floating_dtype_is_solved_as_its_values_are(dtype: torch.dtype, generator: torch.Generator) -> None:
    scores = draw_gumbel([2, 40, 4], generator=generator).to(dtype)
    capacity = torch.full([2, 4], 10)
    solve_and_check(scores, capacity)
    z, prices = cycle_cancelling(scores, capacity, None, None)
    z_wide, prices_wide = cycle_cancelling(scores.double(), capacity, None, None)
    assert torch.equal(z, z_wide)
    assert torch.equal(prices, prices_wide)


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 3), (1, 4, 1), (1, 1, 1), (3, 2, 9)])
def test_empty_and_tiny(shape: tuple[int, int, int], generator: torch.Generator) -> None:
    b, n, k = shape
    solve_and_check(draw_gumbel(shape, generator=generator), torch.full([b, k], -(-n // k)))


@pytest.mark.parametrize("slack", [1.0, 1.25])
def test_warm_start_changes_nothing_of_the_value(slack: float, generator: torch.Generator) -> None:
    scores = draw_gumbel([3, 96, 6], generator=generator, dtype=torch.float64)
    capacity = torch.full([3, 6], int(16 * slack))
    _, cold, _ = solve_and_check(scores, capacity)
    earlier = torch.rand(3, 6, generator=generator, dtype=torch.float64) * 20 - 5
    _, warm, _ = solve_and_check(scores, capacity, prices=earlier)
    torch.testing.assert_close(warm, cold, rtol=1e-14, atol=0.0)


def test_the_grid_keeps_order_and_leaves_room_for_exact_sums() -> None:
    generator = torch.Generator().manual_seed(7)
    scores = torch.randn(3, 50, 20, generator=generator, dtype=torch.float64)
    scores *= torch.tensor([1e-305, 1.0, 1e305], dtype=torch.float64)[:, None, None]
    scores[:, 0, 0] = -INF
    grid = to_grid(scores)
    finite = grid[grid > -INF]
    assert torch.equal(finite, finite.round())
    assert float(finite.abs().max()) * 2 * 20 <= 2**53
    assert float(finite.abs().max()) * 2 * 20 > 2**50
    assert torch.equal(grid == -INF, scores == -INF)
    assert torch.equal(grid.argsort(-1), scores.argsort(-1))


# --- the pieces ------------------------------------------------------------------------------------------------------


def move_cost_by_loops(
    scores: torch.Tensor, z: torch.Tensor, capacity: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    n, k = scores.shape
    cost = torch.full([k, k], INF, dtype=torch.float64)
    for j in range(k):
        for to in range(k):
            losses = [float(scores[i, j] - scores[i, to]) for i in range(n) if z[i] == j]
            losses += [0.0] * int(counts[j] < capacity[j])
            cost[j, to] = 0.0 if j == to else min(losses, default=INF)
    return cost


def test_move_cost_equals_loops(generator: torch.Generator) -> None:
    scores = torch.randn(5, 12, 4, generator=generator, dtype=torch.float64)
    z = torch.randint(0, 5, (5, 12), generator=generator)  # 4: a row without an expert
    z[0] = 1  # experts without rows
    scores[torch.rand(scores.shape, generator=generator) < 0.3] = -INF
    scores.scatter_(-1, z.clamp(max=3).unsqueeze(-1), 0.5)
    scores[z == 4] = -INF
    counts = count_groups(z, 5)[:, :4]
    capacity = counts + torch.randint(0, 2, (5, 4), generator=generator)
    cost = move_cost(scores, z, capacity, counts)
    for problem in range(5):
        expected = move_cost_by_loops(scores[problem], z[problem], capacity[problem], counts[problem])
        assert torch.equal(cost[problem], expected)


def test_movers_are_ranked_by_loss_then_row_and_free_slots_come_before_losses() -> None:
    # Expert 0 has two free slots, which expert 1 can use: its rows gain 9 and 1 at expert 0, and the third loses 1.
    scores = torch.tensor([[5.0, 4.0], [5.0, 2.0], [9.0, 0.0], [5.0, 4.0], [5.0, -INF], [2.0, 1.0], [0.0, 1.0]])
    z = torch.tensor([[0, 0, 1, 0, 0, 1, 1]])
    moves = find_moves(scores.double()[None], z, torch.tensor([[6, 3]]))
    assert moves.successor.tolist() == [[1, 0]]
    assert moves.target[0].tolist() == [1, 1, 0, 1, 1, 0, 0]
    assert moves.rank[0].tolist() == [2, 4, 0, 3, 5, 1, 2]
    assert moves.units.tolist() == [2]
    assert moves.apply(z)[0].tolist() == [0, 0, 0, 0, 0, 0, 1]


def test_the_gap_is_the_difference_of_dual_and_primal(generator: torch.Generator) -> None:
    scores = torch.randn(4, 10, 3, generator=generator, dtype=torch.float64)
    z = torch.randint(0, 3, (4, 10), generator=generator)
    mask = torch.rand(4, 10, generator=generator) < 0.8
    z[~mask] = 3
    scores[~mask] = float("nan")
    prices = torch.rand(4, 3, generator=generator, dtype=torch.float64)
    capacity = torch.full([4, 3], 10)
    _, _, counts, value, _, _, gap = certify(scores, z, prices, capacity, mask)
    for problem in range(4):
        rows = mask[problem].nonzero().flatten()
        primal = sum(float(scores[problem, i, z[problem, i]]) for i in rows)
        dual = sum(float((scores[problem, i] - prices[problem]).max()) for i in rows) + 10 * float(
            prices[problem].sum()
        )
        assert counts[problem].tolist() == [int((z[problem] == j).sum()) for j in range(3)]
        assert float(value[problem]) == pytest.approx(primal, abs=1e-13)
        assert float(gap[problem]) == pytest.approx(dual - primal, abs=1e-12)
