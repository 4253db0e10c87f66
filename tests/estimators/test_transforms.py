# SPDX-License-Identifier: Apache-2.0
"""Samplers and estimators within `torch.func` and `torch.vmap`, and on the meta device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equipoise import (
    STRATEGIES,
    Noise,
    Sample,
    draw_gumbel,
    gate,
    gated_loss,
    reinforce,
    sample_gumbel_matching,
    sample_independent,
    sample_skip,
)

N, K, BATCH = 6, 3, 4

# torch says that it maps over an operator of ours one by one; and scripts its rules for forward mode.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

SAMPLERS: dict[str, Callable[[Tensor, Tensor, Tensor], Sample]] = {
    "independent": lambda logits, gumbel, _: sample_independent(logits, gumbel),
    "skip": sample_skip,
    "gumbel-matching": lambda logits, gumbel, _: sample_gumbel_matching(logits, gumbel),
    "sinkhorn": lambda logits, gumbel, _: sample_gumbel_matching(logits, gumbel, marginals="sinkhorn"),
    "sinkhorn first": lambda logits, gumbel, _: sample_independent(logits, gumbel, sinkhorn_first=True),
}


def problem(*batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, noise, priorities and losses."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*batch, N, K, dtype=torch.float64, generator=generator)
    gumbel = draw_gumbel([*batch, N, K], dtype=torch.float64, generator=generator)
    priority, losses = (torch.rand(*batch, N, dtype=torch.float64, generator=generator) for _ in range(2))
    return logits, gumbel, priority, losses


def surrogate(sampler: str, kind: str = "reinforce") -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """From the logits to the number whose gradient is the estimate, with the sample drawn on the way."""

    def function(logits: Tensor, gumbel: Tensor, priority: Tensor, losses: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1)
        s = SAMPLERS[sampler](log_p, gumbel, priority)
        return reinforce(log_p, s, losses) if kind == "reinforce" else gated_loss(log_p, s, losses * gate(log_p, s))

    return function


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", ["reinforce", "gating"])
def test_every_way_to_differentiate_gives_the_same_gradient(sampler: str, kind: str) -> None:
    function, (logits, *rest) = surrogate(sampler, kind), problem()
    expected = torch.autograd.functional.jacobian(lambda x: function(x, *rest), logits)
    assert bool((expected != 0).any())
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(function)(logits, *rest), expected)
    twice = torch.autograd.functional.hessian(lambda x: function(x, *rest), logits)
    torch.testing.assert_close(torch.func.hessian(function)(logits, *rest), twice)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", ["reinforce", "gating"])
def test_vmap_is_a_loop(sampler: str, kind: str) -> None:
    arguments = problem(BATCH)
    for function in (surrogate(sampler, kind), torch.func.grad(surrogate(sampler, kind))):
        found = torch.vmap(function)(*arguments)
        loop = torch.stack([function(*(x[b] for x in arguments)) for b in range(BATCH)])
        torch.testing.assert_close(found, loop)


@pytest.mark.parametrize("name", ["sample", "skip-iw-mix", "gm-iw", "gm-iw-mix", "gm-iw-avg-mix"])
def test_options_of_strategies_are_mapped_over_too(name: str) -> None:
    strategy, logits = STRATEGIES[name], problem(BATCH)[0]
    log_p, temperature = logits.log_softmax(-1), torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    mask, eps = torch.arange(N) < torch.tensor([[N], [5], [4], [5]]), temperature / 10
    noise = strategy.draw_noise(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = {field: getattr(noise, field) for field in ("gumbel", "priority", "coin", "pick")}
    parts = {field: x for field, x in parts.items() if x is not None}

    def draw(log_p: Tensor, parts: dict, temperature: Tensor, mask: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        option = {"eps": eps} if strategy.mixes else {}
        s, weight = strategy.draw(log_p, Noise(**parts), temperature=temperature, mask=mask, **option)
        return s.z, weight

    arguments = (log_p, parts, temperature, mask, eps)
    torch.testing.assert_close(torch.vmap(draw)(*arguments), draw(*arguments))


def test_baselines_and_critics_are_mapped_over_too() -> None:
    logits, gumbel, _, losses = problem(BATCH)

    def function(logits: Tensor, gumbel: Tensor, losses: Tensor) -> Tensor:
        s = sample_independent(logits, gumbel)
        return reinforce(logits.log_softmax(-1), s, losses, baseline=losses / 2, critic=logits.square())

    found = torch.vmap(torch.func.grad(function))(logits, gumbel, losses)
    x = logits.clone().requires_grad_()
    function(x, gumbel, losses).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(found, x.grad)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_meta_device_tells_shapes(sampler: str) -> None:
    logits, gumbel, priority, losses = (x.to("meta") for x in problem(BATCH))
    s = SAMPLERS[sampler](logits, gumbel, priority)
    assert (s.z.shape, s.log_q.shape, s.log_q.device.type) == ((BATCH, N), (BATCH, N, K), "meta")
    assert reinforce(logits.log_softmax(-1), s, losses).shape == (BATCH,)
    temperature = torch.ones(BATCH, device="meta")
    assert sample_independent(logits, gumbel, temperature=temperature).z.shape == (BATCH, N)
