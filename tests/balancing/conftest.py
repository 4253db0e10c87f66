# SPDX-License-Identifier: Apache-2.0
"""The slow, obvious twin of eq.sinkhorn."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

PlainSinkhorn = Callable[..., Tensor]


def _plain_sinkhorn(logits: Tensor, target: Tensor, iterations: int, *, slack: bool) -> Tensor:
    """Alternates exact minimisation of the dual over the row offsets and over the prices.

    With slack the minimum over a price is at 0 where the column is below its target.
    """
    prices = torch.zeros_like(target)
    for _ in range(iterations):
        offsets = torch.logsumexp(logits - prices[..., None, :], -1, keepdim=True)
        prices = torch.logsumexp(logits - offsets, -2) - target.log()
        if slack:
            prices = prices.clamp(min=0)
    return torch.log_softmax(logits - prices[..., None, :], -1)


@pytest.fixture
def plain_sinkhorn() -> PlainSinkhorn:
    """Rows and columns normalised in turn, in log space, every step recorded by autograd; returns log_p."""
    return _plain_sinkhorn
