# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch

import equipoise as eq
from equipoise_lab.bench._families import draw_scores
from equipoise_lab.bench._solvers import SOLVERS, Solver, prepare_flow

BALANCING = [solver for solver in SOLVERS if solver.role != "floor"]


def best_value(scores: torch.Tensor) -> float:
    """The optimum of the tight problem by trying every order of the slots."""
    n, k = scores.shape
    slots = [j for j in range(k) for _ in range(n // k)]
    orders = set(itertools.permutations(slots))
    return max(scores.double()[torch.arange(n), torch.tensor(order)].sum().item() for order in orders)


@pytest.mark.parametrize("solver", BALANCING, ids=lambda solver: solver.name)
@pytest.mark.parametrize("family", ["gumbel", "favourite", "identical", "forbidden"])
def test_solver_is_balanced_and_as_good_as_it_claims(solver: Solver, family: str) -> None:
    if solver.package is not None:
        pytest.importorskip(solver.package)
    for seed in range(3):
        scores = draw_scores(family, 6, 3, seed)
        prepared = solver.prepare(scores)
        z = prepared.read(prepared.call())
        assert torch.bincount(z, minlength=3).tolist() == [2, 2, 2]
        value, best = scores.double().gather(1, z[:, None]).sum().item(), best_value(scores)
        assert value <= best + 1e-9
        if solver.exact:
            largest = scores[scores.isfinite()].abs().max().item()
            assert value == pytest.approx(best, abs=6 * solver.relative_tolerance * largest)


def test_min_cost_flow_gives_each_row_several_experts() -> None:
    pytest.importorskip("ortools")
    scores = draw_scores("gumbel", 8, 4, seed=0)
    prepared = prepare_flow(scores, top_k=2)
    z = prepared.read(prepared.call())
    assert torch.bincount(z.flatten(), minlength=4).tolist() == [4, 4, 4, 4]
    assert (z[:, 0] != z[:, 1]).all()
    value = float(eq.assign(scores, top_k=2).value)
    assert float(scores.double().gather(1, z).sum()) == pytest.approx(value, abs=1e-5)


def test_floor_takes_the_largest_score() -> None:
    scores = draw_scores("gumbel", 5, 3, seed=0)
    prepared = SOLVERS[0].prepare(scores)
    assert torch.equal(prepared.read(prepared.call()), scores.argmax(-1))
