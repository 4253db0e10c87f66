# SPDX-License-Identifier: Apache-2.0
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from equipoise_lab.cli import main
from equipoise_lab.compare import lm


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


def test_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "digits", "--quick", "--steps", "3", "--out", str(tmp_path))
    assert (code, err) == (0, "")
    for label in ("Switch", "BASE", "Skip IW, our recipe", "GM IW mix, our recipe", "exact gradient"):
        assert label in out
    assert "training 36 runs of 3 steps" in out
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "compare.json", "compare.svg", "compare.png"}
    stored = json.loads((tmp_path / "compare.json").read_text())
    assert stored["recipe"]["steps"] == 3
    assert stored["rows"]["test"] == 360


def test_language_model_in_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(lm.quick_language_models(), contenders=("dense", "switch"))
    monkeypatch.setattr(lm, "quick_language_models", lambda: few)
    code, out, err = run(capsys, "lm", "--quick", "--steps", "2", "--out", str(tmp_path))
    assert (code, err) == (0, "")
    assert "tuning: 6 runs of 2 steps" in out
    assert "the chosen settings: 4 runs of 2 steps" in out
    assert {path.name for path in tmp_path.iterdir()} == {
        "lm-runs",
        *(f"compare-lm.{end}" for end in ("json", "svg", "png")),
    }
    earlier, again = tmp_path / "compare-lm.json", tmp_path / "again"
    how = ["--settings", str(earlier), "--contenders", "dense,switch", "--vocabulary", "140"]
    code, out, err = run(capsys, "lm", "--quick", "--steps", "1", "--out", str(again), *how)
    assert (code, err) == (0, "")
    assert "tuning" not in out
    stored, before = (json.loads(path.read_text()) for path in (again / "compare-lm.json", earlier))
    assert stored["tuning"] == before["tuning"]
    assert [row["setting"] for row in stored["outcomes"]] == [row["setting"] for row in before["outcomes"]]
    assert stored["text"]["bytes"] == before["text"]["bytes"]
    assert stored["text"]["ids"]["train"] < before["text"]["ids"]["train"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["letters"], "task must be one of 'digits', 'digits-raw', 'lm', got 'letters'"),
        (["lm", "--vocabulary", "64"], "vocabulary must be an integer >= 128, got 64"),
        (["lm", "--contenders", "dense,best"], "contenders must be one of 'dense', "),
        (
            ["lm", "--settings", "missing.json"],
            "settings must be a compare-lm.json that this command wrote",
        ),
        (["digits", "--vocabulary", "256"], "vocabulary must come with 'lm', got 256 with 'digits': leave it out"),
        (["lm", "--seeds", "1"], "seeds must be an integer >= 2, got 1"),
        (["lm", "--steps", "0"], "steps must be an integer >= 1, got 0"),
        (["--seeds", "1"], "seeds must be an integer >= 2, got 1"),
        (["--first-seed", str(2**64)], "first_seed must be an integer from 0 to 2**62 - 1"),
        (["--steps", "0"], "steps must be an integer >= 1, got 0"),
        (["--workers", "0"], "workers must be at least 1, got 0"),
    ],
)
def test_errors_are_one_line_and_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments, "--out", str(tmp_path / "out"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not (tmp_path / "out").exists()


def test_missing_package_is_said_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    code, out, err = run(capsys, "--out", str(tmp_path / "out"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pip install 'equipoise[lab]'" in err
    assert not (tmp_path / "out").exists()
