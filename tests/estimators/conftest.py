# SPDX-License-Identifier: Apache-2.0
"""Exact expectations of estimates: over every outcome of the sampler, with probabilities found without `log_q`."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from equipoise.estimators import Noise, Strategy, reinforce
from equipoise.ops import draw_gumbel
from equipoise.sampling import Sample

# Noise that decides a row's expert whatever the logits of these tests, without costing digits.
DECISIVE = 60.0


Baseline = Callable[[Tensor, Sample], Tensor | float]


@dataclass
class Task:
    """A router (its logits) and experts (a parameter for each pair, whose square is the loss), both to be trained."""

    logits: Tensor
    parameter: Tensor
    gumbel: Tensor
    mask: Tensor | None = None

    def gradients(self, objective: Tensor) -> Tensor:
        """The gradient for the router and for the experts, stacked."""
        return torch.stack(torch.autograd.grad(objective, [self.logits, self.parameter]))

    def exact_gradient(self) -> Tensor:
        """That of (1/n) sum_ij p_ij f_ij over the rows that are not masked."""
        expected = (self.logits.softmax(-1) * self.parameter**2).sum(-1)
        return self.gradients(expected.mean() if self.mask is None else expected[self.mask].mean())

    def estimate(self, s: Sample, weight: Tensor, baseline: Baseline) -> Tensor:
        """The surrogate of every problem of a batch of samples."""
        log_p = self.logits.log_softmax(-1).expand(s.log_q.shape)
        losses = s.at_z((self.parameter**2).expand(s.log_q.shape))
        return reinforce(log_p, s, losses, baseline=baseline(losses.detach(), s), weight=weight)


@pytest.fixture
def task(generator: torch.Generator) -> Callable[..., Task]:
    """Draws a task with n rows and k experts."""

    def draw(n: int, k: int, mask: Tensor | None = None) -> Task:
        logits, parameter = (torch.randn(2, n, k, generator=generator, dtype=torch.float64)).unbind(0)
        gumbel = draw_gumbel([n, k], generator=generator, dtype=torch.float64)
        return Task(logits.clone().requires_grad_(), parameter.clone().requires_grad_(), gumbel, mask)

    return draw


Draw = Callable[[Noise], tuple[Sample, Tensor]]


@pytest.fixture
def bind() -> Callable[..., Draw]:
    """Fixes all that a strategy takes but the noise; the result takes noise with a batch dimension."""

    def fix(strategy: Strategy, task: Task, **how: object) -> Draw:
        def draw(noise: Noise) -> tuple[Sample, Tensor]:
            log_p = task.logits.log_softmax(-1).expand(noise.gumbel.shape)
            mask = None if task.mask is None else task.mask.expand(log_p.shape[:-1])
            return strategy.draw(log_p, noise, mask=mask, **how)

        return draw

    return fix


def own_probability(draw: Draw, gumbel: Tensor) -> Tensor:
    """P(z_i = j) for k = 2 when only row i's noise is redrawn, by bisection for the noise where its choice turns.

    Row i takes expert 0 if and only if g_i0 - g_i1, a logistic variable, exceeds that.
    """
    n = gumbel.shape[0]
    rows, priority = torch.arange(n), torch.zeros(n, n).double()
    low, high = torch.full([n], -DECISIVE).double(), torch.full([n], DECISIVE).double()
    for _ in range(62):
        middle = (low + high) / 2
        redrawn = gumbel.expand(n, n, 2).clone()
        redrawn[rows, rows] = torch.stack([middle, torch.zeros(n).double()], -1)
        first = draw(Noise(redrawn, priority))[0].z[rows, rows] == 0
        low, high = torch.where(first, low, middle), torch.where(first, middle, high)
    return torch.stack([torch.sigmoid(-low), torch.sigmoid(low)], -1)


@pytest.fixture
def mean_over_all_draws() -> Callable[..., Tensor]:
    """The exact mean gradient of a strategy that draws rows independently: every z, every order of the priorities."""

    def mean(task: Task, draw: Draw, probability: Tensor, baseline: Baseline) -> Tensor:
        n, k = task.logits.shape
        z = torch.tensor(list(product(range(k), repeat=n)))
        order = torch.tensor(list(permutations(range(n)))).double() / n
        of_z = probability.expand(len(z), n, k).gather(-1, z[..., None]).squeeze(-1).prod(-1)
        gumbel = DECISIVE * torch.nn.functional.one_hot(z, k).double()
        noise = Noise(
            gumbel.repeat_interleave(len(order), 0),
            order.repeat(len(z), 1),
        )
        s, weight = draw(noise)
        estimates = task.estimate(s, weight, baseline)
        return task.gradients((of_z.repeat_interleave(len(order)) / len(order) * estimates).sum())

    return mean


@pytest.fixture
def mean_over_own_noise() -> Callable[..., Tensor]:
    """The mean gradient when, for each row's term, that row's noise alone is redrawn."""

    def mean(task: Task, draw: Draw, probability: Tensor, baseline: Baseline) -> Tensor:
        n, k = task.logits.shape
        rows = torch.arange(n)
        gumbel = task.gumbel.expand(n, k, n, k).clone()
        gumbel[rows, :, rows] = DECISIVE * torch.eye(k).double()
        s, weight = draw(Noise(gumbel, torch.zeros(n, k, n).double()))
        if task.mask is None:
            assert torch.equal(s.z[rows, :, rows], torch.arange(k).expand(n, k))
        weight = weight * torch.eye(n).double()[:, None]
        return task.gradients((probability * task.estimate(s, weight, baseline)).sum())

    return mean


@pytest.fixture
def probability_of_own_noise() -> Callable[[Draw, Tensor], Tensor]:
    """See `own_probability`."""
    return own_probability
