# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from equipoise_lab.cli import main


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--choose", "dataset"], "choose must be one of dataset=per-seed|shared, "),
        (["--choose", "data=shared"], "got 'data=shared'"),
        (["--choose", "dataset=mine"], "dataset must be one of 'per-seed', 'shared', got 'mine'"),
        (["--seeds", "0"], "seeds must be an integer >= 1, got 0: give a whole number"),
        (["--steps", "0"], "steps must be"),
        (["--workers", "0"], "workers must be at least 1, got 0"),
    ],
)
def test_errors_are_one_line_and_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in fail(capsys, *arguments, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
