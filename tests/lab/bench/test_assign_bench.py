# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace
from pathlib import Path

import pytest

from equipoise_lab.bench import BENCHMARKS, Log
from equipoise_lab.bench._assign_report import SIZE_LIMITS
from equipoise_lab.bench._solvers import SOLVERS
from equipoise_lab.cli import main

ASSIGN = BENCHMARKS["assign"]
TINY = replace(
    ASSIGN.recipes["quick"],
    sizes=((64, 4), (128, 64)),
    several=((64, 8, 2),),
    robust_size=(64, 4),
    behaviours=(),
    repeats=1,
    budget=5.0,
)


def test_run_measures_checks_and_writes(tmp_path: Path) -> None:
    log = Log(ASSIGN, TINY, tmp_path)
    for step in log.steps:
        log.run(step)
    paths, _ = log.finish()
    assert [path.name for path in paths] == ["bench-assign.json", "bench-assign.svg", "bench-assign.png"]
    assert all(path.stat().st_size > 0 for path in paths)
    stored = json.loads(paths[0].read_text())
    assert stored["options"]["sizes"] == [[64, 4], [128, 64]]
    assert {"processor", "cores", "versions"} <= stored["environment"].keys()
    for ratio in stored["ratios"]:
        for name in ("primal-dual", "cycle-cancelling", "pot", "scipy"):
            if log.records[f"grid/{ratio['n']}x{ratio['k']}/{name}"].status == "measured":
                assert ratio["gap_per_row"][name] == pytest.approx(0.0, abs=1e-9)

    (several,) = stored["several"]
    assert (several["n"], several["k"], several["top_k"]) == (64, 8, 2)
    assert several["times_topk"] > 0
    if log.records["several/64x8/K2/ortools"].status == "measured":
        assert several["times_faster_than_ortools"] > 0


def test_plan_covers_every_solver_size_and_family() -> None:
    keys = [step.key for step in ASSIGN.steps(ASSIGN.recipes["full"])]
    assert len(set(keys)) == len(keys)
    for n, k in SIZE_LIMITS:
        assert {f"grid/{n}x{k}/{solver.name}" for solver in SOLVERS} <= set(keys)
    for n, k in ((16384, 64), (65536, 128)):
        assert {f"several/{n}x{k}/K{top_k}/{name}" for top_k in (2, 8) for name in ("topk", "ortools")} <= set(keys)


def test_missing_peer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    log = Log(ASSIGN, TINY, tmp_path)
    for key in ("grid/64x4/pot", "several/64x8/K2/ortools"):
        step = next(step for step in log.steps if step.key == key)
        assert log.run(step).status == "not installed"


def test_budget_is_said(tmp_path: Path) -> None:
    bench = replace(TINY, budget=1e-9)
    log = Log(ASSIGN, bench, tmp_path)
    steps = {step.key: step for step in log.steps}
    first = log.run(steps["grid/64x4/argmax"])
    assert (first.status, first.repeats) == ("measured", 2)
    later = log.run(steps["grid/128x64/argmax"])
    assert later.status == "skipped"
    assert "budget" in later.note


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 0}, "threads must be an integer >= 1, got 0"),
        ({"repeats": 0}, "repeats must be an integer >= 1, got 0"),
        ({"seed": -1}, "seed must be an integer from 0 to 2\\*\\*62 - 1, .*, got -1"),
        ({"seed": 2**70}, "because torch's seeds have 64 bits"),
        ({"family": "nice"}, "family must be one of"),
        ({"budget": 0.0}, "budget must be finite and > 0"),
        ({"grid": "endless"}, "grid must be one of 'full', 'quick'"),
    ],
)
def test_bad_run_is_refused(change: dict[str, object], message: str) -> None:
    options = {"grid": "quick", "family": "gumbel", "threads": 1, "repeats": 5, "seed": 0, **change}
    with pytest.raises(ValueError, match=message):
        ASSIGN.recipe(**options)


def test_command_prints_tables_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ASSIGN.recipes, "quick", TINY)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # the command sets them; this restores them
    command = ["bench", "assign", "--grid", "quick", "--repeats", "1", "--budget", "5", "--out", str(tmp_path)]
    for arguments in (command, [*command, "--resume"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert "Balanced assignment, popular scores" in out
        assert "Every family at 64 x 4" in out
        assert "K experts a row" in out
        assert "64 x 8, K = 2: times faster than OR-tools" in out
        assert "bench-assign.json" in out
