# SPDX-License-Identifier: Apache-2.0
"""Under torch.compile: one graph, the same values and gradients, the same warnings and errors."""

from collections.abc import Callable

import pytest
import torch

from equipoise.balancing._operator import balance

# Dynamo traces the checking wrappers that the tests put around every function, and cannot: hence a new interpreter.
SCRIPT = """
import warnings
import torch
from equipoise.balancing import ConvergenceWarning, sinkhorn

def loss(logits, mask):
    free = sinkhorn(logits * 2, mask=mask)
    bounded = sinkhorn(logits, 9, mask=mask)
    return (free.log_p[..., 0] * bounded.log_p[..., 1]).sum() + bounded.prices.sum()

generator = torch.Generator().manual_seed(0)
logits = torch.randn(3, 30, 4, generator=generator)
mask = torch.rand(3, 30, generator=generator) < 0.8
results = []
for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
    x = logits.clone().requires_grad_()
    value = function(x, mask)
    value.backward()
    results.append((value.detach(), x.grad))
torch.testing.assert_close(results[0], results[1])
print("same values and gradients")

stopped = torch.compile(lambda x: sinkhorn(x, max_iterations=2).converged, fullgraph=True, backend="aot_eager")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", ConvergenceWarning)
    assert not stopped(20 * torch.randn(40, 4, generator=generator))
print(len([w for w in caught if w.category is ConvergenceWarning]), "warning")
try:
    stopped(torch.full((40, 4), float("nan")))
except ValueError as error:
    print(error)
"""


def test_one_graph_with_the_same_values_warnings_and_errors(fresh_python: Callable[..., str]) -> None:
    printed = fresh_python(SCRIPT).splitlines()
    assert printed[0] == "same values and gradients"
    assert printed[1] == "1 warning"
    assert printed[2].startswith("logits must be finite or -inf (a forbidden pair), got nan in row 0")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [True, False])
def test_operator_is_registered_soundly(dtype: torch.dtype, masked: bool, generator: torch.Generator) -> None:
    logits = torch.randn(2, 8, 3, generator=generator).to(dtype).requires_grad_()
    mask = torch.tensor([[True] * 8, [True] * 5 + [False] * 3]) if masked else None
    target = torch.full((2, 3), 3.0, dtype=torch.float64)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    found = torch.library.opcheck(balance, (logits, mask, target, 1e-6, 500), test_utils=tests)
    assert found == dict.fromkeys(tests, "SUCCESS")
