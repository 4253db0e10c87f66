# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace
from pathlib import Path

import pytest

from equipoise_lab.bench import BENCHMARKS, Log, Measurement
from equipoise_lab.bench._sinkhorn import sinkhorn_steps, sinkhorn_verdicts
from equipoise_lab.cli import main

SINKHORN = BENCHMARKS["sinkhorn"]
TINY = replace(SINKHORN.recipes["quick"], sizes=((32, 4), (64, 8)), repeats=1, budget=5.0)


def test_run_measures_checks_and_writes(tmp_path: Path) -> None:
    log = Log(SINKHORN, TINY, tmp_path)
    for step in sinkhorn_steps(TINY):
        log.run(step)
    paths, _ = log.finish()
    assert [path.name for path in paths] == ["bench-sinkhorn.json", "bench-sinkhorn.svg", "bench-sinkhorn.png"]
    assert all(path.stat().st_size > 0 for path in paths)
    stored = json.loads(paths[0].read_text())
    assert len(stored["ratios"]) == 4
    assert all(ratio["times_softmax"] > 0 for ratio in stored["ratios"])
    for record in stored["records"].values():
        assert record["figures"]["error"] <= 2e-6


def test_limits_are_within_the_full_run() -> None:
    keys = {step.key for step in sinkhorn_steps(SINKHORN.recipes["full"])}
    assert {"65536x64/sd 1/ours", "65536x64/sd 10/ours", "65536x64/sd 10/pot"} <= keys


def test_verdicts_compare_with_the_limits() -> None:
    def at(softmax: float) -> Measurement:
        return Measurement(seconds=1.0, figures={"softmax": softmax, "tight": 1.0})

    records = {
        "65536x64/sd 1/ours": at(1 / 39),
        "65536x64/sd 10/ours": at(1 / 81),
        "65536x64/sd 1/pot": Measurement(seconds=0.9),
        "65536x64/sd 10/pot": Measurement(status="skipped"),
    }
    bench = SINKHORN.recipes["quick"]
    assert [verdict.passed for verdict in sinkhorn_verdicts(bench, records)] == [True, False, False]
    assert [verdict.passed for verdict in sinkhorn_verdicts(bench, {})] == [None, None, None]
    two_threads = replace(bench, threads=2)
    assert [verdict.passed for verdict in sinkhorn_verdicts(two_threads, records)] == [None, None, None]


def test_missing_peer_and_spent_budget_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = replace(TINY, budget=1e-9)
    log = Log(SINKHORN, bench, tmp_path)
    steps = {step.key: step for step in sinkhorn_steps(bench)}
    log.run(steps["32x4/sd 1/pot"])
    assert log.run(steps["64x8/sd 1/pot"]).status == "skipped"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert log.run(steps["64x8/sd 10/pot"]).status == "not installed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 0}, "threads must be an integer >= 1, got 0"),
        ({"repeats": 0}, "repeats must be an integer >= 1, got 0"),
        ({"seed": -1}, "seed must be an integer from 0 to .*, got -1"),
        ({"budget": 0.0}, "budget must be finite and > 0"),
        ({"grid": "endless"}, "grid must be one of 'full', 'quick'"),
    ],
)
def test_bad_run_is_refused(change: dict[str, object], message: str) -> None:
    options = {"grid": "quick", "threads": 1, "repeats": 5, "seed": 0, **change}
    with pytest.raises(ValueError, match=message):
        SINKHORN.recipe(**options)


def test_command_prints_tables_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SINKHORN.recipes, "quick", TINY)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # the command sets them; this restores them
    command = ["bench", "sinkhorn", "--grid", "quick", "--repeats", "1", "--budget", "5", "--out", str(tmp_path)]
    for arguments in (command, [*command, "--resume"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert "Balancing to 1e-06" in out
        assert "Limits" in out
        assert "bench-sinkhorn.json" in out
