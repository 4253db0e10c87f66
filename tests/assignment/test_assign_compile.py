# SPDX-License-Identifier: Apache-2.0
"""The operator is registered soundly, and under torch.compile gives one graph, the same results, the same errors."""

from collections.abc import Callable

import pytest
import torch

import equipoise as eq
from support.methods import METHODS

# Dynamo traces the checking wrappers that the tests put around every function, and cannot: hence a new interpreter.
SCRIPT = """
import torch
import equipoise as eq

def route(x, weight, mask):
    scores = x @ weight
    a = eq.assign(scores, mask=mask)
    again = eq.assign(scores * 1.01, 9, prices=a.prices)
    cost = (a.value + a.gap).sum() + (again.prices * again.counts).sum()
    chosen = scores.gather(-1, again.z.unsqueeze(-1)).squeeze(-1)
    return a.z, a.counts, a.capacity, a.mask, cost, again.z, chosen.sum()

generator = torch.Generator().manual_seed(0)
weight = torch.randn(6, 4, generator=generator)
compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
for n in (30, 30, 21, 24):
    x = torch.randn(3, n, 6, generator=generator)
    mask = torch.rand(3, n, generator=generator) < 0.8
    results = []
    for function in (route, compiled):
        w = weight.clone().requires_grad_()
        *fields, loss = function(x, w, mask)
        loss.backward()
        results.append([*fields, loss.detach(), w.grad])
    for eager, traced in zip(*results):
        torch.testing.assert_close(eager, traced)
        assert eager.dtype.is_floating_point or torch.equal(eager, traced)
print("same results")

for method in ("cycle-cancelling", "auction", "auto"):
    one = torch.compile(lambda s, method=method: eq.assign(s, [8, 8, 8, 9], method=method), fullgraph=True,
                        backend="aot_eager")
    scores = torch.randn(30, 4, generator=generator)
    assert torch.equal(one(scores).z, eq.assign(scores, [8, 8, 8, 9], method=method).z)
    scores[7, 2] = float("nan")
    try:
        one(scores)
    except ValueError as error:
        print(error)
"""


def test_one_graph_with_the_same_results_and_errors(fresh_python: Callable[..., str]) -> None:
    printed = fresh_python(SCRIPT).splitlines()
    assert printed[0] == "same results"
    assert len(printed) == 4
    assert all(line.startswith("scores must not be NaN, got NaN in row 7") for line in printed[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_operator_is_registered_soundly(
    method: str, optional: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    scores = torch.randn(2, 8, 3, generator=generator).to(dtype)
    mask = torch.tensor([[True] * 8, [True] * 5 + [False] * 3]) if optional else None
    prices = torch.rand(2, 3, generator=generator, dtype=torch.float64) if optional else None
    capacity = torch.full([2, 3], 3) if optional else None
    assert set(
        torch.library.opcheck(torch.ops.equipoise.assign, (scores, capacity, mask, prices, method)).values()
    ) == {"SUCCESS"}


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (4, 1), (2, 2, 5, 2)], ids=str)
def test_operator_at_sizes_on_the_edge(shape: tuple[int, ...], generator: torch.Generator) -> None:
    scores = torch.randn(shape, generator=generator)
    capacity = torch.full([*shape[:-2], shape[-1]], shape[-2])
    torch.library.opcheck(torch.ops.equipoise.assign, (scores, capacity, None, None, "primal-dual"))


def test_fake_scores_give_fake_results() -> None:
    # What tracing sees on a device where nothing is computed.
    a = eq.assign(torch.empty(2, 8, 3, device="meta"), 3)
    assert {x.device.type for x in (a.z, a.counts, a.capacity, a.mask, a.value, a.prices, a.gap)} == {"meta"}
    assert (list(a.z.shape), list(a.prices.shape), list(a.value.shape)) == ([2, 8], [2, 3], [2])
