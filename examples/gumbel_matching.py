# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Gumbel-Matching and importance weights
#
# The paper's toy task has two linear experts, a router, and 100 points that do not divide evenly between the experts.
# This page draws balanced assignments for it, shows why their plain gradient is wrong, and corrects it.

# %%
import matplotlib.pyplot as plt
import torch

import equipoise as eq

torch.manual_seed(0)
x = torch.rand(100, dtype=torch.float64) * 2 - 1
clean = torch.where(x < 0.5, 0.8 * x - 0.2, -2.0 * x + 2.0)
y = clean + 0.1 * torch.randn(100, dtype=torch.float64)
print(f"{(x >= 0.5).sum()} of 100 points are on the right-hand piece")

# %% [markdown]
# A router that has nearly solved the task sends points left of 0.5 to expert 0 and the others to expert 1. Four
# fifths of the points then belong to expert 0, whose capacity of 50 holds only 50 of them.
#
# ## A balanced draw
#
# Add Gumbel noise to log p and take the *best balanced assignment* of the noisy scores. Without the capacity this
# would be a draw from the router's own distribution, by the Gumbel-max trick. With it, it is a draw from the
# Gumbel-Matching distribution: still random, exactly 50 points for each expert.

# %%
logit = 8.0 * (0.5 - x)  # log p(expert 0) - log p(expert 1)
log_p = torch.log_softmax(torch.stack([logit, torch.zeros_like(logit)], -1), -1)
sample = eq.sample_gumbel_matching(log_p, eq.draw_gumbel(log_p.shape, dtype=torch.float64))
print("points of each expert:", sample.z.bincount().tolist())

figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
figure.set_label("The toy data. Colour and shape show the expert that one balanced draw gives each point")
for expert, (colour, marker) in enumerate([("#0b4f94", "o"), ("#cc6a1b", "^")]):
    chosen = sample.z == expert
    axes.plot(x[chosen], y[chosen], marker, color=colour, markersize=4.5, label=f"expert {expert}")
axes.axvline(0.5, color="#6b6b6b", linewidth=0.8, linestyle="--")
axes.set(xlabel="x", ylabel="y", title="one balanced draw: 50 points each, whatever the router prefers")
axes.legend()

# %% [markdown]
# Some points far left of 0.5 were sent to expert 1, because expert 0 was full. A gradient that treats them as the
# router's own choice teaches the router something false.
#
# ## The probability that a choice had
#
# How likely was it that point i goes to expert j, given the noise of all *other* points? That conditional has a
# closed form: a softmax over the values of the best assignments with point i forced to each expert in turn.
# `sample.log_q` holds it for every point and expert. The importance weight of a point is p/q at the expert that it
# drew.

# %%
weight = eq.importance_weight(log_p, sample)
p, q = log_p.exp()[:, 0], sample.log_q.exp()[:, 0]

figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.1), layout="constrained")
figure.set_label("Left: the router's probability of expert 0 and the probability under balance. Right: the weights")
order = x.argsort()
left.plot(x[order], p[order], color="#222222", label="p, the router")
left.plot(x[order], q[order], color="#8c2d04", linestyle="--", label="q, balanced")
left.set(xlabel="x", ylabel="probability of expert 0", title="balance pulls the boundary to the left")
left.legend()
right.semilogy(x, weight, "^", color="#8c2d04", markersize=4)
right.axhline(1.0, color="#6b6b6b", linewidth=0.8)
right.set(xlabel="x", ylabel="weight p/q", title="the weights of one draw")
print(f"largest weight {weight.max():.1f}, smallest {weight.min():.1e}, mean {weight.mean():.2f}")

# %% [markdown]
# Points that were moved away from the expert that the router prefers count for almost nothing. Points near the
# boundary between 0 and 0.5 that did get expert 0 count more, for themselves and for those that did not.
#
# ## Is it unbiased?
#
# Take the gradient of the expected loss with respect to the router's two parameters. For two experts it can be
# computed exactly. Then average the estimates of many draws, with the weights and without.

