# SPDX-License-Identifier: Apache-2.0
"""`warmup` leaves nothing to compile."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import equipoise as eq

TESTS = Path(__file__).parents[1]

# Both in one process: what the second part needs and the first did not bring is what `warmup` lacks.
MISSING = """
import json, sys
import equipoise as eq

eq.warmup()

import torch
from numba.core.dispatcher import Dispatcher
from equipoise.assignment import detour_costs
from equipoise.assignment import _kernels
from equipoise.balancing import _two_columns
sys.path.insert(0, sys.argv[1])
from support.families import FAMILIES, draw_scores

modules = [module for name, module in vars(_kernels).items() if name.startswith("_") and hasattr(module, "jit")]
kernels = {k.__name__: k for m in [*modules, _two_columns] for k in vars(m).values() if isinstance(k, Dispatcher)}
assert {"solve_small", "collect", "descend", "exact_flow", "conditional_batch", "balance_pairs"} <= set(kernels)

def versions():
    return {(name, str(signature)) for name, kernel in kernels.items() for signature in kernel.signatures}

warm = versions()
for dtype in (torch.bfloat16, torch.float32, torch.float64):
    for n, k in ((24, 4), (64, 2), (1500, 12), (10_000, 16)):
        for family in FAMILIES:
            scores = draw_scores(family, n, k, seed=3).to(dtype)
            mask = torch.arange(n) % 7 != 0
            a = eq.assign(scores)
            eq.assign(scores, top_k=2)
            eq.assign(scores, 2 * n // k, prices=a.prices.roll(1), mask=mask)
            if n < 1000:
                eq.conditional_values(scores, a)
                detour_costs(scores, a)
                eq.sample_gumbel_matching(draw_scores("logits", n, k, seed=4).to(dtype), torch.zeros(n, k, dtype=dtype))
        eq.sinkhorn(draw_scores("logits", n, k, seed=4).to(dtype))
print(json.dumps(sorted(versions() - warm)))
"""


def test_leaves_nothing_to_compile(fresh_python: Callable[..., str]) -> None:
    assert json.loads(fresh_python(MISSING, str(TESTS), OMP_NUM_THREADS="1").splitlines()[-1]) == []


def test_says_what_it_compiles_and_leaves_the_random_stream_alone() -> None:
    before, lines = torch.get_rng_state(), list[str]()
    eq.warmup([torch.bfloat16, torch.float32], progress=lines.append)
    assert lines[0] == "two experts, float32"
    assert len(set(lines)) == len(lines)
    assert torch.equal(before, torch.get_rng_state())


def test_refuses_what_scores_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"dtypes must be float16, .* got torch.int64: leave out"):
        eq.warmup([torch.int64])
