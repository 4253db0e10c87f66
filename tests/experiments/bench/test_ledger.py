# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from equipoise.experiments.bench import Ledger, Measurement, Step

HEADER = {"options": {"seed": 0, "sizes": ((4, 2),)}}


def step(key: str, measurement: Measurement, made: list[str]) -> Step:
    def measure(records) -> Measurement:
        made.append(key)
        return measurement

    return Step(key=key, title=key, measure=measure)


def test_file_is_complete_after_every_measurement(tmp_path: Path) -> None:
    path, made = tmp_path / "new" / "results.json", []
    ledger = Ledger(path, HEADER)
    ledger.run(step("a", Measurement(seconds=0.5, repeats=3, value=0.0), made))
    stored = json.loads(path.read_text())
    assert stored["options"] == {"seed": 0, "sizes": [[4, 2]]}
    assert stored["records"]["a"] == {"status": "measured", "seconds": 0.5, "repeats": 3, "value": 0.0}
    assert list(path.parent.iterdir()) == [path]


def test_resume_keeps_what_was_measured(tmp_path: Path) -> None:
    path, made = tmp_path / "results.json", []
    first = Measurement(value=0.0, figures={"largest": 2.0}, note="kept")
    Ledger(path, HEADER).run(step("a", first, made))
    ledger = Ledger(path, HEADER, resume=True)
    assert ledger.run(step("a", Measurement(value=9.0), made)) == first
    ledger.run(step("b", Measurement(value=1.0), made))
    assert made == ["a", "b"]


def test_new_run_starts_anew(tmp_path: Path) -> None:
    path, made = tmp_path / "results.json", []
    Ledger(path, HEADER).run(step("a", Measurement(), made))
    assert Ledger(path, HEADER).records == {}
    assert json.loads(path.read_text())["records"] == {}


def test_resume_without_a_file_starts_anew(tmp_path: Path) -> None:
    assert Ledger(tmp_path / "results.json", HEADER, resume=True).records == {}


def test_resume_with_other_options_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Ledger(path, HEADER)
    with pytest.raises(ValueError, match=r"--resume needs the options of the run.*seed 0, now 1"):
        Ledger(path, {"options": {"seed": 1, "sizes": ((4, 2),)}}, resume=True)
    assert json.loads(path.read_text())["options"]["seed"] == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_resume_from_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="--resume needs a results file of an earlier run"):
        Ledger(path, HEADER, resume=True)
