# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Write your own strategy, and audit it
#
# A *strategy* is a way of drawing experts together with the weights that go with it. This page writes one in fifteen
# lines, audits whether its gradient is unbiased, breaks it on purpose, and trains a layer with it.
#
# ## An idea
#
# Routers that are certain early stop exploring: an expert of probability 0.001 is drawn once in a thousand rows. Draw
# from a tempered distribution instead, the more so the more certain a row is, and let importance weights make up for
# it. Here every row gets its own temperature, from 1 for a uniform row to 3 for a certain one.

# %%
import math

import torch

import equipoise as eq
from equipoise.estimators import WeightedSampler


def explore(log_p, noise, *, capacity=None, temperature=1.0, mask=None, **how):
    """Draws each row at a temperature of its own: 1 if its router is uniform, 3 if it is certain."""
    entropy = -(log_p.exp() * log_p.clamp_min(-1e30)).sum(-1, keepdim=True)
    own = 3.0 - 2.0 * entropy / math.log(log_p.shape[-1])
    flatter = log_p / own
    return eq.sample_skip(flatter, noise.gumbel, noise.priority, temperature=temperature, capacity=capacity, mask=mask)


explorer = WeightedSampler(
    name="explore",
    label="Explore",
    sampler=explore,
    respects_capacity=True,
    assigns_all=False,
    unbiased=True,
    skips=True,
    doc="Skipping, from a distribution that is flatter where the router is more certain.",
)

# %% [markdown]
# The sampler returns a `Sample`: the experts, the rows that were kept, and `log_q`, the probability that each expert
# really had. `WeightedSampler` adds the weights p/q times the correction for dropped rows. It claims to be unbiased.
# Is it?
#
# ## The audit
#
# The audit draws a small problem whose exact gradient can be computed, averages many estimates, and tests the
# difference. The test has a stated rate of false alarms, and it says how small a bias it could have found.

# %%
conditions = eq.audit.Conditions(n=4, draws=100_000, row_effect=0.0)
print(eq.audit.audit(explorer, conditions))

# %% [markdown]
# ## Break it
#
# Weights that ignore the temperature look harmless. This version claims a probability that was not the one
# used:

# %%
from dataclasses import replace


def careless(log_p, noise, **how):
    """Draws like `explore`, and reports the router's own probabilities."""
    return replace(explore(log_p, noise, **how), log_q=log_p)


broken = WeightedSampler(
    name="careless",
    label="Careless",
    sampler=careless,
    respects_capacity=True,
    assigns_all=False,
    unbiased=True,
    skips=True,
    doc="The same draws with the wrong probabilities.",
)
print(eq.audit.audit(broken, conditions))

# %% [markdown]
# In a test of your own: `assert eq.audit.audit(mine).verdict == "unbiased"`.
#
# ## Train with it
#
# A layer takes the strategy in place of a name. Nothing has to be registered.

# %%
torch.manual_seed(0)
moe = eq.nn.MoE(16, 4, router=explorer)
surrogate = eq.nn.Surrogate()
optimizer = torch.optim.AdamW(eq.nn.parameter_groups(moe, lr=3e-3))
targets = torch.randn(4, 16)
for step in range(200):
    x = torch.randn(256, 16)
    wanted = targets[x[:, :2].gt(0).long() @ torch.tensor([1, 2])]
    with eq.nn.capture(moe, optimizer) as routings:
        losses = (moe(x) - wanted).square().mean(-1)
    loss = surrogate(losses, routings)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        stats = routings.stats()[""]
        print(f"step {step + 1}: loss {loss.item():.3f}, effective sample size {stats['effective_sample_size']:.2f}")

# %% [markdown]
# `CONTRIBUTING.md` shows how a strategy becomes part of the library: one function and one row of a table.
