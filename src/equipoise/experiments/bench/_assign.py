# SPDX-License-Identifier: Apache-2.0
"""The assignment benchmark as a whole: its plan, its results file, its outcome."""

from dataclasses import asdict
from pathlib import Path

from equipoise.experiments._environment import environment
from equipoise.experiments.bench._behaviour import behaviour_steps
from equipoise.experiments.bench._figure import save_assign_figure
from equipoise.experiments.bench._grid import compile_step, family_steps, grid_steps
from equipoise.experiments.bench._ledger import Ledger, Step
from equipoise.experiments.bench._recipe import AssignBench
from equipoise.experiments.bench._summary import summary

_NAME = "bench-assign"


def assign_steps(bench: AssignBench) -> list[Step]:
    """Lists the measurements of a run, in order.

    Args:
        bench: the run.

    Returns:
        Steps to be handed to `Ledger.run` one after the other.
    """
    return [compile_step(), *grid_steps(bench), *family_steps(bench), *behaviour_steps(bench)]


def open_ledger(bench: AssignBench, out: Path, *, resume: bool) -> Ledger:
    """Opens the results file of a run.

    Args:
        bench: the run; its fields are stored, and a resumed run must have the same.
        out: folder of the results.
        resume: keep what an earlier, interrupted run has measured.

    Returns:
        The ledger, which writes out/bench-assign.json after every measurement.
    """
    header = {"command": "equipoise bench assign", "options": asdict(bench), "environment": environment()}
    return Ledger(out / f"{_NAME}.json", {**header, "resumed": resume}, resume=resume)


def write_outcome(bench: AssignBench, ledger: Ledger) -> list[Path]:
    """Adds ratios and verdicts to the results file and draws the figure.

    Args:
        bench: the run.
        ledger: its results.

    Returns:
        The files of the run.
    """
    ledger.save(**summary(bench, ledger.records))
    return [ledger.path, *save_assign_figure(bench, ledger.records, ledger.path.parent)]
