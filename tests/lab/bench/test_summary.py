# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from equipoise_lab._tables import format_seconds
from equipoise_lab.bench import BENCHMARKS, Measurement
from equipoise_lab.bench._assign import grid_key
from equipoise_lab.bench._assign_report import (
    gap_per_row,
    is_exact,
    summary,
    times_faster,
    times_floor,
    times_ours,
    verdicts,
)
from equipoise_lab.bench._families import FAMILIES
from equipoise_lab.bench._solvers import SOLVERS
from equipoise_lab.bench._verdicts import over_budget

SIZE = (4096, 64)
ASSIGN = BENCHMARKS["assign"]
BENCH = ASSIGN.recipes["full"]


def measured(seconds: float, value: float = 100.0, ours: float = 0.001) -> Measurement:
    return Measurement(seconds=seconds, repeats=5, value=value, figures={"largest": 10.0, "ours": ours})


def made_up(ours: float = 0.001) -> dict[str, Measurement]:
    """A run that meets every limit when ours takes a millisecond everywhere."""
    records: dict[str, Measurement] = {}
    for size in BENCH.sizes:
        records[grid_key(size, "argmax")] = measured(0.0005, 200.0, ours)
        records[grid_key(size, "primal-dual")] = measured(ours, ours=ours)
        records[grid_key(size, "auction")] = measured(0.05, 99.0, ours)
        records[grid_key(size, "pot")] = measured(0.2, ours=ours)
        records[grid_key(size, "ortools")] = measured(0.15, ours=ours)
        records[grid_key(size, "scipy")] = Measurement(status="skipped", note="about 20 s expected, budget 10 s")
    for point in BENCH.several:
        records[grid_key(point, "topk")] = measured(0.0005, ours=ours)
        records[grid_key(point, "ortools")] = measured(0.15, ours=ours)
    figures = {"argmax": 0.001, "tight": ours, "slack": ours * 1.2, "tight_gap": 0.0, "slack_gap": 1e-12}
    records |= {f"family/{name}": Measurement(seconds=ours, figures=figures) for name in FAMILIES}
    for name in BENCH.behaviours:
        records[f"behaviour/{name}"] = Measurement(seconds=0.01, figures={"ratio": 0.5})
    return records


def test_run_that_meets_every_limit_passes() -> None:
    assert all(verdict.passed for verdict in verdicts(BENCH, made_up()))


def test_slow_solver_fails_the_speed_limits() -> None:
    failed = {verdict.title for verdict in verdicts(BENCH, made_up(ours=0.1)) if verdict.passed is False}
    assert "4,096 x 64: times faster than the better exact peer" in failed
    assert "65,536 x 256: times torch.argmax" in failed
    assert "rank-2, tight: times torch.argmax" in failed
    assert "16,384 x 64, K = 8: times torch.topk" in failed
    assert "65,536 x 128, K = 2: times faster than OR-tools" in failed


@pytest.mark.parametrize("name", BENCH.behaviours)
def test_each_behaviour_can_fail(name: str) -> None:
    records = made_up()
    records[f"behaviour/{name}"] = Measurement(seconds=60.0, figures={"ratio": 1.5})
    assert [v.passed for v in verdicts(BENCH, records)].count(False) == 1


def test_gap_over_the_limit_fails() -> None:
    records = made_up()
    figures = {**records["family/binary"].figures, "slack_gap": 1e-8}
    records["family/binary"] = Measurement(figures=figures)
    failed = [v.title for v in verdicts(BENCH, records) if v.passed is False]
    assert failed == ["largest relative gap over all families"]


def test_ratios() -> None:
    records = made_up()
    assert times_faster(records, SIZE) == pytest.approx(150.0)
    assert times_floor(records, SIZE) == pytest.approx(2.0)
    assert times_ours(records, (16384, 64, 2), "ortools") == pytest.approx(150.0)
    assert times_floor(records, (16384, 64, 2)) == pytest.approx(2.0)


