# SPDX-License-Identifier: Apache-2.0
"""Progress of a run, on a terminal and in a log."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from equipoise.experiments.bench import Ledger, Measurement, Step


def run_steps(console: Console, steps: Sequence[Step], ledger: Ledger) -> None:
    """Makes the measurements of a plan: a moving bar on a terminal, one line a measurement in a log.

    Args:
        console: where progress is shown.
        steps: the plan.
        ledger: keeps the results; what it already holds is not measured again.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(steps))
        for number, step in enumerate(steps, start=1):
            progress.update(task, description=step.title)
            try:
                record = ledger.run(step)
            except KeyboardInterrupt:
                console.print(f"Interrupted. What was measured is in {ledger.path}; --resume goes on from there.")
                raise
            if not console.is_terminal:
                console.print(
                    f"[{number}/{len(steps)}] {step.title}: {_outcome(record)}", markup=False, highlight=False
                )
            progress.advance(task)


def _outcome(record: Measurement) -> str:
    if record.status != "measured":
        return f"{record.status} ({record.note})"
    return "done" if record.seconds is None else f"{record.seconds:.3g} s"
