# SPDX-License-Identifier: Apache-2.0
"""`equipoise warmup`."""

import pytest
from typer.testing import CliRunner

import equipoise as eq
from equipoise_lab.cli import app


def test_command_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eq, "warmup", lambda *, progress: progress("two experts, float32"))
    printed = CliRunner().invoke(app, ["warmup"]).output.splitlines()
    assert [line.split(maxsplit=2)[2] for line in printed] == ["two experts, float32", "done"]
