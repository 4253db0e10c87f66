# SPDX-License-Identifier: Apache-2.0
"""Run in an interpreter of its own by test_compile: `python compiled.py CASE`.

Dynamo traces the checking wrappers that the tests put around every function and dataclass, and cannot.
"""

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.estimators import (
    STRATEGIES,
    Noise,
    draw_noise,
    ema_update,
    gate,
    gated_loss,
    importance_weight,
    load_balance_loss,
    marginal_entropy_loss,
    reinforce,
    z_loss,
)
from equipoise.sampling import sample_gumbel_matching, sample_independent, sample_skip

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(3, 8, 2, generator=GENERATOR)
MASK = torch.rand(3, 8, generator=GENERATOR) < 0.8
NOISE = draw_noise([3, 8, 2], generator=GENERATOR)
COIN = torch.rand(3, 8, generator=GENERATOR)
LOSSES = torch.rand(3, 8, generator=GENERATOR)
GRID = torch.tensor([0.5, 1.0, 2.0])


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One graph or an error. This backend traces what the default one traces, and generates no code."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def training_step(logits, noise, losses, name, how):
    log_p = logits.log_softmax(-1)
    s, weight = STRATEGIES[name].draw(log_p, noise, **how)
    baseline = ema_update(torch.zeros(3), losses, s, 0.99)
    loss = reinforce(log_p, s, losses, baseline=baseline, weight=weight)
    loss = loss + gated_loss(log_p, s, losses * gate(log_p, s), weight=weight)
    return loss + load_balance_loss(log_p) + marginal_entropy_loss(log_p) + z_loss(logits)


def check_training_steps() -> None:
    for name, how in (
        ("sample", {"temperature": GRID, "sinkhorn_first": True, "mask": MASK}),
        ("skip-iw", {"temperature": GRID, "mask": MASK}),
        ("skip", {"temperature": 0.5, "capacity": 5}),
        ("gm-iw", {"temperature": GRID, "mask": MASK}),
        ("gm-sh", {"temperature": 0.5, "capacity": [4, 6]}),
        ("gm", {"sinkhorn_first": True, "importance": False}),
        ("skip-iw-mix", {"temperature": GRID, "mask": MASK}),
        ("gm-iw-mix", {"temperature": GRID, "mask": MASK, "eps": torch.tensor([0.0, 0.1, 0.5])}),
        ("gm-iw-avg", {"temperature": 0.5, "capacity": 5}),
        ("gm-iw-avg-mix", {"temperature": GRID, "sinkhorn_first": True, "mask": MASK}),
    ):
        torch._dynamo.reset()  # each is a function of its own, and the compiler counts them as one
        noise = STRATEGIES[name].draw_noise([3, 8, 2], generator=GENERATOR)
        results = []
        for step in (training_step, compiled(training_step)):
            router = LOGITS.clone().requires_grad_()
            loss = step(router, noise, LOSSES, name, how)
            results.append((loss.detach(), *torch.autograd.grad(loss.sum(), router)))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def check_samplers() -> None:
    how = {"temperature": torch.tensor([0.0, 1.0, 2.0]), "mask": MASK}
    for sampler in (sample_independent, sample_skip, sample_gumbel_matching):
        arguments = [LOGITS, NOISE.gumbel, *([NOISE.priority] if sampler is sample_skip else [])]
        s, t = sampler(*arguments, **how), compiled(sampler)(*arguments, **how)
        assert type(t) is type(s)
        for field in ("z", "kept", "keep_weight", "log_q", "deterministic"):
            torch.testing.assert_close(getattr(t, field), getattr(s, field), rtol=1e-5, atol=1e-6)


def check_numbers_and_sizes_that_change() -> None:
    """After the first change the compiler treats numbers and sizes as unknown, and may not get them wrong."""

    def step(logits: Tensor, noise: Noise, losses: Tensor, temperature: float, baseline: float) -> Tensor:
        log_p = logits.log_softmax(-1)
        s = sample_skip(log_p, noise.gumbel, noise.priority, temperature=temperature)
        t = sample_gumbel_matching(log_p, noise.gumbel, temperature=temperature, eps=baseline / 2, coin=noise.coin)
        return reinforce(log_p, s, losses, baseline=baseline) + reinforce(log_p, t, losses)

    traced = compiled(step)
    for n, temperature, baseline in ((8, 1.0, 0.0), (9, 0.5, 0.1), (12, 0.3, 0.7), (20, 2.0, 1.0), (8, 1.0, 0.4)):
        logits, losses = torch.randn(3, n, 2, generator=GENERATOR), torch.rand(3, n, generator=GENERATOR)
        noise = draw_noise(logits.shape, coin=True, generator=GENERATOR)
        arguments = (logits, noise, losses, temperature, baseline)
        torch.testing.assert_close(traced(*arguments), step(*arguments), rtol=1e-5, atol=1e-6)


def check_values() -> None:
    """Values are checked when compiled code runs."""
    sampler = compiled(sample_independent)
    sampler(LOGITS, NOISE.gumbel, temperature=GRID)
    refused("temperature must be finite and >= 0, got -0.5", sampler, LOGITS, NOISE.gumbel, temperature=-GRID)
    refused("logits must be free of NaN", sampler, LOGITS * torch.nan, NOISE.gumbel, temperature=GRID)
    skip = compiled(lambda x, g, u, c: sample_skip(x, g, u, capacity=c).kept)
    skip(LOGITS, NOISE.gumbel, NOISE.priority, torch.tensor([3, 3]))
    refused("capacity must be >= 1", skip, LOGITS, NOISE.gumbel, NOISE.priority, torch.tensor([3, 0]))

    mixed = compiled(lambda x, t, e: sample_gumbel_matching(x, NOISE.gumbel, temperature=t, eps=e, coin=COIN).log_q)
    mixed(LOGITS, GRID, GRID / 4)
    refused("eps must be in [0, 1), got 1.0", mixed, LOGITS, GRID, GRID)
    refused("eps must be 0 at temperature 0", mixed, LOGITS, 0 * GRID, GRID / 4)

    def weigh(log_p: Tensor, temperature: Tensor) -> Tensor:
        return importance_weight(log_p, sample_independent(log_p, NOISE.gumbel, temperature=temperature))

    compiled(weigh)(LOGITS.log_softmax(-1), GRID)
    refused("importance weights must have temperature > 0", compiled(weigh), LOGITS.log_softmax(-1), 0 * GRID)
    refused("log_p must hold log-probabilities", compiled(weigh), LOGITS + 9.0, GRID)


def refused(message: str, function: Callable[..., Any], *arguments: Any, **how: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        function(*arguments, **how)


def check_default_backend() -> None:
    def step(logits: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1)
        s = sample_skip(log_p, NOISE.gumbel, NOISE.priority, temperature=0.5)
        return reinforce(log_p, s, LOSSES, weight=importance_weight(log_p, s))

    torch.testing.assert_close(torch.compile(step, fullgraph=True)(LOGITS), step(LOGITS), rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    for case in sys.argv[1:]:
        torch._dynamo.reset()
        globals()[f"check_{case}"]()
