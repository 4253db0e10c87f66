# SPDX-License-Identifier: Apache-2.0
"""What the commands of `equipoise bench` share: threads, progress, tables, files."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from equipoise_lab.bench import Benchmark, Log, Measurement

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LOG_WIDTH = 120


def set_threads(threads: int) -> None:
    """Tells the libraries that are loaded from here on, which read these variables once, at load."""
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))


def run_benchmark(benchmark: "Benchmark", out: Path, *, resume: bool) -> None:
    """Measures, prints the tables, writes the files."""
    from equipoise_lab._ledger import locked
    from equipoise_lab.bench import Log
    from equipoise_lab.cli._console import make_console

    with locked(out):
        log = Log(benchmark, out, resume=resume)
        console = make_console(_LOG_WIDTH)
        _run_steps(console, log)
        for table in benchmark.tables(log.records):
            console.print(table)
        for path in log.finish():
            console.print(f"wrote {path}", highlight=False)


def _run_steps(console: "Console", log: "Log") -> None:
    """Makes the measurements of a plan: a moving bar on a terminal, one line a measurement in a log."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    steps = log.benchmark.steps
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(steps))
        for number, step in enumerate(steps, start=1):
            progress.update(task, description=step.title)
            try:
                record = log.run(step)
            except KeyboardInterrupt:
                console.print(f"Interrupted. What was measured is in {log.path}; the same command goes on from there.")
                raise
            if not console.is_terminal:
                line = f"[{number}/{len(steps)}] {step.title}: {_outcome(record)}"
                console.print(line, markup=False, highlight=False)
            progress.advance(task)


def _outcome(record: "Measurement") -> str:
    if record.status != "measured":
        return f"{record.status} ({record.note})"
    return "done" if record.seconds is None else f"{record.seconds:.3g} s"
