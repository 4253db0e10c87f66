# SPDX-License-Identifier: Apache-2.0
"""Matrices, noise and a goodness-of-fit test for the oracles."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture
def normal(generator: torch.Generator) -> Callable[..., Tensor]:
    """Draws float64 standard normal tensors."""
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.fixture
def gumbel(generator: torch.Generator) -> Callable[..., Tensor]:
    """Draws float64 standard Gumbel tensors."""
    return lambda *shape: -torch.empty(*shape, dtype=torch.float64).exponential_(generator=generator).log()


@pytest.fixture
def p_value() -> Callable[[Tensor, Tensor], float]:
    """Pearson's chi-square test of counts against probabilities; returns the p-value."""

    def test(counts: Tensor, probability: Tensor) -> float:
        expected = counts.sum() * probability
        # The chi-square law is a limit of large expected counts: refuse to use it elsewhere.
        assert expected.min() > 50
        statistic = ((counts - expected) ** 2 / expected).sum()
        return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))

    return test
