# SPDX-License-Identifier: Apache-2.0
"""What the commands that train share."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise_lab.cli._training_bar import TrainingBar

T = TypeVar("T")


def count_workers(workers: int | None) -> int:
    """Returns the processes to use: those asked for, or one for each core."""
    processes = workers if workers is not None else os.cpu_count() or 1
    if processes < 1:
        raise ValueError(f"workers must be at least 1, got {processes}: give a number of processes")
    return processes


def typed_command(name: str) -> str:
    """Returns what was typed, for the record; the name of the command where it was not called from a shell."""
    return " ".join(["equipoise", *sys.argv[1:]]) if sys.argv[1:2] == [name] else f"equipoise {name}"


def run_with_bar(console: "Console", total: int, out: Path, run: "Callable[[TrainingBar], T]") -> T:
    """Trains in a folder that no other command uses meanwhile, with a bar."""
    from equipoise_lab._ledger import locked
    from equipoise_lab.cli._training_bar import TrainingBar

    with locked(out), TrainingBar(console, total) as bar:
        try:
            return run(bar)
        except KeyboardInterrupt:
            bar.say(f"Interrupted. What was trained is in {out}; the same command goes on from there.")
            raise


def print_paths(console: "Console", paths: Iterable[Path]) -> None:
    """Names the files that were written; an SVG stands beside a PNG of the same name."""
    for path in paths:
        if path.suffix != ".svg":
            console.print(f"wrote {path}", highlight=False)
