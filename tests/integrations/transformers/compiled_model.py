# SPDX-License-Identifier: Apache-2.0
"""A swapped model is one graph, with a capture around it. Run by `test_compile`, in a process without import hooks."""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[2]))

import equipoise as eq
from equipoise.integrations.transformers import RoutedTrainer, swap_routers
from support.tiny_transformers import tiny_model, tokens


def run(backend: str, router: str, dtype: torch.dtype) -> None:
    """Compares a step of the compiled model with one of the model as it is."""
    torch._dynamo.reset()
    model, ids = tiny_model("mixtral").to(dtype).train(), tokens()
    swap_routers(model, router)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    found = []
    for each in (model, compiled):
        torch.manual_seed(0)
        model.zero_grad()
        with eq.nn.capture(each) as routings:
            logits = each(input_ids=ids).logits
        eq.nn.Surrogate()(logits.float().square().mean(-1), routings).backward()
        assert len(routings) == 2
        found.append([routings[1].indices, *(p.grad.clone() for p in model.parameters())])
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance * float(y.abs().max()))


def train(backend: str) -> None:
    """Trains two steps with the Trainer's own option to compile."""
    torch._dynamo.reset()
    model = tiny_model("mixtral")
    swap_routers(model, "skip-iw", loss="gating")
    data = [{"input_ids": row, "labels": row} for row in tokens(8)]
    how = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, max_steps=2, torch_compile=True, torch_compile_backend=backend, **how)
        trainer = RoutedTrainer(model=model, args=args, train_dataset=data)
        trainer.train()
    logs = trainer.state.log_history
    assert "routing/model.layers.1.mlp/max_violation" in logs[0], logs[0]


if __name__ == "__main__":
    for name in sys.argv[3:]:
        if name == "trainer":
            train(sys.argv[1])
        else:
            run(sys.argv[1], name, getattr(torch, sys.argv[2]))
