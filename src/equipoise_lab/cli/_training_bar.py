# SPDX-License-Identifier: Apache-2.0
"""Progress of long training: a bar with the time left on a terminal, a line every tenth of the way in a log."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class TrainingBar:
    """Counts training steps, wherever they are done.

    Args:
        console: where progress is shown.
        total: steps in all.
    """

    def __init__(self, console: Console, total: int) -> None:
        """Starts at 0."""
        self._console, self._total, self._done, self._said = console, max(total, 1), 0, 0
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

    def say(self, line: str) -> None:
        """Names the part that begins."""
        self._progress.update(self._task, description=line)
        if not self._console.is_terminal:
            self._console.print(line, markup=False, highlight=False)

    def advance(self, steps: int) -> None:
        """Moves on."""
        self._done += steps
        self._progress.advance(self._task, steps)
        tenths = 10 * self._done // self._total
        if tenths > self._said:
            self._said = tenths
            if not self._console.is_terminal:
                self._console.print(f"{10 * tenths}% of the training steps", highlight=False)
