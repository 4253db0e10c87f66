# SPDX-License-Identifier: Apache-2.0
"""Train a small Qwen3-MoE from scratch with a router of ours, restore its native gates, and let it write.

    python examples/finetune_transformers.py --router priced --steps 300 --out out/finetune

The text is local (the source of Python's standard library), the tokens are bytes, and all of it takes about a minute
on a CPU. What is saved is a plain transformers model. Qwen3-MoE has no correction bias, so that restored gates lose the
prices; the losses before and after show what that costs.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainingArguments

from equipoise.integrations.transformers import RoutedTrainer, restore_routers, swap_routers


def local_text(files: int = 40) -> bytes:
    """Returns the source of some modules of Python's standard library."""
    return b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:files])


def sequences(text: bytes, positions: int) -> list[dict[str, torch.Tensor]]:
    """Cuts a text into sequences of bytes."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in tokens.split(positions)[:-1]]


def small_model(dim: int = 64, layers: int = 2, experts: int = 8) -> Qwen3MoeForCausalLM:
    """Builds a byte-level model with two of its experts a token."""
    sizes: dict[str, Any] = {"hidden_size": dim, "num_hidden_layers": layers, "num_attention_heads": 4}
    config = Qwen3MoeConfig(
        vocab_size=256,
        num_key_value_heads=4,
        head_dim=dim // 4,
        moe_intermediate_size=dim,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        **sizes,
    )
    return Qwen3MoeForCausalLM(config)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains, restores, saves, loads and generates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", default="priced", help="a name of equipoise.nn.ROUTERS")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument("--out", default="out/finetune")
    given = parser.parse_args(argv)

    torch.manual_seed(0)
    data = sequences(local_text(), given.positions)
    model = small_model()
    swap_routers(model, given.router)
    args = TrainingArguments(
        given.out,
        max_steps=given.steps,
        per_device_train_batch_size=given.batch,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_steps=max(given.steps // 5, 1),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = RoutedTrainer(model=model, args=args, train_dataset=data[64:], eval_dataset=data[:64])
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]

    restore_routers(model)  # warns: the architecture has no place for prices
    restored = trainer.evaluate()["eval_loss"]
    model.save_pretrained(given.out)
    loaded = AutoModelForCausalLM.from_pretrained(given.out)
    prompt = torch.tensor([list(b"def __init__(self")])
    text = loaded.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=False)
    written = bytes(text[0].tolist()).decode(errors="replace")
    print(f"held-out loss: {loss:.3f} nats a byte, {restored:.3f} with native gates\n{written}")
    return {"loss": loss, "restored": restored, "text": written, "log": trainer.state.log_history}


if __name__ == "__main__":
    main()
