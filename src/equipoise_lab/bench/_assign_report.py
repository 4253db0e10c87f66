# SPDX-License-Identifier: Apache-2.0
"""The assignment benchmark's ratios, verdicts, tables and figure: functions of the records."""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from equipoise_lab._style import Look, add_grid, name_ticks, new_figure, spread, tick_seconds
from equipoise_lab._tables import format_seconds, name_size, name_threads, new_table
from equipoise_lab.bench._assign import (
    ASSIGN_RECIPES,
    CAPACITY_FACTOR,
    FAMILY_LIMIT,
    GAP_LIMIT,
    SIZE_LIMITS,
    AssignBench,
    family_key,
    grid_key,
    grid_steps,
)
from equipoise_lab.bench._behaviour import BEHAVIOURS, behaviour_key, behaviour_steps
from equipoise_lab.bench._benchmark import Benchmark, Measurement, Records, Size, Step, figures_of, times_ours
from equipoise_lab.bench._families import FAMILIES
from equipoise_lab.bench._several import several_steps, several_table, several_verdicts, times_faster_with, times_topk
from equipoise_lab.bench._solvers import OURS, SOLVERS, Solver
from equipoise_lab.bench._verdicts import Verdict, judge, limit_table, ratio_text

# The peers that solve the n x k problem itself; scipy solves the n x n one and is shown for scale.
_RIVALS = ("pot", "ortools")
# The figure has the sizes with so many experts. The height of a name in it is a fraction of that of the axes.
_EXPERTS, _LABEL_HEIGHT = 64, 0.052
# Dark to light within the roles, so that lines stay apart in grey; markers tell them apart without any colour.
_LOOKS = {
    "argmax": Look(colour="#555555", marker="", dashes=":"),
    "primal-dual": Look(colour="#0b3c6f", marker="o"),
    "cycle-cancelling": Look(colour="#1f66ad", marker="s"),
    "auction": Look(colour="#5b9bd0", marker="D", dashes="--"),
    "pot": Look(colour="#8c2d04", marker="^"),
    "ortools": Look(colour="#cc6a1b", marker="v"),
    "scipy": Look(colour="#d08a3a", marker="P"),
}


def gap_per_row(records: Records, size: Size, solver: str) -> float | None:
    """How much better our exact value is than a solver's, per row; negative if the solver found a better one."""
    ours, theirs = records.get(grid_key(size, OURS)), records.get(grid_key(size, solver))
    if ours is None or theirs is None or ours.value is None or theirs.value is None:
        return None
    return (ours.value - theirs.value) / size[0]


def is_exact(records: Records, size: Size, solver: str) -> bool | None:
    """Whether a solver's value equals ours up to the precision of its costs; None when either is missing."""
    gap = gap_per_row(records, size, solver)
    if gap is None:
        return None
    tolerance = next(s.relative_tolerance for s in SOLVERS if s.name == solver)
    return abs(gap) <= tolerance * records[grid_key(size, solver)].figures["largest"]


def times_faster(records: Records, size: Size) -> float | None:
    """The time of the better exact peer divided by ours, which took turns with it."""
    peers = [_times_ours(records, size, name) for name in _RIVALS if is_exact(records, size, name)]
    return min((ratio for ratio in peers if ratio is not None), default=None)


def times_floor(records: Records, size: Size) -> float | None:
    """Our time divided by that of torch.argmax on the same matrix, in turns."""
    floor = _times_ours(records, size, "argmax")
    return 1 / floor if floor else None


def _times_ours(records: Records, size: Size, solver: str) -> float | None:
    return times_ours(records, grid_key(size, solver)) if figures_of(records, grid_key(size, OURS)) else None


def verdicts(bench: AssignBench, records: Records) -> list[Verdict]:
    """Holds every figure of a run against its limit, as far as its sizes and behaviours touch one."""
    sizes = [*_size_verdicts(bench, records), *several_verdicts(bench, records)]
    return judge([*sizes, *_family_verdicts(records), *_behaviour_verdicts(bench, records)], when=bench.judged)


def _size_verdicts(bench: AssignBench, records: Records) -> Iterator[Verdict]:
    for size in bench.sizes:
        if size not in SIZE_LIMITS:
            continue
        (peer, floor), name = SIZE_LIMITS[size], name_size(size)
        if peer is not None:
            title, faster = f"{name}: times faster than the better exact peer", times_faster(records, size)
            yield Verdict(group="size", title=title, figure=faster, limit=peer, at_least=True)
        title, figure = f"{name}: times torch.argmax", times_floor(records, size)
        yield Verdict(group="size", title=title, figure=figure, limit=floor)


