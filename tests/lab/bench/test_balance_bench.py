# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace
from pathlib import Path

import pytest

from equipoise_lab.bench import BENCHMARKS, Log, Measurement
from equipoise_lab.bench._balance import BalanceBench, balance_steps, balance_verdicts
from equipoise_lab.cli import main

BALANCE = BENCHMARKS["balance"]
TINY = BalanceBench(
    rows=512, experts=(8,), top_ks=(1, 2), drifts=(0.0, 0.1), steps=(1, 4), trials=2, fresh=2, floor_rows=8192
)


def test_run_measures_and_writes(tmp_path: Path) -> None:
    log = Log(BALANCE, TINY, tmp_path)
    for step in log.steps:
        log.run(step)
    paths, tables = log.finish()
    assert tables[0].row_count == 8
    assert [path.name for path in paths] == ["bench-balance.json", "bench-balance.svg", "bench-balance.png"]
    assert all(path.stat().st_size > 0 for path in paths)
    stored = json.loads(paths[0].read_text())
    assert len(stored["max_violation"]) == 4
    for setting in stored["max_violation"]:
        # What balances nothing is far above the floor, and exact prices of one batch are already near it.
        assert setting["topk"][-1] > 2 * setting["floor"][-1]
        assert setting["priced"][0] < setting["topk"][0]


def test_every_measurement_repeats_itself() -> None:
    step = balance_steps(TINY)[1]
    assert step.measure() == step.measure()


def test_verdicts_compare_with_the_limits() -> None:
    bench = BalanceBench(experts=(64,), top_ks=(1,), drifts=(0.0,), steps=(1, 20, 100), trials=1)
    figures = {"priced 1": 1.1, "quantile 1": 1.0, "priced 20": 0.3, "quantile 20": 0.4, "floor 20": 0.25}
    figures |= {"priced 100": 0.4, "quantile 100": 0.4, "floor 100": 0.25}
    records = {"64 experts/K 1/drift 0/trial 0": Measurement(figures=figures)}
    verdicts = balance_verdicts(bench, records)
    assert [verdict.figure for verdict in verdicts] == pytest.approx([1.2, 0.875, 1.1])
    assert [verdict.passed for verdict in verdicts] == [True, True, False]
    assert verdicts[-1].note == "E = 64, K = 1, no drift, after 1"
    assert [verdict.passed for verdict in balance_verdicts(bench, {})] == [None, None, None]


def test_full_run_covers_the_limits() -> None:
    assert len(balance_verdicts(BALANCE.recipes["full"], {})) == 6 + 2
    assert {step.key for step in balance_steps(BALANCE.recipes["full"])} >= {"128 experts/K 8/drift 0.01/trial 2"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trials": 0}, "trials must be .*, got 0"),
        ({"seed": -1}, "seed must be an integer from 0 to .*, got -1"),
        ({"routers": ("topk", "fair")}, "router must be one of .*, got 'fair'"),
        ({"top_ks": (8,)}, "top_k must be from 1 to 7, got 8: add experts"),
    ],
)
def test_bad_run_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(BALANCE.recipes, "quick", replace(TINY, drifts=(0.0,), trials=1))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # the command sets them; this restores them
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "balance", "--grid", "quick", "--out", str(tmp_path)])
    assert "MaxVio on fresh batches" in capsys.readouterr().out
    assert (tmp_path / "bench-balance.json").exists()