def test_a_ratio_is_of_times_in_turns() -> None:
    """The machine was twice as slow when OR-tools was measured, and ours with it."""
    records = made_up()
    records[grid_key(SIZE, "ortools")] = measured(0.3, ours=0.002)
    assert times_faster(records, SIZE) == pytest.approx(150.0)
    records[grid_key(SIZE, "argmax")] = measured(0.001, 200.0, ours=0.002)
    assert times_floor(records, SIZE) == pytest.approx(2.0)


def test_inexact_peer_is_no_rival() -> None:
    records = made_up()
    records[grid_key(SIZE, "ortools")] = measured(0.0001, 99.0)
    assert is_exact(records, SIZE, "ortools") is False
    assert times_faster(records, SIZE) == pytest.approx(200.0)


def test_gap_tells_who_is_better() -> None:
    records = made_up()
    records[grid_key(SIZE, "pot")] = measured(0.2, 104.096)
    assert gap_per_row(records, SIZE, "auction") == pytest.approx(1.0 / 4096)
    assert gap_per_row(records, SIZE, "pot") == pytest.approx(-0.001)
    assert is_exact(records, SIZE, "pot") is False


def test_rounded_costs_are_allowed_for() -> None:
    records = made_up()
    records[grid_key(SIZE, "ortools")] = measured(0.15, 100.0 - 4096 * 10.0 * 2.0**-25)
    assert is_exact(records, SIZE, "ortools") is True
    records[grid_key(SIZE, "ortools")] = measured(0.15, 100.0 - 4096 * 10.0 * 2.0**-23)
    assert is_exact(records, SIZE, "ortools") is False


def test_nothing_is_judged_without_figures_or_outside_the_stated_conditions() -> None:
    assert {verdict.passed for verdict in verdicts(BENCH, {})} == {None}
    assert {verdict.passed for verdict in verdicts(replace(BENCH, threads=2), made_up())} == {None}
    assert {verdict.passed for verdict in verdicts(replace(BENCH, family="sharp"), made_up())} == {None}


def test_failed_measurement_is_not_a_time() -> None:
    records = made_up()
    records[grid_key(SIZE, "primal-dual")] = Measurement(status="failed", seconds=1e-6, note="not balanced")
    assert times_floor(records, SIZE) is None
    assert times_faster(records, SIZE) is None
    records[grid_key((16384, 64, 2), "ortools")] = Measurement(status="failed", seconds=1e-6, note="another value")
    assert times_ours(records, (16384, 64, 2), "ortools") is None


FAILED = {key: Measurement(status="failed", note="gave up") for key in made_up()}


@pytest.mark.parametrize("records", [{}, made_up(), FAILED], ids=["empty", "full", "failed"])
def test_tables_and_summary_take_any_records(records: dict[str, Measurement]) -> None:
    assert [table.row_count > 0 for table in ASSIGN.report(BENCH, records).tables][0]
    assert len(summary(BENCH, records)["ratios"]) == len(BENCH.sizes)


def test_time_is_foreseen_from_the_last_measured_size() -> None:
    pot = next(solver for solver in SOLVERS if solver.name == "pot")
    records = {grid_key((1024, 64), "pot"): measured(1.0), grid_key((4096, 16), "pot"): Measurement(status="skipped")}

    keys = {size: grid_key(size, "pot") for size in BENCH.sizes}
    assert over_budget(1e-9, keys, (1024, 64), pot.growth, records) == ""
    assert over_budget(8.1, keys, (4096, 64), pot.growth, records) == ""
    assert over_budget(7.9, keys, (4096, 64), pot.growth, records) == "about 8.0 s expected, budget 7.9 s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(123.4, "123 s"), (1.0, "1.00 s"), (0.0123, "12.3 ms"), (3.21e-6, "3.21 us"), (5e-9, "5 ns")],
)
def test_seconds_as_text(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