def _families(records: Records) -> dict[str, dict[str, float]]:
    """The figures of the families that were measured."""
    found = {name: figures_of(records, family_key(name)) for name in FAMILIES}
    return {name: figures for name, figures in found.items() if figures}


def _family_verdicts(records: Records) -> Iterator[Verdict]:
    known = _families(records)
    for name in FAMILIES:
        for kind, label in (("tight", "tight"), ("slack", f"capacity factor {CAPACITY_FACTOR:g}")):
            figure = known[name][kind] / known[name]["argmax"] if name in known else None
            title = f"{name}, {label}: times torch.argmax"
            yield Verdict(group="family", title=title, figure=figure, limit=FAMILY_LIMIT)
    gap = max((figures[kind] for figures in known.values() for kind in ("tight_gap", "slack_gap")), default=None)
    title = "largest relative gap over all families"
    yield Verdict(group="family", title=title, figure=gap, limit=GAP_LIMIT, unit="")


def _behaviour_verdicts(bench: AssignBench, records: Records) -> Iterator[Verdict]:
    normal = _families(records).get("gumbel")
    slack = None if normal is None else normal["slack"] / normal["tight"]
    yield Verdict(group="behaviour", title="capacity factor 1.25 against tight", figure=slack, limit=1.5)
    for name in bench.behaviours:
        limited = BEHAVIOURS[name]
        record = records.get(behaviour_key(name), Measurement(status="skipped", note="not measured"))
        yield Verdict(
            group="behaviour",
            title=limited.title,
            figure=record.seconds if limited.unit == "s" else record.figures.get("ratio"),
            limit=limited.limit + record.figures.get("resolution", 0.0),  # what the clock cannot tell, where known
            unit=limited.unit,
            note=record.note,
        )


def summary(bench: AssignBench, records: Records) -> dict[str, Any]:
    """The ratios and verdicts in the form that the results file stores."""
    ratios = [
        {
            "n": size[0],
            "k": size[1],
            "times_faster_than_better_peer": times_faster(records, size),
            "times_argmax": times_floor(records, size),
            "gap_per_row": {s.name: gap_per_row(records, size, s.name) for s in SOLVERS if s.role != "floor"},
        }
        for size in bench.sizes
    ]
    several = [
        {
            **dict(zip(("n", "k", "top_k"), point, strict=True)),
            "times_faster_than_ortools": times_faster_with(records, point),
            "times_topk": times_topk(records, point),
        }
        for point in bench.several
    ]
    return {"ratios": ratios, "several": several, "limits": [asdict(verdict) for verdict in verdicts(bench, records)]}


def _tables(bench: AssignBench, records: Records) -> list[Table]:
    return [make(bench, records) for make in (_grid_table, several_table, _family_table, _limit_table)]


def _grid_table(bench: AssignBench, records: Records) -> Table:
    kinds = {s.name: "floor" if s.role == "floor" else "exact" if s.exact else "inexact" for s in SOLVERS}
    conditions = f"{bench.family} scores in float32, {name_threads(bench.threads)}, best of {bench.repeats}"
    table = new_table(
        f"Balanced assignment, {conditions}",
        caption="Peers are timed without conversions. Below an inexact time: its value per row minus ours.",
        caption_justify="left",
    )
    table.add_column("n x k", justify="right", no_wrap=True)
    headings = [f"{s.short}\n[dim]{kinds[s.name]}[/dim]" for s in SOLVERS]
    for heading in (*headings, "best peer\n/ ours", "ours\n/ argmax"):
        table.add_column(heading, justify="right")
    for size in bench.sizes:
        peer, least = SIZE_LIMITS.get(size, (None, None))
        faster = _ratio(bench, times_faster(records, size), peer, at_least=True)
        floor = _ratio(bench, times_floor(records, size), least)
        table.add_row(name_size(size), *(_solver_cell(records, size, solver) for solver in SOLVERS), faster, floor)
    return table


def _solver_cell(records: Records, size: Size, solver: Solver) -> Text:
    record = records.get(grid_key(size, solver.name))
    if record is None or record.status != "measured" or record.seconds is None:
        return Text("-" if record is None else record.status, style="dim")
    time = format_seconds(record.seconds)
    gap = gap_per_row(records, size, solver.name)
    if solver.role == "floor" or gap is None or is_exact(records, size, solver.name):
        return Text(time)
    # A claim of exactness that the values contradict, in either direction, must catch the eye.
    return Text(f"{time}\n{-gap:+.1e}", style="bold red" if solver.exact else "")


def _ratio(bench: AssignBench, figure: float | None, limit: float | None, *, at_least: bool = False) -> Text:
    form = ".0f" if figure is not None and figure >= 10 else ".2f"
    return ratio_text(figure, form, limit if bench.judged else None, at_least=at_least)


