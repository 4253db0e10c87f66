# SPDX-License-Identifier: Apache-2.0
"""Run by `test_assign_compile.py` in one new interpreter, without the checking import hook.

Dynamo traces the wrappers that the hook puts around every function, and cannot; and `torch.vmap` makes an Assignment of
numbers for a moment. Prints the name of each part that held.
"""

import pytest
import torch
from torch import Tensor

import equipoise as eq

FIELDS = ("z", "counts", "capacity", "mask", "value", "prices", "gap")


def route(x: Tensor, weight: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    scores = x @ weight
    a = eq.assign(scores, mask=mask)
    again = eq.assign(scores * 1.01, 9, prices=a.prices)
    cost = (a.value + a.gap).sum() + (again.prices * again.counts).sum()
    chosen = scores.gather(-1, again.z.unsqueeze(-1)).squeeze(-1)
    return a.z, a.counts, a.capacity, a.mask, cost, again.z, chosen.sum()


def same_results() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4, generator=generator)
    compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
    for n in (30, 30, 21, 24):
        x = torch.randn(3, n, 6, generator=generator)
        mask = torch.rand(3, n, generator=generator) < 0.8
        results: list[list[Tensor]] = []
        for function in (route, compiled):
            w = weight.clone().requires_grad_()
            *fields, loss = function(x, w, mask)
            loss.backward()
            assert w.grad is not None
            results.append([*fields, loss.detach(), w.grad])
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(eager, traced)
            assert eager.dtype.is_floating_point or torch.equal(eager, traced)


def same_errors() -> None:
    generator = torch.Generator().manual_seed(0)
    for method in ("cycle-cancelling", "auction", "auto"):

        def solve(scores: Tensor, method: str = method) -> eq.Assignment:
            return eq.assign(scores, [8, 8, 8, 9], method=method)

        compiled = torch.compile(solve, fullgraph=True, backend="aot_eager")
        scores = torch.randn(30, 4, generator=generator)
        assert torch.equal(compiled(scores).z, solve(scores).z)
        scores[7, 2] = float("nan")
        with pytest.raises(ValueError, match="^scores must not be NaN, got NaN in row 7"):
            compiled(scores)


def same_gradient() -> None:
    def loss(x: Tensor) -> Tensor:
        a = eq.assign(x, 9)
        return (a.value * torch.arange(1.0, 4.0)).sum()

    x = torch.randn(3, 30, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (expected,) = torch.autograd.grad(loss(x), x)
    (found,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    assert torch.equal(found, expected)
    assert float(expected.sum()) == 30 * 6


def vmap_of_the_function_itself() -> None:
    x = torch.randn(3, 30, 4, generator=torch.Generator().manual_seed(0))
    mapped, together = torch.vmap(eq.assign)(x), eq.assign(x)
    assert isinstance(mapped, eq.Assignment)
    for field in FIELDS:
        assert torch.equal(getattr(mapped, field), getattr(together, field)), field


def same_conditional_values() -> None:
    def conditional(x: Tensor) -> Tensor:
        return eq.conditional_values(x, eq.assign(x, method="cycle-cancelling")) + 1

    scores = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    compiled = torch.compile(conditional, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(scores), conditional(scores))


if __name__ == "__main__":
    for part in (same_results, same_errors, same_gradient, vmap_of_the_function_itself, same_conditional_values):
        torch._dynamo.reset()
        part()
        print(part.__name__)  # noqa: T201
