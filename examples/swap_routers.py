# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Swap routers in a transformers model
#
# Three lines put a router of this library into a Mixtral, OLMoE, Qwen3-MoE, DeepSeek-V3 or GPT-OSS model, and one
# line takes it out again. This page does it with a small, randomly initialised OLMoE.

# %%
import copy
from pathlib import Path

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

import equipoise as eq
from equipoise.integrations.transformers import restore_routers, swap_routers

torch.manual_seed(0)
config = OlmoeConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
)
native = OlmoeForCausalLM(config).eval()
ids = torch.randint(256, [2, 32])

# %% [markdown]
# ## The function does not change
#
# `priced` starts with prices of 0, so the model computes what it computed before.

# %%
model = copy.deepcopy(native)
swap_routers(model, "priced")
with torch.no_grad():
    difference = (model(ids).logits - native(ids).logits).abs().max()
print(f"largest difference of the logits: {difference:.1e}")

# %% [markdown]
# ## What the router does
#
# A swapped layer is captured like any other. Here are the loads of the native choice, and after twenty batches of
# `priced`:

# %%


def loads(model) -> list[list[int]]:
    """Returns the rows of each expert, layer by layer, for one batch of random text."""
    with eq.nn.capture(model) as routings, torch.no_grad():
        model(torch.randint(256, [16, 64]))
    return [routing.stats.load.tolist() for routing in routings]


print("before:", *loads(model), sep="\n  ")
model.train()
for _ in range(20):
    with eq.nn.capture(model) as routings, torch.no_grad():
        model(torch.randint(256, [16, 64]))
    routings.update()
model.eval()
print("after 20 batches of prices, without any gradient:", *loads(model), sep="\n  ")

# %% [markdown]
# ## Train
#
# With the Trainer, `RoutedTrainer` replaces `Trainer` and nothing else changes: it captures, weighs and updates. By
# hand it is the usual loop.

# %%
model = copy.deepcopy(native)
swap_routers(model, "gm-iw-mix", capacity_factor=1.0)
surrogate = eq.nn.Surrogate()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
text = Path(torch.__file__).read_bytes()  # any local text
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
model.train()
for step in range(30):
    starts = torch.randint(len(tokens) - 65, [16, 1])
    batch = tokens[starts + torch.arange(65)]
    with eq.nn.capture(model, optimizer) as routings:
        logits = model(batch[:, :-1]).logits
    losses = torch.nn.functional.cross_entropy(logits.mT, batch[:, 1:], reduction="none")
    loss = surrogate(losses, routings)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {losses.mean():.3f}, load of the first layer {routings[0].stats.load.tolist()}")

# %% [markdown]
# ## And back
#
# `restore_routers` puts the native gates back, with the weights that were learnt. The model is a plain transformers
# model again: anyone can load what it saves, without this library.

# %%
restore_routers(model)
print(type(model.model.layers[0].mlp.gate).__name__)

# %% [markdown]
# [In a transformers model](../transformers.md) has the table of what each router does to each architecture, replay of
# routing decisions, and the seams in torchtitan and Megatron-core.
