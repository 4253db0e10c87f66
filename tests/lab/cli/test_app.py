# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

import equipoise
from equipoise_lab.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"equipoise {equipoise.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [(), ("--help",), ("-h",), ("bench",), ("bench", "-h"), ("bench", "assign", "--help"), ("bench", "assign", "-h")],
)
def test_help_explains(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert "Usage: equipoise" in out
    assert "bench" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--frobnicate",), "--frobnicate"),
        (("polish",), "polish"),
        (("bench", "assign", "--threads", "0"), "--threads"),
        (("bench", "assign", "--repeats", "many"), "--repeats"),
        (("bench", "assign", "--grid", "huge"), "'quick', 'full'"),
        (("bench", "assign", "--family", "polite"), "rank-2"),
        (("bench", "assign", "--budget", "-1"), "budget must be finite and > 0, got -1"),
        (("bench", "assign", "--budget", "nan"), "budget"),
    ],
)
def test_error_of_the_user_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("equipoise: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_every_command_has_the_short_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("reproduce", "audit", "compare"):
        code, out, err = run(capsys, command, "-h")
        assert (code, err) == (0, "")
        assert f"Usage: equipoise {command}" in out


def test_completion(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--install-completion" in run(capsys, "--help")[1]
    for name, value in {
        "_EQUIPOISE_COMPLETE": "complete_bash",
        "COMP_WORDS": "equipoise be",
        "COMP_CWORD": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert run(capsys)[1] == "bench\n"


def test_module_is_the_command(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "equipoise", "--version"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"equipoise {equipoise.__version__}\n", "")


def test_folder_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, _, err = run(capsys, "bench", "assign", "--out", str(blocked / "inside"))
    assert code == 2
    assert err.count("\n") == 1
    assert str(blocked) in err


def test_traceback_shows_where(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="family must be one of"):
        main(["--traceback", "bench", "assign", "--family", "polite"])


def test_arguments_come_from_the_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["equipoise", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert equipoise.__version__ in capsys.readouterr().out
