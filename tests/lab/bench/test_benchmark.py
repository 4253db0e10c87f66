# SPDX-License-Identifier: Apache-2.0
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from equipoise_lab.bench import Benchmark, Log, Measurement, Report, Step

FIRST = Measurement(seconds=0.5, repeats=3, value=0.0, figures={"largest": 2.0}, note="kept")


@dataclass(frozen=True)
class Options:
    seed: int = 0
    sizes: tuple[tuple[int, int], ...] = ((4, 2),)


@pytest.fixture
def plan() -> Callable[..., tuple[Callable[..., Log], list[str]]]:
    """The log of a benchmark of two measurements, and a list of those that were made."""

    def make(first: Measurement = FIRST, **options: int) -> tuple[Callable[..., Log], list[str]]:
        made: list[str] = []

        def step(key: str, measurement: Measurement) -> Step:
            return Step(key, key, lambda: made.append(key) or measurement)

        benchmark = Benchmark(
            name="try",
            recipes={},
            steps=lambda bench: [step("a/1", first), step("b", Measurement(value=1.0))],
            report=lambda bench, records: Report(summary={"ratios": len(records)}, tables=[], figure=Figure()),
        )
        return partial(Log, benchmark, Options(**options)), made

    return make


def run(log: Log, *numbers: int) -> list[Measurement]:
    return [log.run(log.steps[number]) for number in numbers]


def test_file_is_complete_after_every_measurement(tmp_path: Path, plan) -> None:
    log = plan()[0](tmp_path / "new")
    run(log, 0)
    stored = json.loads(log.path.read_text())
    assert stored["command"] == "equipoise bench try"
    assert stored["options"] == {"seed": 0, "sizes": [[4, 2]]}
    assert stored["records"]["a/1"] == {
        "status": "measured",
        "seconds": 0.5,
        "repeats": 3,
        "value": 0.0,
        "figures": {"largest": 2.0},
        "note": "kept",
    }
    assert {path.name for path in log.path.parent.iterdir()} == {"bench-try.json", "measurements"}
    run(log, 1)
    assert [path.name for path in log.finish()[0]] == ["bench-try.json", "bench-try.svg", "bench-try.png"]
    assert json.loads(log.path.read_text())["ratios"] == 2


def test_an_interrupted_run_goes_on(tmp_path: Path, plan) -> None:
    run(plan()[0](tmp_path), 0)
    make, made = plan(Measurement(value=9.0))
    log = make(tmp_path)
    assert run(log, 0, 1)[0] == FIRST
    assert made == ["b"]
    assert json.loads(log.path.read_text())["resumed"] is True


def test_what_could_not_be_measured_is_tried_again(tmp_path: Path, plan) -> None:
    run(plan(Measurement(status="not installed"))[0](tmp_path), 0)
    assert run(plan()[0](tmp_path), 0) == [FIRST]


def test_a_run_that_ended_starts_anew_unless_it_is_to_be_kept(tmp_path: Path, plan) -> None:
    log = plan()[0](tmp_path)
    run(log, 0, 1)
    log.finish()
    kept = plan()[0](tmp_path, resume=True)
    assert list(kept.records) == ["a/1", "b"]
    kept.finish()
    assert plan()[0](tmp_path).records == {}


def test_other_options_start_anew_and_are_refused_with_resume(tmp_path: Path, plan) -> None:
    run(plan()[0](tmp_path), 0)
    with pytest.raises(ValueError, match=r"--resume needs the options of the run.*seed 0, now 1"):
        plan(seed=1)[0](tmp_path, resume=True)
    assert plan()[0](tmp_path).records == {"a/1": FIRST}
    assert plan(seed=1)[0](tmp_path).records == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_measurement_is_made_again(tmp_path: Path, plan, text: str, caplog: pytest.LogCaptureFixture) -> None:
    run(plan()[0](tmp_path), 0, 1)
    (tmp_path / "measurements" / "a_1.json").write_text(text)
    (tmp_path / "bench-try.json").write_text(text)  # only written, never read
    make, made = plan()
    assert run(make(tmp_path), 0, 1)[0] == FIRST
    assert made == ["a/1"]
    assert "a_1.json is damaged" in caplog.text


def raise_(error: Exception) -> Measurement:
    raise error


@pytest.mark.parametrize(
    ("step", "status", "note"),
    [
        (Step("k", "t", lambda: raise_(ModuleNotFoundError("needs it"))), "not installed", "needs it"),
        (Step("k", "t", lambda: raise_(RuntimeError("gave up"))), "failed", "gave up"),
        (Step("k", "t", Measurement, lambda records: f"after {len(records)}"), "skipped", "after 1"),
    ],
)
def test_what_cannot_be_measured_says_why(step: Step, status: str, note: str) -> None:
    record = step.run({"before": FIRST})
    assert (record.status, record.note) == (status, note)