def _family_table(bench: AssignBench, records: Records) -> Table:
    size, threads = name_size(bench.robust_size), name_threads(bench.threads)
    slack = f"capacity\nfactor {CAPACITY_FACTOR:g}"
    table = new_table(
        f"Every family at {size}, {threads} (limit: {FAMILY_LIMIT:g} times argmax)",
        ["family"],
        ["argmax", "tight", "times\nargmax", slack, "times\nargmax", "gap"],
    )
    for name, figures in _families(records).items():
        cells: list[str | Text] = []
        for kind in ("tight", "slack"):
            ratio = _ratio(bench, figures[kind] / figures["argmax"], FAMILY_LIMIT)
            cells += [format_seconds(figures[kind]), ratio]
        gap = f"{max(figures['tight_gap'], figures['slack_gap']):.0e}"
        table.add_row(name, format_seconds(figures["argmax"]), *cells, gap)
    return table


def _limit_table(bench: AssignBench, records: Records) -> Table:
    """All limits, and of the families the least favourable one."""
    found = verdicts(bench, records)
    families = [v for v in found if v.group == "family" and v.figure is not None]
    ratios = [v for v in families if v.unit == "x"]
    worst = [replace(v, title=f"worst family: {v.title}") for v in sorted(ratios, key=lambda v: v.figure or 0.0)[-1:]]
    shown = [*(v for v in found if v.group != "family"), *worst, *(v for v in families if v.unit != "x")]
    return limit_table(shown, unjudged="-" if bench.judged else "not judged")


def _draw(bench: AssignBench, records: Records) -> Figure:
    """Draws time against n at k = 64 on logarithmic axes: exact solid, inexact dashed, torch.argmax dotted."""
    figure = new_figure(7.2, 4.6)
    axes = figure.add_subplot()
    starts: list[tuple[float, float, Solver]] = []
    sizes = sorted(size for size in bench.sizes if size[1] == _EXPERTS)
    for solver in SOLVERS:
        known = {
            size[0]: grid_key(size, solver.name) for size in sizes if figures_of(records, grid_key(size, solver.name))
        }
        points = [(float(n), seconds) for n, key in known.items() if (seconds := records[key].seconds) is not None]
        if points:
            width, order = 2.2 if solver.name == OURS else 1.5, 3 if solver.role == "ours" else 2
            how: dict[str, Any] = {**_LOOKS[solver.name].line, "markersize": 4.5, "linewidth": width, "zorder": order}
            axes.plot(*zip(*points, strict=True), **how)
            starts.append((*points[0], solver))
    _set_axes(axes, bench, [n for n, _ in sizes])
    _label_starts(axes, sorted(starts, key=lambda start: start[1]))
    return figure


def _label_starts(axes: Axes, starts: list[tuple[float, float, Solver]]) -> None:
    """Writes each solver's name left of its line, apart from its neighbours, with a hairline to the line."""
    lowest, highest = (math.log10(bound) for bound in axes.get_ylim())
    heights = spread([math.log10(seconds) for _, seconds, _ in starts], _LABEL_HEIGHT * (highest - lowest))
    for (n, seconds, solver), height in zip(starts, heights, strict=True):
        colour, weight = _LOOKS[solver.name].colour, "bold" if solver.name == OURS else "normal"
        axes.plot([n / 1.35, n / 1.06], [10.0**height, seconds], color=colour, linewidth=0.6)
        where: dict[str, Any] = {"horizontalalignment": "right", "verticalalignment": "center"}
        axes.annotate(solver.title, xy=(n / 1.42, 10.0**height), color=colour, fontweight=weight, **where)


def _set_axes(axes: Axes, bench: AssignBench, rows: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    name_ticks(axes, rows, ",")
    axes.yaxis.set_major_formatter(lambda seconds, _: tick_seconds(seconds))
    # Room for the names at the left.
    axes.set_xlim(rows[0] / max(rows[-1] / rows[0], 2.0) ** 0.52, rows[-1] * 1.15)
    add_grid(axes)
    axes.set(xlabel=f"rows n, {_EXPERTS} experts of capacity n / {_EXPERTS}", ylabel="time of one call")
    axes.set_title(
        f"Balanced assignment, {bench.family} scores in float32, {name_threads(bench.threads)}\n"
        "solid: exact   dashed: inexact   dotted: no balancing"
    )


def _steps(bench: AssignBench) -> list[Step]:
    return [*grid_steps(bench), *several_steps(bench), *behaviour_steps(bench)]


ASSIGN = Benchmark(name="assign", recipes=ASSIGN_RECIPES, steps=_steps, tables=_tables, summary=summary, draw=_draw)
