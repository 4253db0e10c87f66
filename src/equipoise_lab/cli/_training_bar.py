# SPDX-License-Identifier: Apache-2.0
"""Progress of long work: a bar with the time left on a terminal, lines in a log."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class TrainingBar:
    """Counts steps, wherever they are done.

    Args:
        console: where progress is shown.
        total: steps in all.
        unit: what they are called, in a line of the log for every tenth of the way; None: no such lines.
    """

    def __init__(self, console: Console, total: int, *, unit: str | None = "training steps") -> None:
        """Starts at 0."""
        self._console, self._total, self._unit, self._done, self._said = console, max(total, 1), unit, 0, 0
        columns = (
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=self._total)

    def __enter__(self) -> "TrainingBar":
        """Shows the bar."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