# %%
DRAWS = 4000
slope, bias = torch.tensor(-8.0, dtype=torch.float64), torch.tensor(4.0, dtype=torch.float64)
predictions = torch.stack([0.8 * x - 0.2, -2.0 * x + 2.0], -1)
losses = (predictions - y.unsqueeze(-1)).square()


def router(parameters: torch.Tensor) -> torch.Tensor:
    """Computes log p for every point: [..., 100, 2], from slope and bias [..., 2]."""
    logit = parameters[..., :1] * x + parameters[..., 1:]
    return torch.log_softmax(torch.stack([logit, torch.zeros_like(logit)], -1), -1)


parameters = torch.stack([slope, bias]).requires_grad_()
exact = torch.autograd.grad((router(parameters).exp() * losses).sum(-1).mean(), parameters)[0]


def estimates(name: str) -> torch.Tensor:
    """Computes one estimate of the gradient for each draw, [DRAWS, 2]."""
    strategy = eq.STRATEGIES[name]
    copies = parameters.detach().expand(DRAWS, 2).clone().requires_grad_()
    log_p = router(copies)
    sample, weight = strategy.draw(log_p.detach(), strategy.draw_noise(log_p.shape, dtype=torch.float64))
    drawn = losses.expand(DRAWS, -1, -1).gather(-1, sample.z.unsqueeze(-1)).squeeze(-1)
    loss = eq.reinforce(log_p, sample, drawn, weight=weight, baseline=0.1)
    return torch.autograd.grad(loss.sum(), copies)[0]


print(f"exact gradient              {exact[0]:+.5f}  {exact[1]:+.5f}")
for name in ("sample", "skip-iw", "skip", "gm-iw", "gm"):
    found = estimates(name)
    error = found.std(0) / DRAWS**0.5
    z = ((found.mean(0) - exact) / error).abs().max()
    verdict = "agrees" if z < 4 else "differs"
    mean = found.mean(0)
    print(f"{name:8} mean of {DRAWS} draws {mean[0]:+.5f}  {mean[1]:+.5f}  {z:5.1f} standard errors away: {verdict}")

# %% [markdown]
# The three estimators with the right weights agree with the exact gradient. `skip`, which averages over the points
# that are left, and `gm`, which ignores the balancing, do not: their error does not go away with more draws.
# `eq.audit.audit` does this test properly, with stated error rates, for any estimator: [write your own strategy and
# audit it](own_strategy.md).
#
# ## Training
#
# The task counts as solved when the mean squared error of the most probable expert is below 0.02.

# %%
STEPS = 1500


def train(name: str, temperature: float = 3.0) -> float:
    """Trains router and experts, and returns the mean squared error at the end."""
    torch.manual_seed(1)
    gate = torch.randn(2, dtype=torch.float64).requires_grad_()
    lines = torch.randn(2, 2, dtype=torch.float64).requires_grad_()  # slope and intercept of each expert
    optimizer = torch.optim.Adam([gate, lines], lr=0.1)
    strategy, baseline = eq.STRATEGIES[name], eq.EMABaseline()
    for _ in range(STEPS):
        log_p = router(gate)
        noise = strategy.draw_noise(log_p.shape, dtype=torch.float64)
        sample, weight = strategy.draw(log_p.detach(), noise, temperature=temperature)
        predicted = (lines[0] * x.unsqueeze(-1) + lines[1]).gather(-1, sample.z.unsqueeze(-1)).squeeze(-1)
        squared = (predicted - y).square()
        loss = eq.reinforce(log_p, sample, squared, weight=weight, baseline=baseline.value)
        baseline.update(squared.detach(), sample)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    best = router(gate).argmax(-1, keepdim=True)
    return ((lines[0] * x.unsqueeze(-1) + lines[1]).gather(-1, best).squeeze(-1) - y).square().mean().item()


for name in ("skip-iw", "gm-iw", "gm"):
    print(f"{name:8} error after {STEPS} steps: {train(name):.4f}")

# %% [markdown]
# One run proves little. [The paper, reproduced](../reproduction.md) trains thousands, over temperatures, seeds and
# datasets.
