# SPDX-License-Identifier: Apache-2.0
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from equipoise_lab.bench import Benchmark, Log, Measurement, Step

OPTIONS = {"seed": 0, "sizes": ((4, 2),)}
FIRST = Measurement(seconds=0.5, repeats=3, value=0.0, figures={"largest": 2.0}, note="kept")


@pytest.fixture
def plan() -> Callable[..., tuple[Benchmark, list[str]]]:
    """A benchmark of two measurements, and a list of those that were made."""

    def make(first: Measurement = FIRST, **options: object) -> tuple[Benchmark, list[str]]:
        made: list[str] = []

        def step(key: str, measurement: Measurement) -> Step:
            return Step(key=key, title=key, measure=lambda records: made.append(key) or measurement)

        def draw(records, folder: Path) -> list[Path]:
            (folder / "bench-try.png").touch()
            return [folder / "bench-try.png"]

        steps = [step("a/1", first), step("b", Measurement(value=1.0))]
        return Benchmark(
            name="try",
            options={**OPTIONS, **options},
            steps=steps,
            tables=lambda records: [],
            summary=lambda records: {"ratios": len(records)},
            draw=draw,
        ), made

    return make


def run(log: Log, *numbers: int) -> list[Measurement]:
    return [log.run(log.benchmark.steps[number]) for number in numbers]


def test_file_is_complete_after_every_measurement(tmp_path: Path, plan) -> None:
    log = Log(plan()[0], tmp_path / "new")
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
    assert [path.name for path in log.finish()] == ["bench-try.json", "bench-try.png"]
    assert json.loads(log.path.read_text())["ratios"] == 2


def test_an_interrupted_run_goes_on(tmp_path: Path, plan) -> None:
    run(Log(plan()[0], tmp_path), 0)
    benchmark, made = plan(Measurement(value=9.0))
    log = Log(benchmark, tmp_path)
    assert run(log, 0, 1)[0] == FIRST
    assert made == ["b"]
    assert json.loads(log.path.read_text())["resumed"] is True


def test_what_could_not_be_measured_is_tried_again(tmp_path: Path, plan) -> None:
    run(Log(plan(Measurement(status="not installed"))[0], tmp_path), 0)
    assert run(Log(plan()[0], tmp_path), 0) == [FIRST]


def test_a_run_that_ended_starts_anew_unless_it_is_to_be_kept(tmp_path: Path, plan) -> None:
    log = Log(plan()[0], tmp_path)
    run(log, 0, 1)
    log.finish()
    kept = Log(plan()[0], tmp_path, resume=True)
    assert list(kept.records) == ["a/1", "b"]
    kept.finish()
    assert Log(plan()[0], tmp_path).records == {}


def test_other_options_start_anew_and_are_refused_with_resume(tmp_path: Path, plan) -> None:
    run(Log(plan()[0], tmp_path), 0)
    with pytest.raises(ValueError, match=r"--resume needs the options of the run.*seed 0, now 1"):
        Log(plan(seed=1)[0], tmp_path, resume=True)
    assert Log(plan()[0], tmp_path).records == {"a/1": FIRST}
    assert Log(plan(seed=1)[0], tmp_path).records == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_measurement_is_made_again(tmp_path: Path, plan, text: str, caplog: pytest.LogCaptureFixture) -> None:
    run(Log(plan()[0], tmp_path), 0, 1)
    (tmp_path / "measurements" / "a_1.json").write_text(text)
    (tmp_path / "bench-try.json").write_text(text)  # only written, never read
    benchmark, made = plan()
    assert run(Log(benchmark, tmp_path), 0, 1)[0] == FIRST
    assert made == ["a/1"]
    assert "a_1.json is damaged" in caplog.text
