# SPDX-License-Identifier: Apache-2.0
"""Random problems, and probabilities found without looking at `log_q`."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from equipoise.ops import draw_gumbel
from equipoise.sampling import Sample


@pytest.fixture
def problem(generator: torch.Generator) -> Callable[..., tuple[Tensor, Tensor]]:
    """Draws float64 logits and Gumbel noise."""

    def draw(*shape: int) -> tuple[Tensor, Tensor]:
        logits = 1.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return logits, draw_gumbel(shape, generator=generator, dtype=torch.float64)

    return draw


Sampler = Callable[[Tensor], Sample]


@pytest.fixture
def redrawn_probability() -> Callable[[Sampler, Tensor], Tensor]:
    """P(z_i = j) when only row i's noise is redrawn, for k = 2, from the sampler's choices alone.

    With two experts row i takes expert 0 if and only if g_i0 - g_i1 exceeds some threshold. It is found by bisection on
    the sampler itself, and the difference of two Gumbel variables is logistic.
    """

    def probability(sampler: Sampler, gumbel: Tensor) -> Tensor:
        n = gumbel.shape[0]
        low, high = torch.full([n], -60.0).double(), torch.full([n], 60.0).double()
        rows = torch.arange(n)
        for _ in range(62):
            middle = (low + high) / 2
            redrawn = gumbel.expand(n, n, 2).clone()
            redrawn[rows, rows] = torch.stack([middle, torch.zeros(n).double()], -1)
            first = sampler(redrawn).z[rows, rows] == 0
            low, high = torch.where(first, low, middle), torch.where(first, middle, high)
        return torch.stack([torch.sigmoid(-low), torch.sigmoid(low)], -1)

    return probability


@pytest.fixture
def reduced_probability() -> Callable[..., Tensor]:
    """P(z_i = j) when only row i's noise is redrawn, for any k, by enumerating the assignments of the other rows.

    Row i takes the expert where v_-ij + a_ij + g_ij is largest, with v_-ij the best value of the other rows once row i
    takes a slot of expert j (the paper's eq. (8)); by the Gumbel-max trick that is a softmax.
    """

    def probability(proposal: Tensor, gumbel: Tensor, capacity: list[int], mask: Tensor | None = None) -> Tensor:
        n, k = proposal.shape
        rows = range(n) if mask is None else [i for i in range(n) if mask[i]]
        scores = proposal + gumbel
        others = torch.full([n, k], -torch.inf).double()
        for z in product(range(k), repeat=len(rows)):
            if all(z.count(j) <= capacity[j] for j in range(k)):
                values = torch.stack([scores[i, j] for i, j in zip(rows, z, strict=True)])
                for row, (i, j) in enumerate(zip(rows, z, strict=True)):
                    rest = values[:row].sum() + values[row + 1 :].sum()
                    others[i, j] = torch.maximum(others[i, j], rest)
        return torch.softmax(others + proposal, -1)

    return probability
