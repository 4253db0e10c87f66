# SPDX-License-Identifier: Apache-2.0
"""Commands and options are an interface: a change shows up here and in the change log."""

import json
from pathlib import Path

import typer.main

from equipoise_lab.cli import app

FROZEN = Path(__file__).with_name("options.json")


def commands(command, path: str = "equipoise") -> dict[str, dict[str, object]]:
    found = {path: {option.opts[-1]: _default(option) for option in command.params}}
    for name, child in getattr(command, "commands", {}).items():
        found |= commands(child, f"{path} {name}")
    return found


def _default(option) -> object:
    return option.default if isinstance(option.default, (bool, int, float, str)) else _as_text(option.default)


def _as_text(default: object) -> str | None:
    return None if default is None else str(default)


def test_commands_and_options_are_the_frozen_ones() -> None:
    assert commands(typer.main.get_command(app)) == json.loads(FROZEN.read_text())
