# SPDX-License-Identifier: Apache-2.0
"""`warmup` leaves nothing to compile, and nothing that it compiles needs scipy."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import equipoise as eq
from support.kernels import compiled_files, linear_algebra

TESTS = Path(__file__).parents[1]

KERNEL = """
from equipoise._core._jit import jit

@jit
def product(a, b):
    return a @ b

@jit
def outer(a):
    return product(a, a).sum()

@jit
def plain(a):
    return a.sum()
"""

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
from equipoise.sampling._kernels import _pairs
sys.path.insert(0, sys.argv[1])
from support.families import FAMILIES, draw_scores
from support.kernels import compiled_files, linear_algebra

modules = [module for name, module in vars(_kernels).items() if name.startswith("_") and hasattr(module, "jit")]
modules += [_two_columns, _pairs]
kernels = {k.__name__: k for m in modules for k in vars(m).values() if isinstance(k, Dispatcher)}
assert {"solve_small", "collect", "descend", "exact_flow", "detour_batch"} <= set(kernels)
assert {"balance_pairs", "skip_pairs", "matching_pairs"} <= set(kernels)

def versions():
    return {(name, str(signature)) for name, kernel in kernels.items() for signature in kernel.signatures}

warm = versions()
for dtype in (torch.bfloat16, torch.float32, torch.float64):
    for n, k in ((24, 4), (64, 2), (1500, 12), (10_000, 16)):
        for family in FAMILIES:
            scores = draw_scores(family, n, k, seed=3).to(dtype)
            mask = torch.arange(n) % 7 != 0
            a = eq.assign(scores)
            if family != "forbidden":  # which leaves some rows one expert
                eq.assign(scores, top_k=2)
            eq.assign(scores, 2 * n // k, prices=a.prices.roll(1), mask=mask)
            if n < 1000:
                eq.conditional_values(scores, a)
                detour_costs(scores, a)
                eq.sample_gumbel_matching(draw_scores("logits", n, k, seed=4).to(dtype), torch.zeros(n, k, dtype=dtype))
        eq.sinkhorn(draw_scores("logits", n, k, seed=4).to(dtype))
        noise = torch.rand(n, k, dtype=dtype)
        eq.sample_skip(draw_scores("logits", n, k, seed=4).to(dtype), noise, noise[:, 0])
called = {name: sorted(linear_algebra(kernel)) for name, kernel in kernels.items()}
print(json.dumps({
    "missing": sorted(versions() - warm),
    "without a file": [name for name, k in kernels.items() if len(compiled_files(k)) < len(k.signatures)],
    "compiled": sum(len(kernel.signatures) for kernel in kernels.values()),
    "linear algebra": {name: calls for name, calls in called.items() if calls},
}))
"""


@pytest.fixture(scope="module")
def after_warmup() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", MISSING, str(TESTS)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_leaves_nothing_to_compile(after_warmup: dict[str, Any]) -> None:
    assert after_warmup["missing"] == []


def test_no_kernel_needs_scipy(after_warmup: dict[str, Any]) -> None:
    """`test_installed.py` shows the same by compiling what it needs anew."""
    assert after_warmup["compiled"] > 20
    assert after_warmup["without a file"] == []
    assert after_warmup["linear algebra"] == {}


def test_a_kernel_that_needs_scipy_is_found(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location("kernel_with_a_product", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.outer(np.eye(2)) == 2.0
    assert linear_algebra(module.outer) >= {"numba_xxgemm"}
    assert module.plain(np.eye(2)) == 2.0
    assert len(compiled_files(module.plain)) == 1
    assert linear_algebra(module.plain) == set()


def test_says_what_it_compiles_and_leaves_the_random_stream_alone() -> None:
    before, lines = torch.get_rng_state(), list[str]()
    eq.warmup([torch.bfloat16, torch.float32], progress=lines.append)
    assert lines[0] == "two experts, float32"
    assert len(set(lines)) == len(lines)
    assert torch.equal(before, torch.get_rng_state())


def test_refuses_what_scores_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"dtypes must be float16, .* got torch.int64: leave out"):
        eq.warmup([torch.int64])
