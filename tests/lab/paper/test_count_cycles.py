# SPDX-License-Identifier: Apache-2.0
"""Counting the improvements of cycle cancelling."""

import pytest
import torch

from equipoise.ops import draw_gumbel
from equipoise_lab.paper._studies import _solver_time
from equipoise_lab.paper._studies._solver_time import count_cycles


def test_cycles_of_one_row_and_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    # 20 rows of each of two kinds, each started at the wrong expert: one cycle, or one for each pair of rows.
    wrong = torch.tensor([1, 0]).repeat_interleave(20)[None]
    monkeypatch.setattr(_solver_time, "auction_start", lambda *_: (wrong, None))
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat_interleave(20, 0)[None]
    capacity = torch.full([1, 2], 20)
    assert count_cycles(scores, capacity).tolist() == [1]
    assert count_cycles(scores, capacity, most=1).tolist() == [20]
    assert count_cycles(scores, capacity, most=7).tolist() == [3]


def test_disjoint_cycles_count_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    # A cycle of three experts and two of two, each with its rows moved on by one; between them nothing can be gained.
    moved_on = torch.tensor([[1, 2, 0, 4, 3, 6, 5]])
    monkeypatch.setattr(_solver_time, "auction_start", lambda *_: (moved_on, None))
    scores = torch.full([1, 7, 7], -9.0) + 18.0 * torch.eye(7)
    assert count_cycles(scores, torch.ones(1, 7, dtype=torch.int64)).tolist() == [3]


def test_a_batch_counts_as_its_problems_do(generator: torch.Generator) -> None:
    scores = draw_gumbel([6, 40, 5], generator=generator)
    capacity = torch.full([6, 5], 8)
    together = count_cycles(scores, capacity, most=1)
    alone = [count_cycles(scores[i : i + 1], capacity[:1], most=1).item() for i in range(6)]
    assert together.tolist() == alone
    assert together.sum() > 0
