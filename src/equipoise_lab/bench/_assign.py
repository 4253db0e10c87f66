# SPDX-License-Identifier: Apache-2.0
"""The assignment benchmark as a whole, and its results as rich tables."""

from dataclasses import replace

from rich.table import Table
from rich.text import Text

from equipoise_lab._tables import format_seconds, name_size, name_threads, new_table
from equipoise_lab.bench._behaviour import behaviour_steps
from equipoise_lab.bench._benchmark import Benchmark, Records, plan
from equipoise_lab.bench._families import FAMILIES
from equipoise_lab.bench._figure import save_assign_figure
from equipoise_lab.bench._grid import compile_step, family_key, family_steps, grid_key, grid_steps
from equipoise_lab.bench._recipe import CAPACITY_FACTOR, FAMILY_LIMIT, SIZE_LIMITS, AssignBench, Size
from equipoise_lab.bench._several import several_steps, several_table
from equipoise_lab.bench._solvers import SOLVERS, Solver
from equipoise_lab.bench._summary import gap_per_row, is_exact, summary, times_faster, times_floor, verdicts
from equipoise_lab.bench._verdicts import limit_table, ratio_text


def _tables(bench: AssignBench, records: Records) -> list[Table]:
    """The tables of a run: solvers by size, K experts a row, families, limits."""
    return [
        _grid_table(bench, records),
        several_table(bench, records),
        _family_table(bench, records),
        _limit_table(bench, records),
    ]


def _grid_table(bench: AssignBench, records: Records) -> Table:
    threads = name_threads(bench.threads)
    table = new_table(
        f"Balanced assignment, {bench.family} scores in float32, {threads}, best of {bench.repeats}",
        caption="Peers are timed without conversions. Below an inexact time: its value per row minus ours.",
        caption_justify="left",
    )
    table.add_column("n x k", justify="right", no_wrap=True)
    for solver in SOLVERS:
        exactness = {"floor": "floor"}.get(solver.role, "exact" if solver.exact else "inexact")
        table.add_column(f"{solver.short}\n[dim]{exactness}[/dim]", justify="right")
    table.add_column("best peer\n/ ours", justify="right")
    table.add_column("ours\n/ argmax", justify="right")
    for size in bench.sizes:
        limit = SIZE_LIMITS.get(size)
        faster = _ratio(bench, times_faster(records, size), limit.peer if limit else None, at_least=True)
        floor = _ratio(bench, times_floor(records, size), limit.floor if limit else None, at_least=False)
        cells = [_solver_cell(records, size, solver) for solver in SOLVERS]
        table.add_row(name_size(size), *cells, faster, floor)
    return table


def _solver_cell(records: Records, size: Size, solver: Solver) -> Text:
    record = records.get(grid_key(size, solver.name))
    if record is None:
        return Text("-", style="dim")
    if record.status != "measured" or record.seconds is None:
        return Text(record.status, style="dim")
    time = format_seconds(record.seconds)
    gap, exact = gap_per_row(records, size, solver.name), is_exact(records, size, solver.name)
    if solver.role == "floor" or exact or gap is None:
        return Text(time)
    # A claim of exactness that the values contradict, in either direction, must catch the eye.
    return Text(f"{time}\n{-gap:+.1e}", style="bold red" if solver.exact else "")


def _ratio(bench: AssignBench, figure: float | None, limit: float | None, *, at_least: bool) -> Text:
    form = ".0f" if figure is not None and figure >= 10 else ".2f"
    return ratio_text(figure, form, limit if bench.judged else None, at_least=at_least)


def _family_table(bench: AssignBench, records: Records) -> Table:
    n, k = bench.robust_size
    times = ("argmax", "tight", "times\nargmax", f"capacity\nfactor {CAPACITY_FACTOR:g}", "times\nargmax", "gap")
    title = f"Every family at {n:,} x {k}, {name_threads(bench.threads)} (limit: {FAMILY_LIMIT:g} times argmax)"
    table = new_table(title, ["family"], times)
    for name in FAMILIES:
        record = records.get(family_key(name))
        if record is None:
            continue
        figures = record.figures
        tight, slack = (
            _ratio(bench, figures[kind] / figures["argmax"], FAMILY_LIMIT, at_least=False)
            for kind in ("tight", "slack")
        )
        gap = f"{max(figures['tight_gap'], figures['slack_gap']):.0e}"
        times = [format_seconds(figures[kind]) for kind in ("argmax", "tight", "slack")]
        table.add_row(name, times[0], times[1], tight, times[2], slack, gap)
    return table


def _limit_table(bench: AssignBench, records: Records) -> Table:
    """All limits, and of the families the least favourable one."""
    found = verdicts(bench, records)
    families = [v for v in found if v.group == "family" and v.figure is not None]
    ratios = [v for v in families if v.unit == "x"]
    worst = [replace(v, title=f"worst family: {v.title}") for v in sorted(ratios, key=lambda v: v.figure or 0.0)[-1:]]
    shown = [*(v for v in found if v.group != "family"), *worst, *(v for v in families if v.unit != "x")]
    return limit_table(shown, unjudged="-" if bench.judged else "not judged")


def assign_benchmark(bench: AssignBench) -> Benchmark:
    """Plans a run."""
    steps = [
        compile_step(),
        *grid_steps(bench),
        *several_steps(bench),
        *family_steps(bench),
        *behaviour_steps(bench),
    ]
    return plan("assign", bench, steps, tables=_tables, summary=summary, draw=save_assign_figure)
