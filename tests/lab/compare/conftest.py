# SPDX-License-Identifier: Apache-2.0
"""A task that is learnt in no time, and a comparison in small."""

import pytest
import torch

from equipoise_lab.compare import Comparison, Task, split_task


@pytest.fixture
def task() -> Task:
    """Three clusters in six dimensions."""
    generator = torch.Generator().manual_seed(7)
    y = torch.arange(200) % 3
    x = torch.randn(3, 6, generator=generator)[y] + 0.5 * torch.randn(200, 6, generator=generator)
    return split_task(x, y)


@pytest.fixture
def small() -> Comparison:
    return Comparison(seeds=2, steps=4, batch_size=32, learning_rates=(0.01,), num_experts=4, hidden_dim=5)
