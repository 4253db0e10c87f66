# SPDX-License-Identifier: Apache-2.0
"""What commands share: where they print, how they show progress, how many processes they use."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from equipoise_lab._ledger import locked

T = TypeVar("T")


def make_console(log_width: int) -> Console:
    """Makes a console, of so many columns where there is no terminal; rich assumes 80, too few for tables."""
    console = Console()
    return console if console.is_terminal else Console(width=log_width)


def count_workers(workers: int | None) -> int:
    """Returns the processes to use: those asked for, or one for each core."""
    processes = workers if workers is not None else os.cpu_count() or 1
    if processes < 1:
        raise ValueError(f"workers must be at least 1, got {processes}: give a number of processes")
    return processes


def typed_command(name: str) -> str:
    """Returns what was typed, for the record; the name of the command where it was not called from a shell."""
    return " ".join(["equipoise", *sys.argv[1:]]) if sys.argv[1:2] == [name] else f"equipoise {name}"


def print_paths(console: Console, paths: Iterable[Path]) -> None:
    """Names the files that were written; an SVG stands beside a PNG of the same name."""
    for path in paths:
        if path.suffix != ".svg":
            console.print(f"wrote {path}", highlight=False)


class ProgressBar:
    """Counts steps, wherever they are done: a bar with the time left on a terminal, lines in a log.

    `unit` is what steps are called in a line of the log for every tenth of the way; None: no such lines.
    """

    def __init__(self, console: Console, total: int, *, unit: str | None = None) -> None:
        """Starts at 0."""
        self._console, self._total, self._unit, self._done, self._said = console, max(total, 1), unit, 0, 0
        columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"))
        columns += (TimeRemainingColumn(elapsed_when_finished=False), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=self._total)

    def __enter__(self) -> "ProgressBar":
        """Shows the bar."""
        self._progress.start()
        return self

    def __exit__(self, *ended: object) -> None:
        """Removes the bar."""
        self._progress.stop()

    def show(self, line: str) -> None:
        """Names the part that begins, beside the bar."""
        self._progress.update(self._task, description=line)

    def log(self, line: str) -> None:
        """Writes a line where there is no bar."""
        if not self._console.is_terminal:
            self._console.print(line, markup=False, highlight=False)

    def say(self, line: str) -> None:
        """Names the part that begins, beside the bar or in the log."""
        self.show(line)
        self.log(line)

    def advance(self, steps: int) -> None:
        """Moves on."""
        self._done += steps
        self._progress.advance(self._task, steps)
        tenths = 10 * self._done // self._total
        if self._unit is not None and tenths > self._said:
            self._said = tenths
            self.log(f"{10 * tenths}% of the {self._unit}")


def run_with_bar(
    console: Console, total: int, out: Path, run: Callable[[ProgressBar], T], *, unit: str | None = "training steps"
) -> T:
    """Works in a folder that no other command uses meanwhile, with a bar of so many steps."""
    with locked(out), ProgressBar(console, total, unit=unit) as bar:
        try:
            return run(bar)
        except KeyboardInterrupt:
            bar.say(f"Interrupted. What is done is in {out}; the same command goes on from there.")
            raise


def run_experiment(
    console: Console, name: str, run: Callable[..., T], recipe: Any, out: Path, total: int, **options: Any
) -> T:
    """Runs an experiment of so many training steps for the command of a name, with a bar."""
    return run_with_bar(
        console,
        total,
        out,
        lambda bar: run(recipe, out, command=typed_command(name), say=bar.say, advance=bar.advance, **options),
    )
