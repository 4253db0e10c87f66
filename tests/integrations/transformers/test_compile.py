# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import equipoise as eq
from equipoise.integrations.transformers import swap_routers
from support.tiny_transformers import tiny_model, tokens


@pytest.mark.parametrize("router", ["priced", "skip-iw"])
def test_a_swapped_model_is_one_graph(router):
    """Without the backend that compiles kernels, which takes a minute: what is tested is that nothing breaks the graph."""
    torch._dynamo.reset()
    model, ids = tiny_model("mixtral").train(), tokens()
    swap_routers(model, router)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    surrogate, found = eq.nn.Surrogate(), []
    for run in (model, compiled):
        torch.manual_seed(0)
        model.zero_grad()
        with eq.nn.capture(run) as routings:
            logits = run(input_ids=ids).logits
        surrogate(logits.square().mean(-1), routings).backward()
        assert len(routings) == 2
        found.append([routings[1].indices, *(p.grad.clone() for p in model.parameters())])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_bfloat16_compiles_with_inductor():
    """As transformers itself: float32 has no compiled grouped product."""
    torch._dynamo.reset()
    model, ids = tiny_model("qwen3-moe").to(torch.bfloat16).train(), tokens()
    swap_routers(model, "skip-iw", loss="gating")
    compiled = torch.compile(model, fullgraph=True)
    with eq.nn.capture(compiled) as routings:
        logits = compiled(input_ids=ids).logits
    eq.nn.Surrogate()(logits.float().square().mean(-1), routings).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
