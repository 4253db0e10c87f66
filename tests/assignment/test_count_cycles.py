# SPDX-License-Identifier: Apache-2.0
"""Counting the improvements of cycle cancelling."""

import pytest
import torch

from equipoise.assignment import _cycle_cancelling
from equipoise.assignment._cycle_cancelling import count_cycles
from equipoise.ops import draw_gumbel


def test_cycles_of_one_row_and_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    # 20 rows of each of two kinds, each started at the wrong expert: one cycle, or one for each pair of rows.
    wrong = torch.tensor([1, 0]).repeat_interleave(20)[None]
    monkeypatch.setattr(_cycle_cancelling, "auction_start", lambda *_: (wrong, None))
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat_interleave(20, 0)[None]
    capacity = torch.full([1, 2], 20)
    assert count_cycles(scores, capacity).tolist() == [1]
    assert count_cycles(scores, capacity, most=1).tolist() == [20]
    assert count_cycles(scores, capacity, most=7).tolist() == [3]


def test_a_batch_counts_as_its_problems_do(generator: torch.Generator) -> None:
    scores = draw_gumbel([6, 40, 5], generator=generator)
    capacity = torch.full([6, 5], 8)
    together = count_cycles(scores, capacity, most=1)
    alone = [count_cycles(scores[i : i + 1], capacity[:1], most=1).item() for i in range(6)]
    assert together.tolist() == alone
    assert together.sum() > 0
