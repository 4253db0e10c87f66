# SPDX-License-Identifier: Apache-2.0
"""Parts that are saved come back; those that are damaged are named and computed again; a folder has one user."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from equipoise_lab._ledger import Ledger, begin, locked, write_whole
from equipoise_lab._tasks import Part, run_parts

RECIPE = {"seed": 0, "sizes": ((4, 2),), "group": {"steps": 3}}
CONTENT = {"figures": [0.1, float("inf"), 1e-300], "names": ["a", "b"], "by step": {"3": [1.5]}}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path / "parts")
    ledger.save("a", RECIPE, CONTENT)
    return ledger


def test_a_part_comes_back(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    assert ledger.load("a", RECIPE, dict) == CONTENT
    assert ledger.load("b", RECIPE, dict) is None
    assert caplog.text == ""
    assert [path.name for path in ledger.folder.iterdir()] == ["a.json"]


def test_any_name_is_a_file_of_its_own(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.save("16384x64/sd 1/ours", {}, 1)
    ledger.save("../16384x64", {}, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"16384x64_sd_1_ours.json", ".._16384x64.json"}
    assert ledger.load("16384x64/sd 1/ours", {}, int) == 1


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _other_bytes(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04\xff\xfe parameters.npy")


def _other_json(path: Path) -> None:
    path.write_text(json.dumps({"records": [1, 2, 3]}))


def _list(path: Path) -> None:
    path.write_text("[]")


def _changed(path: Path) -> None:
    path.write_text(path.read_text().replace("1.5", "2.5"))


def _other_part(path: Path) -> None:
    Ledger(path.parent).save("b", RECIPE, CONTENT)
    os.replace(path.with_name("b.json"), path)


def _other_content(path: Path) -> None:
    Ledger(path.parent).save("a", RECIPE, 3)


@pytest.mark.parametrize(
    "damage", [_truncated, _empty, _other_bytes, _other_json, _list, _changed, _other_part, _other_content]
)
def test_a_damaged_part_is_named_and_computed_again(ledger: Ledger, damage, caplog: pytest.LogCaptureFixture) -> None:
    damage(ledger.path("a"))
    part = Part(task=(lambda *, progress: CONTENT,), recipe=RECIPE, write=dict, read=dict)
    assert dict(run_parts({"a": part}, ledger, 0, abs)) == {"a": CONTENT}
    message = f"{ledger.path('a')} is damaged, or no part of this command; it will be computed again"
    assert [record.getMessage() for record in caplog.records] == [f"equipoise: {message}"]
    caplog.clear()
    assert ledger.load("a", RECIPE, dict) == CONTENT
    assert caplog.text == ""


def test_parts_of_another_recipe_are_said_once(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    ledger.save("b", RECIPE, CONTENT)
    other = {**RECIPE, "seed": 1, "group": {"steps": 4}}
    assert [ledger.load(name, other, dict) for name in ("a", "b")] == [None, None]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"equipoise: {ledger.folder} holds parts of another recipe (seed 0, now 1, steps 3, now 4); "
        "they will be computed again"
    )


def test_parts_of_another_recipe_are_refused_where_they_were_asked_for(ledger: Ledger) -> None:
    with pytest.raises(
        ValueError, match=r"--resume needs the options of the run in .*parts, got others \(seed 0, now 1"
    ):
        Ledger(ledger.folder, strict=True).load("a", {**RECIPE, "seed": 1}, dict)


def test_parts_of_another_version_are_not_used(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise_lab._ledger.version", lambda _: "0.0.0")
    assert ledger.load("a", RECIPE, dict) is None


def test_a_command_that_ended_begins_anew(ledger: Ledger, tmp_path: Path) -> None:
    last = tmp_path / "report.html"
    begin(last, [ledger])
    assert ledger.path("a").exists()
    last.touch()
    begin(last, [ledger], keep=True)
    assert ledger.path("a").exists()
    assert not last.exists()
    last.touch()
    begin(last, [ledger])
    assert not ledger.path("a").exists()


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    write_whole(path, "before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "after \ud800")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


HOLD = """
import sys, time
from pathlib import Path
from equipoise_lab._ledger import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_folder_in_use_is_refused_and_one_of_a_killed_process_is_not(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(ValueError, match=rf"process {holder.pid} is using: wait until it ends, or give another --out"):
        locked(tmp_path).__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ".lock").exists()
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_that_a_folder_is_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from equipoise_lab.cli import main

    commands = (["reproduce", "--quick"], ["compare", "--quick"], ["audit"], ["bench", "sinkhorn", "--grid", "quick"])
    with locked(tmp_path):
        for command in commands:
            with pytest.raises(SystemExit) as ended:
                main([*command, "--out", str(tmp_path)])
            assert ended.value.code == 2
            assert f"which process {os.getpid()} is using" in capsys.readouterr().err


@pytest.mark.slow
def test_results_after_a_kill_are_those_of_a_run_without(tmp_path: Path) -> None:
    def command(out: str) -> list[str]:
        script = "from equipoise_lab.cli import main; main()"
        options = ["--quick", "--steps", "400", "--out", str(tmp_path / out)]
        return [sys.executable, "-c", script, "reproduce", *options]

    process = subprocess.Popen(command("killed"), stdout=subprocess.DEVNULL)
    while len(list(tmp_path.glob("killed/units/*.json"))) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    _truncated(next(tmp_path.glob("killed/units/*.json")))
    done = subprocess.run(command("killed"), capture_output=True, text=True, check=True)
    assert "is damaged, or no part of this command; it will be computed again" in done.stderr
    subprocess.run(command("whole"), capture_output=True, check=True)
    assert (tmp_path / "killed/results.csv").read_bytes() == (tmp_path / "whole/results.csv").read_bytes()
