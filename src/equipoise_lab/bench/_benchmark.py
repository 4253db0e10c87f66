# SPDX-License-Identifier: Apache-2.0
"""Measurements, a benchmark as a plan of them, and the log that keeps them from the moment they are made."""

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure
from rich.table import Table

from equipoise._core import check_at_least, check_one_of, check_positive, check_seed
from equipoise_lab._environment import environment
from equipoise_lab._ledger import Ledger, begin, write_whole
from equipoise_lab._style import save, style

Status = Literal["measured", "skipped", "failed", "not installed"]
Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One measured figure, or the reason why there is none."""

    status: Status = "measured"
    seconds: float | None = None  # the best time, where time was measured
    repeats: int = 0  # repetitions behind it
    value: float | None = None  # of the assignment that was found, in float64
    certificate: float | None = None  # the gap that the solver itself proved, where it proves one
    figures: dict[str, float] = field(default_factory=dict[str, float])  # further numbers, by name
    note: str = ""  # why there is no figure, or what to know about it

    @property
    def measured(self) -> dict[str, float]:
        """The figures; none where the measurement was not made, or failed."""
        return self.figures if self.status == "measured" else {}


Records = Mapping[str, Measurement]


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement that is planned."""

    key: str
    title: str  # for the progress bar
    measure: Callable[[], Measurement]
    skip: Callable[[Records], str] = lambda records: ""  # why earlier measurements speak against it; empty: they do not

    def run(self, records: Records) -> Measurement:
        """Makes the measurement, or says why it could not be made."""
        if note := self.skip(records):
            return Measurement(status="skipped", note=note)
        try:
            return self.measure()
        except ModuleNotFoundError as error:
            return Measurement(status="not installed", note=str(error))
        except RuntimeError as error:  # a peer, or a process of its own, gave up
            return Measurement(status="failed", note=str(error))


def need(package: str, extra: str, *, name: str | None = None) -> None:
    """Raises a ModuleNotFoundError that says how to install a peer, where its package is missing."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"needs {name or package}: pip install 'equipoise[{extra}]'")


def check_run(bench: Any) -> None:
    """Refuses options that no benchmark can be run with, of those that they share."""
    for name in ("threads", "repeats", "trials"):
        if isinstance(value := getattr(bench, name, None), int):
            check_at_least(name, value, 1)
    check_seed("seed", bench.seed)
    if hasattr(bench, "budget"):
        check_positive("budget", bench.budget)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the measurements of a run say."""

    summary: dict[str, Any]  # ratios and verdicts for the results file
    tables: list[Table]  # for a terminal
    figure: Figure | None  # None where measurements are missing


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A kind of benchmark. Its functions take the options of a run, which are a value of its own class."""

    name: str  # of the command behind "equipoise bench", and of the files
    recipes: dict[str, Any]  # options by the name of the grid
    steps: Callable[[Any], Sequence[Step]]  # plans the measurements, in order
    report: Callable[[Any, Records], Report]

    def recipe(self, grid: str, **changes: Any) -> Any:
        """Builds the options of a run from a named grid and the fields that differ; None leaves what the grid says."""
        check_one_of("grid", grid, list(self.recipes))
        given = {name: value for name, value in changes.items() if value is not None}
        return replace(self.recipes[grid], **given)


class Log:
    """The measurements of one run: each a part of its own, and all in a file that is valid after every one.

    What an interrupted run has measured with the same options is kept; what it could not measure is tried again.

    Args:
        benchmark: which.
        bench: the options of the run.
        out: folder for `bench-<name>.json` and `measurements/`.
        resume: keep the measurements of a run that ended too, and refuse those made with other options.
    """

    def __init__(self, benchmark: Benchmark, bench: Any, out: Path, *, resume: bool = False) -> None:
        """Reads what there is."""
        self.benchmark, self.bench, self.path = benchmark, bench, out / f"bench-{benchmark.name}.json"
        self.steps = benchmark.steps(bench)
        self._ledger, self._options = Ledger(out / "measurements", strict=resume), asdict(bench)
        begin(self.path.with_suffix(".png"), [self._ledger], keep=resume)
        self.records: dict[str, Measurement] = {}
        for step in self.steps:
            record = self._ledger.load(step.key, self._options, lambda content: Measurement(**content))
            if record is not None:
                self.records[step.key] = record
        self._header = {
            "command": f"equipoise bench {benchmark.name}",
            "options": self._options,
            "environment": environment(),
            "resumed": bool(self.records),
        }
        self._write({})

    def run(self, step: Step) -> Measurement:
        """Makes the step's measurement and keeps it, unless it was found."""
        if step.key not in self.records:
            record = self.records[step.key] = step.run(self.records)
            if record.status == "measured":
                self._ledger.save(step.key, self._options, _without_defaults(record))
            self._write({})
        return self.records[step.key]

    def finish(self) -> tuple[list[Path], list[Table]]:
        """Adds ratios and verdicts to the results file and draws the figure; returns the files and the tables."""
        with style():
            report = self.benchmark.report(self.bench, self.records)
            self._write(report.summary)
            drawn = [] if report.figure is None else save(report.figure, self.path.parent, self.path.stem)
        return [self.path, *drawn], report.tables

    def _write(self, summary: Mapping[str, Any]) -> None:
        # In the order of the plan, whatever was found.
        keys = [step.key for step in self.steps if step.key in self.records]
        records = {key: _without_defaults(self.records[key]) for key in keys}
        write_whole(self.path, json.dumps({**self._header, **summary, "records": records}, indent=2) + "\n")


def _without_defaults(record: Measurement) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if value is not None and value not in ("", {})}
