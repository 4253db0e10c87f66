# SPDX-License-Identifier: Apache-2.0
"""The mean of mixed and averaged estimates is the exact gradient, to 1e-12, or is known not to be.

As in test_unbiased, probabilities come from the sampler's choices: for every state of row i's coin, and every draw that
may be used, where row i's own noise makes it choose expert 0.
"""

from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise import reference
from equipoise.balancing import sinkhorn
from equipoise.estimators import STRATEGIES, Noise, WeightedSampler
from equipoise.ops import draw_gumbel
from equipoise.sampling import Sample

EXACT, DECISIVE, FLAT = 1e-12, 60.0, 0
HOWS = pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0, "capacity": 4},
        {"temperature": 0.5, "capacity": [2, 5]},
        {"temperature": 0.5, "sinkhorn_first": True},
    ],
    ids=lambda how: "-".join(map(str, how.values())) or "on-policy",
)


def constant(losses: Tensor, s: Sample) -> float:
    return 0.7


def error(task, mean: Tensor) -> float:
    return float((mean - task.exact_gradient()).abs().max())


def draw(strategy: WeightedSampler, task, noise: Noise, **how: Any) -> tuple[Sample, Tensor]:
    """Draws for noise with one dimension too many where the strategy does not average."""
    if not strategy.averages:
        noise = Noise(noise.gumbel.squeeze(-3), noise.priority, noise.coin.squeeze(-2))
    batch = noise.gumbel.shape[: -3 if strategy.averages else -2]
    log_p = task.logits.detach().log_softmax(-1)
    mask = None if task.mask is None else task.mask.expand(*batch, -1)
    return strategy.draw(log_p.expand(*batch, *log_p.shape), noise, mask=mask, **how)


def own_probability(strategy: WeightedSampler, task, gumbel: Tensor, coin: Tensor, **how: Any) -> Tensor:
    """P(z_i = j), [n, 2], when row i's noise and coins are redrawn, and the draw that is used is picked anew.

    Given which draw is used, and what row i's coin says there, row i takes expert 0 if and only if g_i0 - g_i1, a
    logistic variable, exceeds a threshold, which is found by bisection on the sampler.
    """
    m, n, _ = gumbel.shape
    used, state, row = torch.meshgrid(torch.arange(m), torch.arange(2), torch.arange(n), indexing="ij")
    coins = coin.expand(m, 2, n, m, n).clone()
    coins[used, state, row, used, row] = (state != FLAT).double()
    pick = (used.double() + 0.5) / m
    low, high = torch.full([m, 2, n], -DECISIVE).double(), torch.full([m, 2, n], DECISIVE).double()
    for _ in range(62):
        middle = (low + high) / 2
        redrawn = gumbel.expand(m, 2, n, m, n, 2).clone()
        redrawn[used, state, row, used, row] = torch.stack([middle, torch.zeros_like(middle)], -1)
        noise = Noise(redrawn, torch.zeros(m, 2, n, n).double() if strategy.skips else None, coins, pick)
        first = draw(strategy, task, noise, **how)[0].z[used, state, row, row] == 0
        low, high = torch.where(first, low, middle), torch.where(first, middle, high)
    flat, main = (torch.stack([torch.sigmoid(-low), torch.sigmoid(low)], -1)).unbind(1)
    return (strategy.eps * flat + (1 - strategy.eps) * main).mean(0)


def mean_over_own_noise(strategy: WeightedSampler, task, gumbel: Tensor, coin: Tensor, p: Tensor, **how: Any) -> Tensor:
    """The mean gradient when, for each row's term, that row's noise, coins and pick alone are redrawn."""
    m, n, k = gumbel.shape
    rows = torch.arange(n)
    redrawn = gumbel.expand(n, k, m, n, k).clone()
    redrawn[rows, :, :, rows] = DECISIVE * torch.eye(k).double()[:, None]
    s, weight = draw(strategy, task, Noise(redrawn, None, coin.expand(n, k, m, n), torch.zeros(n, k).double()), **how)
    if task.mask is None:
        assert torch.equal(s.z[rows, :, rows], torch.arange(k).expand(n, k))
    weight = weight * torch.eye(n).double()[:, None]
    return task.gradients((p * task.estimate(s, weight, constant)).sum())


