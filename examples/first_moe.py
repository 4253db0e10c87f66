# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Start here
#
# Install the library from a checkout of the repository, with Python 3.11 or later:
#
# ```
# pip install '.[lab]'
# ```
#
# The extra `lab` adds the command line, figures, and scikit-learn, whose handwritten digits this page uses. The library
# alone (`pip install .`) needs torch, numpy, numba and jaxtyping.
#
# The first call compiles kernels for about 20 seconds. Later processes load them from a cache.
#
# ## A first mixture of experts
#
# Eight experts learn to read handwritten digits. The router sends each image to one of them, and every expert gets
# exactly its share of a batch, 32 images of 256.

# %%
import torch
from sklearn.datasets import load_digits

import equipoise as eq

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16 - 0.3
labels = torch.tensor(digits.target)

moe = eq.nn.MoE(64, num_experts=8, hidden_dim=32, router="gm-iw-mix", capacity_factor=1.0)
head = torch.nn.Linear(64, 10)
model = torch.nn.ModuleDict({"moe": moe, "head": head})
surrogate = eq.nn.Surrogate()
optimizer = torch.optim.AdamW(eq.nn.parameter_groups(model, lr=3e-3))

for step in range(300):
    rows = torch.randint(0, 1500, [256])
    with eq.nn.capture(model, optimizer) as routings:
        logits = head(images[rows] + moe(images[rows]))
        losses = torch.nn.functional.cross_entropy(logits, labels[rows], reduction="none")
    loss = surrogate(losses, routings)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 99:
        stats = routings.stats()["moe"]
        print(f"step {step + 1}: loss {losses.mean():.3f}, rows of each expert {stats['load']}")

model.eval()
correct = head(images[1500:] + moe(images[1500:])).argmax(-1) == labels[1500:]
print(f"{correct.float().mean():.1%} of the 297 images that were kept for the test are read correctly")

# %% [markdown]
# ## What each part does
#
# - `eq.nn.MoE` takes the place of a feed-forward block: rows in, rows of the same shape out. Rows beyond an expert's
#   capacity get zeros, so put it beside a residual connection, as here.
# - `router="gm-iw-mix"` draws a balanced assignment at random: add noise to the router's scores, then find the best
#   assignment in which no expert takes more than its capacity. `capacity_factor=1.0` leaves no slack.
# - `eq.nn.capture` collects what every layer decided. Given the optimiser, it also updates running averages and
#   schedules after the step. Nothing is kept in a global.
# - `losses` has one number a row, because of `reduction="none"`. The router learns from the difference between a row's
#   loss and a baseline, which is a moving average of past losses unless you choose another.
# - `surrogate(losses, routings)` returns the scalar to call backward on. It adds the router's gradient and the balance
#   losses.
# - `parameter_groups` makes the optimiser's groups: routers can have a learning rate of their own, and tables of token
#   priors have no weight decay.
#
# ## Change one word
#
# | `router=` | what changes |
# |---|---|
# | `"skip-iw"` with `capacity_factor=1.25` | rows beyond the capacity are dropped, and the others weigh more |
# | `"switch"` | the most probable expert, gated, with an auxiliary loss |
# | `"priced"` | the largest logit minus a running exact price: near balance, no auxiliary loss, no drops |
# | `"topk"` with `top_k=2` | two experts a row, as Mixtral |
#
# The loop stays as it is.
#
# ## Where to go next
#
# - [Balanced assignment in pictures](assignment_in_pictures.md): what a capacity does, and what prices are.
# - [Gumbel-Matching and importance weights](gumbel_matching.md): why the gradient is unbiased.
# - [Which router should I use?](../estimators.md), [choose a capacity](../how-to/capacity.md), [read
#   telemetry](../how-to/telemetry.md).
# - [In a transformers model](../transformers.md): three lines for Mixtral, Qwen3-MoE, DeepSeek-V3 and others.
