# SPDX-License-Identifier: Apache-2.0
"""Measurements, a benchmark as a plan of them, and the log that keeps them from the moment they are made."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from rich.table import Table

from equipoise._core import check_at_least, check_one_of, check_positive, check_seed
from equipoise_lab._environment import environment
from equipoise_lab._ledger import Ledger, begin, write_whole

R = TypeVar("R")
Status = Literal["measured", "skipped", "failed", "not installed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One measured figure, or the reason why there is none.

    Attributes:
        status: "measured", "skipped" (over the time budget), "failed" or "not installed".
        seconds: the best time, where time was measured.
        repeats: repetitions behind it.
        value: the value of the assignment that was found, in float64.
        certificate: the gap that the solver itself proved, where it proves one.
        figures: further numbers, by name.
        note: why it was skipped, or what to know about it.
    """

    status: Status = "measured"
    seconds: float | None = None
    repeats: int = 0
    value: float | None = None
    certificate: float | None = None
    figures: dict[str, float] = field(default_factory=dict[str, float])
    note: str = ""


Records = Mapping[str, Measurement]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One measurement that is planned: a key, a title for the progress bar, and how to make it.

    `measure` receives what was measured before it, so that a solver's larger problems can be skipped on the evidence of
    its smaller ones.
    """

    key: str
    title: str
    measure: Callable[[Records], Measurement]


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A plan of measurements, and what is made of them.

    Attributes:
        name: of the command behind "equipoise bench", and of the files.
        options: of the run, as JSON knows them.
        steps: the measurements, in order.
        tables: the results for a terminal.
        summary: ratios and verdicts for the results file.
        draw: draws the figure into a folder; returns its files, the last one written last.
    """

    name: str
    options: Mapping[str, Any]
    steps: Sequence[Step]
    tables: Callable[[Records], list[Table]]
    summary: Callable[[Records], dict[str, Any]]
    draw: Callable[[Records, Path], list[Path]]


def plan(
    name: str,
    bench: Any,
    steps: Sequence[Step],
    *,
    tables: Callable[[Any, Records], list[Table]],
    summary: Callable[[Any, Records], dict[str, Any]],
    draw: Callable[[Any, Records, Path], list[Path]],
) -> Benchmark:
    """Makes a benchmark of the options of a run, which all three functions take first."""
    return Benchmark(
        name=name,
        options=asdict(bench),
        steps=steps,
        tables=partial(tables, bench),
        summary=partial(summary, bench),
        draw=partial(draw, bench),
    )


def check_run(bench: Any) -> None:
    """Refuses options that no benchmark can be run with, of those that they share."""
    for name in ("threads", "repeats", "trials"):
        if isinstance(value := getattr(bench, name, None), int):
            check_at_least(name, value, 1)
    check_seed("seed", bench.seed)
    if hasattr(bench, "budget"):
        check_positive("budget", bench.budget)


def foresee(
    records: Records,
    sizes: Sequence[tuple[int, int]],
    size: tuple[int, int],
    key: Callable[[tuple[int, int]], str],
    growth: Callable[[int, int], float],
) -> float:
    """Extrapolates the seconds at a size from the last smaller one that was measured; 0 when there is none.

    Args:
        records: what was measured.
        sizes: of the run, in order.
        size: one of them.
        key: names the measurement at a size.
        growth: what time is proportional to.
    """
    expected = 0.0
    for earlier in sizes[: sizes.index(size)]:
        record = records.get(key(earlier))
        if record is not None and record.seconds is not None:
            expected = record.seconds * growth(*size) / growth(*earlier)
    return expected


def pick_recipe(recipes: Mapping[str, R], grid: str, **changes: Any) -> R:
    """Builds the options of a run from a named grid.

    Args:
        recipes: the grids by name.
        grid: which one.
        **changes: fields that differ from it; None leaves what the grid says.

    Returns:
        The options.

    Raises:
        ValueError: there is no such grid.
    """
    check_one_of("grid", grid, list(recipes))
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(cast(Any, recipes[grid]), **given)


class Log:
    """The measurements of one run: each a part of its own, and all in a file that is valid after every one.

    What an interrupted run has measured with the same options is kept; what it could not measure is tried again.

    Args:
        benchmark: the run.
        out: folder for `bench-<name>.json` and `measurements/`.
        resume: keep the measurements of a run that ended too, and refuse those made with other options.
    """

    def __init__(self, benchmark: Benchmark, out: Path, *, resume: bool = False) -> None:
        """Reads what there is."""
        self.benchmark, self.path = benchmark, out / f"bench-{benchmark.name}.json"
        self._ledger = Ledger(out / "measurements", strict=resume)
        begin(self.path.with_suffix(".png"), [self._ledger], keep=resume)
        found = {s.key: self._ledger.load(s.key, benchmark.options, _read) for s in benchmark.steps}
        self.records: dict[str, Measurement] = {key: record for key, record in found.items() if record is not None}
        self._header = {
            "command": f"equipoise bench {benchmark.name}",
            "options": dict(benchmark.options),
            "environment": environment(),
            "resumed": bool(self.records),
        }
        self._write({})

    def run(self, step: Step) -> Measurement:
        """Makes the step's measurement and keeps it, unless it was found."""
        if step.key not in self.records:
            record = self.records[step.key] = step.measure(self.records)
            if record.status == "measured":
                self._ledger.save(step.key, self.benchmark.options, _without_defaults(record))
            self._write({})
        return self.records[step.key]

    def finish(self) -> list[Path]:
        """Adds ratios and verdicts to the results file and draws the figure."""
        self._write(self.benchmark.summary(self.records))
        return [self.path, *self.benchmark.draw(self.records, self.path.parent)]

    def _write(self, summary: Mapping[str, Any]) -> None:
        # In the order of the plan, whatever was found.
        keys = [step.key for step in self.benchmark.steps if step.key in self.records]
        records = {key: _without_defaults(self.records[key]) for key in keys}
        write_whole(self.path, json.dumps({**self._header, **summary, "records": records}, indent=2) + "\n")


def _read(content: Mapping[str, Any]) -> Measurement:
    return Measurement(**content)


def _without_defaults(record: Measurement) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if value is not None and value not in ("", {})}