def others(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Noise and coins of all rows, some of them flat, for the terms that keep them."""
    generator = torch.Generator().manual_seed(3)
    gumbel = draw_gumbel([m, n, k], generator=generator, dtype=torch.float64)
    return gumbel, torch.rand(m, n, generator=generator, dtype=torch.float64)


@HOWS
def test_matching_for_every_draw_of_the_other_rows(how: dict, task) -> None:
    problem, strategy, (gumbel, coin) = task(6, 2), STRATEGIES["gm-iw-mix"].with_options(eps=0.4), others(1, 6, 2)
    p = own_probability(strategy, problem, gumbel, coin, **how)
    assert error(problem, mean_over_own_noise(strategy, problem, gumbel, coin, p, **how)) < EXACT


@pytest.mark.parametrize("how", [{}, {"temperature": 0.5, "capacity": [2, 5]}], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize(("name", "m"), [("gm-iw-avg", 3), ("gm-iw-avg-mix", 2)])
def test_averages_for_every_draw_of_the_other_rows(name: str, m: int, how: dict, task) -> None:
    problem, strategy, (gumbel, coin) = task(6, 2), STRATEGIES[name], others(m, 6, 2)
    p = own_probability(strategy, problem, gumbel, coin, **how)
    assert error(problem, mean_over_own_noise(strategy, problem, gumbel, coin, p, **how)) < EXACT


@pytest.mark.parametrize(("name", "m"), [("gm-iw-mix", 1), ("gm-iw-avg-mix", 2)])
def test_matching_with_masked_rows(name: str, m: int, task) -> None:
    problem = task(6, 2, torch.tensor([True, True, False, True, True, False]))
    strategy, (gumbel, coin) = STRATEGIES[name], others(m, 6, 2)
    p = own_probability(strategy, problem, gumbel, coin)
    assert error(problem, mean_over_own_noise(strategy, problem, gumbel, coin, p)) < EXACT


@pytest.mark.parametrize("capacity", [[2, 1, 1], [2, 2, 2], [1, 3, 2]])
def test_matching_with_three_experts(capacity: list[int], task) -> None:
    problem, strategy, (gumbel, coin) = task(4, 3), STRATEGIES["gm-iw-mix"].with_options(eps=0.4), others(1, 4, 3)
    proposal = problem.logits.detach().log_softmax(-1) / 0.7
    prices = sinkhorn(proposal, torch.tensor(capacity), tolerance=1e-3).prices.expand(4, 3)
    used, p = torch.where(coin[0, :, None] < 0.4, prices, proposal), torch.zeros(4, 3).double()
    for i, (own, weight) in product(range(4), ((proposal, 0.6), (prices, 0.4))):
        logits = used.clone()
        logits[i] = own[i]
        p[i] += weight * reference.gumbel_matching_conditional(logits, gumbel[0], i, capacity=capacity)
    mean = mean_over_own_noise(strategy, problem, gumbel, coin, p, capacity=capacity, temperature=0.7)
    assert error(problem, mean) < EXACT


def without_the_flat_component(log_p: Tensor, noise: Noise, *, eps: float, **how: Any) -> Sample:
    s = STRATEGIES["gm-iw-mix"].sampler(log_p, noise, eps=eps, **how)
    return replace(s, log_q=STRATEGIES["gm-iw"].sampler(log_p, noise, **how).log_q)


def test_weights_without_the_flat_component_are_biased(task) -> None:
    problem, (gumbel, coin) = task(6, 2), others(1, 6, 2)
    strategy = replace(STRATEGIES["gm-iw-mix"], sampler=without_the_flat_component)
    p = own_probability(strategy, problem, gumbel, coin)
    assert error(problem, mean_over_own_noise(strategy, problem, gumbel, coin, p)) > 1e-3


def mean_over_everything(strategy: WeightedSampler, task, main: Tensor, **how: Any) -> Tensor:
    """The exact mean gradient where rows are independent: every z, every coin, every order of the priorities."""
    n, k = task.logits.shape
    z = torch.tensor(list(product(range(k), repeat=n)))
    coin = torch.tensor(list(product((0.0, 1.0), repeat=n))).double()
    order = torch.tensor(list(permutations(range(n)))).double() / n
    main_z = main.expand(len(z), n, k).gather(-1, z[..., None]).squeeze(-1)
    each = torch.where(coin[:, None] == FLAT, strategy.eps / k, (1 - strategy.eps) * main_z)
    probability = each.prod(-1).mT.reshape(-1)  # z first, then coins
    gumbel = DECISIVE * torch.nn.functional.one_hot(z, k).double()
    noise = Noise(
        gumbel.repeat_interleave(len(coin) * len(order), 0)[:, None],
        order.repeat(len(z) * len(coin), 1),
        coin.repeat_interleave(len(order), 0).repeat(len(z), 1)[:, None],
    )
    s, weight = draw(strategy, task, noise, **how)
    estimates = task.estimate(s, weight, constant)
    return task.gradients((probability.repeat_interleave(len(order)) / len(order) * estimates).sum())


@HOWS
def test_skipping(how: dict, task) -> None:
    problem, strategy = task(4, 2), STRATEGIES["skip-iw-mix"].with_options(eps=0.4)
    gumbel, coin = others(1, 4, 2)
    p = own_probability(strategy, problem, gumbel, coin, **how)
    main = (p - 0.4 / 2) / 0.6
    assert error(problem, mean_over_everything(strategy, problem, main, **how)) < EXACT


def test_skipping_with_three_experts_and_masked_rows(task) -> None:
    problem = task(4, 3, torch.tensor([True, True, False, True]))
    main = (problem.logits.detach().log_softmax(-1) / 0.6).softmax(-1)
    mean = mean_over_everything(STRATEGIES["skip-iw-mix"], problem, main, temperature=0.6, capacity=[2, 1, 1])
    assert error(problem, mean) < EXACT


def test_skipping_with_weights_of_the_main_component_is_biased(task) -> None:
    def sampler(log_p: Tensor, noise: Noise, *, eps: float, **how: Any) -> Sample:
        s = STRATEGIES["skip-iw-mix"].sampler(log_p, noise, eps=eps, **how)
        return replace(s, log_q=log_p.log_softmax(-1))

    problem = task(4, 2)
    strategy = replace(STRATEGIES["skip-iw-mix"], sampler=sampler)
    main = problem.logits.detach().softmax(-1)
    assert error(problem, mean_over_everything(strategy, problem, main)) > 1e-3
