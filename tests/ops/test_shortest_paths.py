# SPDX-License-Identifier: Apache-2.0
"""Shortest paths against scipy, and walks against following pointers one step at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.csgraph import floyd_warshall as scipy_floyd_warshall

from equipoise.ops import floyd_warshall, negative_cycles, visited

INF = float("inf")


def random_graph(batch: int, k: int, missing: float, seed: int) -> torch.Tensor:
    """Edges of both signs without a negative cycle: nonnegative costs, shifted by a potential."""
    generator = torch.Generator().manual_seed(seed)
    cost = torch.rand(batch, k, k, generator=generator, dtype=torch.float64)
    potential = 3 * torch.randn(batch, k, generator=generator, dtype=torch.float64)
    cost += potential[:, :, None] - potential[:, None, :]
    cost[torch.rand(cost.shape, generator=generator) < missing] = INF
    cost.diagonal(dim1=-2, dim2=-1).zero_()
    return cost


def walk_cost(cost: torch.Tensor, next_node: torch.Tensor, source: int, end: int) -> float:
    total, node, steps = 0.0, source, 0
    while node != end:
        step = int(next_node[node, end])
        total, node, steps = total + float(cost[node, step]), step, steps + 1
        assert steps <= len(cost), "the path does not end"
    return total


@pytest.mark.parametrize("k", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("missing", [0.0, 0.3, 0.9])
def test_costs_equal_scipy(k: int, missing: float) -> None:
    cost = random_graph(4, k, missing, seed=k)
    found = floyd_warshall(cost).cost
    for problem in range(4):
        expected = scipy_floyd_warshall(cost[problem].numpy())
        np.testing.assert_allclose(found[problem].numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("missing", [0.0, 0.5])
def test_pointers_lead_along_paths_of_the_cost_found(missing: float) -> None:
    cost = random_graph(3, 9, missing, seed=1)
    paths = floyd_warshall(cost)
    for problem in range(3):
        for source in range(9):
            for end in range(9):
                if paths.cost[problem, source, end] < INF:
                    walked = walk_cost(cost[problem], paths.next_node[problem], source, end)
                    assert walked == pytest.approx(float(paths.cost[problem, source, end]), abs=1e-12)


def test_missing_edges_never_make_a_path_or_a_nan() -> None:
    cost = torch.full([2, 5, 5], INF)
    cost[1, 0, 1] = -4.0
    found = floyd_warshall(cost).cost
    expected = torch.where(torch.eye(5).bool(), 0.0, cost)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3, 3), (1, 1), (2, 3, 4, 4), (0, 0)])
def test_any_batch_shape(shape: tuple[int, ...]) -> None:
    paths = floyd_warshall(torch.ones(shape))
    assert paths.cost.shape == paths.next_node.shape == shape
    assert paths.next_node.dtype == torch.int64


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3, 3), (1, 1), (2, 3, 4, 4), (0, 0)])
def test_cycles_of_any_batch_shape(shape: tuple[int, ...]) -> None:
    found = negative_cycles(torch.ones(shape))
    assert found.shape == shape[:-1]
    assert bool((found == shape[-1]).all())


def test_each_problem_has_its_own_cycles() -> None:
    sound = random_graph(1, 6, 0.2, seed=2)
    one, two = torch.ones(1, 6, 6).double(), torch.ones(1, 6, 6).double()
    one[0, 0, 1] = two[0, 4, 5] = -3.0
    two[0, 1, 2], two[0, 2, 1], two[0, 5, 4] = -3.0, 0.0, 0.0
    found = negative_cycles(torch.cat([one, sound, two]))
    assert found.tolist() == [[1, 0, 6, 6, 6, 6], [6] * 6, [6, 2, 1, 6, 5, 4]]


@given(st.integers(1, 7), st.integers(0, 2**32 - 1), st.integers(0, 6))
def test_finds_negative_cycles_if_and_only_if_there_are_some(k: int, seed: int, shift: int) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.integers(-3, 4, (k, k)).astype(float) + shift / 2
    cost[rng.random((k, k)) < 0.2] = np.inf
    np.fill_diagonal(cost, 0.0)
    successor = negative_cycles(torch.from_numpy(cost)).tolist()
    on_cycle = {j for j in range(k) if successor[j] < k}
    assert bool(on_cycle) == has_negative_cycle(cost)
    assert on_cycle == {successor[j] for j in on_cycle}  # each node is entered once: the cycles are disjoint
    while on_cycle:
        start = node = min(on_cycle)
        total = 0.0
        while node in on_cycle:
            on_cycle.remove(node)
            total, node = total + cost[node, successor[node]], successor[node]
        assert node == start
        assert total < 0


def has_negative_cycle(cost: np.ndarray) -> bool:
    """Bellman-Ford from everywhere at once: costs still fall after k rounds."""
    best = np.zeros(len(cost))
    for _ in range(len(cost)):
        best = (cost + best[None, :]).min(1)
    return bool(((cost + best[None, :]).min(1) < best).any())


@given(st.lists(st.integers(0, 10), min_size=1, max_size=11), st.integers(0, 10))
def test_walks_visit_what_single_steps_do(raw: list[int], start: int) -> None:
    k = len(raw)
    pointer, node = [p % k for p in raw], start % k
    orbit = [node]
    for _ in range(k):
        orbit.append(pointer[orbit[-1]])
    assert visited(torch.tensor(pointer), torch.tensor(node)).nonzero().flatten().tolist() == sorted(set(orbit))
