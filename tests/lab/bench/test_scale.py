# SPDX-License-Identifier: Apache-2.0
"""The cost model of many ranks, and the command that measures a few."""

from pathlib import Path

import pytest
import torch

from equipoise.assignment._exchange import Alone, Meter
from equipoise.assignment._settle import Problem, settle
from equipoise_lab.bench import BENCHMARKS, Log, Measurement
from equipoise_lab.bench._scale import ScaleBench
from equipoise_lab.bench._scale_model import Layer, Machine, predict, travelling_rows

SCALE = BENCHMARKS["scale"]
MACHINE = Machine(latency=1e-5, bandwidth=1e9, flops=1e12, pass_seconds=1e-12, solve_seconds=5e-8)


def layer(ranks: int, rows: int = 1024) -> Layer:
    return Layer(ranks=ranks, rows=rows, experts=64, top_k=1, dim=256, hidden=512)


def test_one_rank_sends_nothing() -> None:
    for scope in ("local", "global"):
        cost = predict(layer(1), MACHINE, scope=scope, equal=True)
        assert cost.token_bytes == cost.token_messages == cost.solver_bytes == 0


def test_tokens_travel_four_times_and_counts_once() -> None:
    equal, uneven = (predict(layer(4), MACHINE, scope="local", equal=e) for e in (True, False))
    assert equal.token_bytes == uneven.token_bytes == 4 * 1024 * 256 * 4 * 3 / 4
    assert (equal.token_messages, uneven.token_messages) == (12, 15)


def test_the_expert_axis_ends_at_the_number_of_experts() -> None:
    costs = [predict(layer(ranks), MACHINE, scope="local", equal=True) for ranks in (64, 4096)]
    assert costs[0].token_messages == costs[1].token_messages


def test_rows_that_are_gathered_depend_on_the_experts_alone() -> None:
    assert [travelling_rows(rows, 64) for rows in (0, 500, 2**16, 2**24)] == [0, 500, 1024, 1024]


@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_and_gatherings_are_those_that_the_solver_makes(ranks: int) -> None:
    """As many numbers as one holder is asked for, twice, since a sum goes there and back."""

    class Counting(Alone):
        numbers = messages = 0

        def reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
            self.numbers += x.numel() * 8
            self.messages += 2
            return x

        def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, slice]:
            self.messages += 1
            self.gathered = getattr(self, "gathered", 0) + rows.numel() * 4
            return rows, slice(None)

    exchange, n = Counting(), 8192
    scores = torch.randn(1, n, 64, generator=torch.Generator().manual_seed(0))
    settle(Problem(scores, None, torch.full([1, 64], n // 64), 1), None, exchange, Meter())
    cost = predict(layer(ranks, n // ranks), MACHINE, scope="global", equal=True)
    assert cost.solver_messages == exchange.messages * (ranks - 1)
    assert cost.solver_bytes == (2 * exchange.numbers + exchange.gathered) * (ranks - 1) / ranks


def test_experts_must_be_a_multiple_of_the_ranks() -> None:
    with pytest.raises(ValueError, match="experts must be a multiple of every number of ranks, got 64 and 3"):
        ScaleBench(ranks=(3,))


def test_report_of_stored_figures(tmp_path: Path) -> None:
    bench = SCALE.recipes["quick"]
    keys = [f"{kind}/{what}" for kind in ("equal", "uneven", "global") for what in ("seconds", "token bytes")]
    keys += ["equal/token messages", "exchange/equal", "exchange/uneven", "solver/local", "solver/global", "message"]
    keys += ["solver/pass number", "solver/gathered number"]
    keys += [f"value/{data}/{scope}" for data in ("alike", "different") for scope in ("free", "global", "local")]
    log = Log(SCALE, bench, tmp_path)
    for step in log.steps:
        log.records[step.key] = Measurement(seconds=1e-3, figures=dict.fromkeys(keys, 1e-3))
    paths, tables = log.finish()
    assert len(tables) == 4
    assert [path.suffix for path in paths] == [".json", ".svg", ".png"]
    assert len(SCALE.report(bench, log.records).summary["computed"]["global"]) == 10


def test_report_without_figures_is_empty(tmp_path: Path) -> None:
    log = Log(SCALE, SCALE.recipes["quick"], tmp_path)
    paths, tables = log.finish()
    assert tables == []
    assert [path.name for path in paths] == ["bench-scale.json"]
    assert SCALE.report(log.bench, {}).summary == {}
