# SPDX-License-Identifier: Apache-2.0
"""Run in an interpreter of its own by test_moe: `python compiled_layer.py CASE`.

Dynamo traces the checking wrappers that the tests put around every function and dataclass, and cannot.
"""

import sys
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import equipoise as eq

IMPORTED_LATE = "equipoise.nn" not in sys.modules


def layer(router: str, **how: Any) -> eq.nn.MoE:
    torch.manual_seed(1)
    return eq.nn.MoE(6, 4, hidden_dim=8, router=router, **how)


def compare(moe: eq.nn.MoE, backend: str, sizes: tuple[int, ...], **how: Any) -> None:
    """One graph or an error, and the same output, gradients and routing as without compilation, from the same seed."""
    torch._dynamo.reset()
    step = torch.compile(moe, fullgraph=True, backend=backend)
    for size in sizes:
        results = []
        for forward in (moe, step):
            x = torch.randn(2, size, 6, generator=torch.Generator().manual_seed(size)).requires_grad_()
            torch.manual_seed(3)
            with eq.nn.capture(moe) as routings:
                y = forward(x, **how)
            results.append((y, gradients(moe, x, y, routings) if moe.training else [], routings[0].indices))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def gradients(moe: eq.nn.MoE, x: Tensor, y: Tensor, routings: Any) -> list[Tensor]:
    loss = eq.nn.Surrogate(baseline=0.5)(y.square().sum(-1), routings)
    # hash has no use for its gate: no gradient, or zeros, where a compiled graph returns the logits.
    return list(torch.autograd.grad(loss, [x, *moe.parameters()], allow_unused=True, materialize_grads=True))


MASK = torch.arange(16).reshape(2, 8) % 5 > 0


def count_graphs() -> None:
    """Temperature and eps are tensors: one graph serves all of their values."""
    torch._dynamo.reset()
    moe = layer("gm-iw-mix", temperature="auto", eps="auto", target_sample_size=0.99)
    moe.router.auto.window = 1
    graphs = CompileCounter()
    step = torch.compile(moe, fullgraph=True, backend=graphs)
    seen = set()
    for _ in range(5):
        with eq.nn.capture(moe) as routings:
            step(torch.randn(2, 8, 6))
        routings.update()
        seen.add((float(moe.router.temperature), float(moe.router.auto.read("eps"))))
    assert graphs.frame_count == 1
    assert len(seen) > 2


def check_few_routers() -> None:
    # The second size makes the compiler treat sizes as unknown.
    compare(layer("skip-iw", temperature=eq.nn.LinearSchedule(2.0, 1.0, steps=9)), "aot_eager", (8, 12))
    compare(layer("gm-iw", capacity_factor=1.0), "eager", (8,))
    compare(layer("gm-iw-mix", top_k=2, eps="auto", temperature="auto"), "aot_eager", (8,), mask=MASK)
    compare(layer("switch", evaluation="priced").eval(), "eager", (8,), mask=MASK)
    count_graphs()


def check_all_routers() -> None:
    for router in eq.nn.ROUTERS:
        compare(layer(router), "aot_eager", (8,), mask=MASK)
        if router not in eq.STRATEGIES or router == "skip-iw":  # strategies are evaluated by the same code
            compare(layer(router).eval(), "aot_eager", (8,))
    for router in ("skip-iw", "gm-iw-avg-mix"):
        compare(layer(router, top_k=2), "aot_eager", (8,), mask=MASK)
    compare(layer("skip-iw", top_k=2, loss="gating").eval(), "aot_eager", (8,))


def check_default_backend() -> None:
    torch._inductor.config.fallback_random = True  # else it draws numbers of its own, as good but not the same
    compare(layer("skip-iw"), "inductor", (8, 12))
    compare(layer("gm-iw", capacity_factor=1.0), "inductor", (8,), mask=MASK)
    compare(layer("topk", top_k=2), "inductor", (8,))


if __name__ == "__main__":
    assert IMPORTED_LATE, "import equipoise should not import layers before they are asked for"
    torch.set_num_threads(1)
    globals()[f"check_{sys.argv[1]}"]()
