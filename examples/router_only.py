# SPDX-License-Identifier: Apache-2.0
"""Experts frozen, only routers learn: by the score function, against the same through the gate alone.

    python examples/router_only.py --steps 100

A small Qwen3-MoE is trained on local text. Then its gates are drawn anew, everything else is frozen, and the gates
learn again alone, in three ways from the same start, with the plain loop that any trainer can have. The table shows the
loss on text that was held out, with the most probable experts of every token. In this small problem the gate alone does
better: experts that were trained under a gate leave the score function little to add but noise.
"""

import argparse
import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import equipoise as eq
from equipoise.integrations.transformers import restore_routers, swap_routers, token_losses
from finetune_transformers import local_text, small_model

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "score function and gate": ("skip-iw-mix", {"loss": "gated-reinforce"}),
    "gate, sampled experts": ("skip-iw-mix", {"loss": "gating"}),
    "gate, top-k": ("topk", {}),
}


def batches(tokens: Tensor, size: int, positions: int, *, seed: int) -> Iterator[Tensor]:
    """Yields random pieces of a text, without end."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - positions, (size,), generator=draw)
        yield torch.stack([tokens[start : start + positions] for start in starts.tolist()])


def train(model: nn.Module, data: Iterator[Tensor], steps: int, lr: float) -> None:
    """The whole loop: capture, token losses, surrogate, update."""
    surrogate = eq.nn.Surrogate()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    model.train()
    for ids in itertools.islice(data, steps):
        with eq.nn.capture(model) as routings:
            logits = model(input_ids=ids).logits
        losses, counts = token_losses(logits, F.pad(ids, (0, 1), value=-100)[:, 1:])
        surrogate(losses, routings, mask=counts).backward()
        optimizer.step()
        optimizer.zero_grad()
        routings.update()


@torch.no_grad()
def evaluate(model: nn.Module, data: Iterator[Tensor], number: int = 8) -> float:
    """Returns the loss of the model as it is used: no noise."""
    model.eval()
    return sum(model(input_ids=ids, labels=ids).loss.item() for ids in itertools.islice(data, number)) / number


def gates(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of the gates."""
    return [p for name, p in model.named_parameters() if ".gate.weight" in name]


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Trains a model, then its gates alone, in every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of each way; the model itself trains as long")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--positions", type=int, default=64)
    given = parser.parse_args(argv)
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(local_text()), dtype=torch.uint8).long()
    held_out, rest = text[:20_000], text[20_000:]

    def pieces(seed: int) -> Iterator[Tensor]:
        return batches(rest, given.batch, given.positions, seed=seed)

    def loss_of(model: nn.Module) -> float:
        return evaluate(model, batches(held_out, given.batch, given.positions, seed=1))

    model = small_model()
    swap_routers(model, "topk")
    train(model, pieces(2), given.steps, 3e-3)
    restore_routers(model)
    found = {"trained together": loss_of(model)}
    model.requires_grad_(False)
    for gate in gates(model):
        nn.init.normal_(gate.requires_grad_(), std=0.02)
    found["new gates"] = loss_of(model)
    for name, (router, options) in WAYS.items():
        twin = copy.deepcopy(model)
        swap_routers(twin, router, **options)
        torch.manual_seed(3)
        with warnings.catch_warnings(action="ignore", category=eq.nn.RoutingWarning):
            train(twin, pieces(4), given.steps, 1e-2)
        found[name] = loss_of(twin)
    for name, loss in found.items():
        print(f"{name:26} {loss:.3f} nats a byte")
    return found


if __name__ == "__main__":
    main()
