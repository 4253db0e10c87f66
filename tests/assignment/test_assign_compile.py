# SPDX-License-Identifier: Apache-2.0
"""The operator is registered soundly, and under torch.compile gives one graph, the same results, the same errors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import equipoise as eq
from support.methods import METHODS

PARTS = ["same_results", "same_errors", "same_gradient", "vmap_of_the_function_itself", "same_conditional_values"]


def test_one_graph_with_the_same_results_and_errors(fresh_python: Callable[..., str]) -> None:
    assert fresh_python((Path(__file__).parent / "compiled.py").read_text()).split() == PARTS


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
        torch.library.opcheck(torch.ops.equipoise.assign, (scores, capacity, mask, prices, method, 1)).values()
    ) == {"SUCCESS"}


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (4, 1), (2, 2, 5, 2)], ids=str)
def test_operator_at_sizes_on_the_edge(shape: tuple[int, ...], generator: torch.Generator) -> None:
    scores = torch.randn(shape, generator=generator)
    capacity = torch.full([*shape[:-2], shape[-1]], shape[-2])
    found = torch.library.opcheck(torch.ops.equipoise.assign, (scores, capacity, None, None, "primal-dual", 1))
    assert set(found.values()) == {"SUCCESS"}


def test_fake_scores_give_fake_results() -> None:
    # What tracing sees on a device where nothing is computed.
    a = eq.assign(torch.empty(2, 8, 3, device="meta"), 3)
    assert {x.device.type for x in (a.z, a.counts, a.capacity, a.mask, a.value, a.prices, a.gap)} == {"meta"}
    assert (list(a.z.shape), list(a.prices.shape), list(a.value.shape)) == ([2, 8], [2, 3], [2])
