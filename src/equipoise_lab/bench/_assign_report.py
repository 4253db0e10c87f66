# SPDX-License-Identifier: Apache-2.0
"""The assignment benchmark's ratios, verdicts, tables and figure: functions of the records."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from equipoise_lab._style import Look, add_grid, name_ticks, new_figure, spread, tick_seconds
from equipoise_lab._tables import format_seconds, name_size, name_threads, new_table
from equipoise_lab.bench._assign import CAPACITY_FACTOR, AssignBench, Several, assign_steps, grid_key, name_several
from equipoise_lab.bench._behaviour import BEHAVIOURS
from equipoise_lab.bench._benchmark import Benchmark, Records, Report, Size, Step
from equipoise_lab.bench._families import FAMILIES
from equipoise_lab.bench._solvers import FLOW, OURS, SOLVERS, Solver
from equipoise_lab.bench._verdicts import Verdict, judge, limit_table, ratio, ratio_text, record_of

# At least so many times faster than the better peer (None: no limit), and at most so many times torch.argmax.
SIZE_LIMITS: Mapping[Size, tuple[float | None, float]] = {
    (4096, 16): (25.0, 4.5),
    (4096, 64): (25.0, 4.5),
    (16384, 64): (100.0, 2.5),
    (65536, 64): (None, 2.2),
    (65536, 256): (None, 2.0),
}
# With K experts a row, at every size: the same against OR-tools and torch.topk.
SEVERAL_LIMIT = (30.0, 5.0)
# Any family, tight or with slack, in multiples of torch.argmax at the robust size.
FAMILY_LIMIT = 60.0
# An exact result has a gap of at most this, relative to the larger of |value| and the largest finite |score|.
GAP_LIMIT = 1e-9
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
    ours, theirs = (record_of(records, grid_key(size, name)).value for name in (OURS, solver))
    return None if ours is None or theirs is None else (ours - theirs) / size[0]


def is_exact(records: Records, size: Size, solver: str) -> bool | None:
    """Whether a solver's value equals ours up to the precision of its costs; None when either is missing."""
    gap = gap_per_row(records, size, solver)
    if gap is None:
        return None
    tolerance = next(s.relative_tolerance for s in SOLVERS if s.name == solver)
    return abs(gap) <= tolerance * records[grid_key(size, solver)].figures["largest"]


def times_faster(records: Records, size: Size) -> float | None:
    """The time of the better exact peer divided by ours, which took turns with it."""
    peers = [times_ours(records, size, name) for name in _RIVALS if is_exact(records, size, name)]
    return min((times for times in peers if times is not None), default=None)


def times_floor(records: Records, point: Size | Several) -> float | None:
    """Our time divided by that of torch.argmax, or torch.topk, on the same matrix, in turns."""
    return ratio(1.0, times_ours(records, point, "argmax" if len(point) == 2 else "topk"))


def times_ours(records: Records, point: Size | Several, solver: str) -> float | None:
    """The time of a solver divided by ours, which took turns with it; None where either failed."""
    if len(point) == 2 and not record_of(records, grid_key(point, OURS)).measured:
        return None
    key = grid_key(point, solver)
    return ratio(record_of(records, key).seconds, record_of(records, key).measured.get("ours"))


def verdicts(bench: AssignBench, records: Records) -> list[Verdict]:
    """Holds every figure of a run against its limit, as far as its sizes and behaviours touch one."""
    found: list[Verdict] = []
    for size in bench.sizes:
        peer, floor = SIZE_LIMITS.get(size, (None, None))
        if peer is not None:
            title = f"{name_size(size)}: times faster than the better exact peer"
            found.append(Verdict("size", title, times_faster(records, size), peer, at_least=True))
        if floor is not None:
            found.append(Verdict("size", f"{name_size(size)}: times torch.argmax", times_floor(records, size), floor))
    least, most = SEVERAL_LIMIT
    for point in bench.several:
        found.append(Verdict("several", f"{name_several(point)}: times torch.topk", times_floor(records, point), most))
        title, faster = f"{name_several(point)}: times faster than OR-tools", times_ours(records, point, FLOW.name)
        found.append(Verdict("several", title, faster, least, at_least=True))
    families = {name: record_of(records, f"family/{name}").measured for name in FAMILIES}
    for name, figures in families.items():
        for kind, label in (("tight", "tight"), ("slack", f"capacity factor {CAPACITY_FACTOR:g}")):
            times = ratio(figures.get(kind), figures.get("argmax"))
            found.append(Verdict("family", f"{name}, {label}: times torch.argmax", times, FAMILY_LIMIT))
    gaps = [figures[kind] for figures in families.values() if figures for kind in ("tight_gap", "slack_gap")]
    title = "largest relative gap over all families"
    found.append(Verdict("family", title, max(gaps, default=None), GAP_LIMIT, unit=""))
    slack = ratio(families["gumbel"].get("slack"), families["gumbel"].get("tight"))
    found.append(Verdict("behaviour", "capacity factor 1.25 against tight", slack, 1.5))
    for name in bench.behaviours:
        (_, title, limit, unit), record = BEHAVIOURS[name], record_of(records, f"behaviour/{name}")
        figure = record.seconds if unit == "s" else record.figures.get("ratio")
        limit += record.figures.get("resolution", 0.0)  # what the clock cannot tell, where known
        found.append(Verdict("behaviour", title, figure, limit, unit=unit, note=record.note))
    return judge(found, when=bench.judged)


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
            "times_faster_than_ortools": times_ours(records, point, FLOW.name),
            "times_topk": times_floor(records, point),
        }
        for point in bench.several
    ]
    return {"ratios": ratios, "several": several, "limits": [asdict(verdict) for verdict in verdicts(bench, records)]}


def _grid_table(bench: AssignBench, records: Records) -> Table:
    conditions = f"{bench.family} scores in float32, {name_threads(bench.threads)}, best of {bench.repeats}"
    table = new_table(
        f"Balanced assignment, {conditions}",
        caption="Peers are timed without conversions. Below an inexact time: its value per row minus ours.",
        caption_justify="left",
    )
    table.add_column("n x k", justify="right", no_wrap=True)
    kinds = ["floor" if s.role == "floor" else "exact" if s.exact else "inexact" for s in SOLVERS]
    headings = [f"{s.short}\n[dim]{kind}[/dim]" for s, kind in zip(SOLVERS, kinds, strict=True)]
    for heading in (*headings, "best peer\n/ ours", "ours\n/ argmax"):
        table.add_column(heading, justify="right")
    for size in bench.sizes:
        peer, least = SIZE_LIMITS.get(size, (None, None))
        faster = _ratio(bench, times_faster(records, size), peer, at_least=True)
        floor = _ratio(bench, times_floor(records, size), least)
        table.add_row(name_size(size), *(_solver_cell(records, size, solver) for solver in SOLVERS), faster, floor)
    return table


def _solver_cell(records: Records, size: Size, solver: Solver) -> Text:
    record = record_of(records, grid_key(size, solver.name))
    if record.status != "measured":
        return Text(record.status, style="dim")
    time, gap = format_seconds(record.seconds), gap_per_row(records, size, solver.name)
    if solver.role == "floor" or gap is None or is_exact(records, size, solver.name):
        return Text(time)
    # A claim of exactness that the values contradict, in either direction, must catch the eye.
    return Text(f"{time}\n{-gap:+.1e}", style="bold red" if solver.exact else "")


def _ratio(
    bench: AssignBench, figure: float | None, limit: float | None, form: str = "", *, at_least: bool = False
) -> Text:
    form = form or (".0f" if figure is not None and figure >= 10 else ".2f")
    return ratio_text(figure, form, limit if bench.judged else None, at_least=at_least)


def _several_table(bench: AssignBench, records: Records) -> Table:
    least, most = SEVERAL_LIMIT
    table = new_table(
        f"K experts a row, {bench.family} scores in float32, {name_threads(bench.threads)}",
        ["n x k"],
        ["K", "torch.topk", "primal-dual", FLOW.short, f"{FLOW.short}\n/ ours", "ours\n/ topk"],
        caption=f"Limits: {least:g} times OR-tools, one call of which is timed; {most:g} times torch.topk.",
        caption_justify="left",
    )
    for point in bench.several:
        floor, flow = (record_of(records, grid_key(point, name)) for name in ("topk", FLOW.name))
        cells = [name_size(point[:2]), str(point[2]), format_seconds(floor.seconds)]
        cells += [format_seconds(floor.figures.get("ours"))]
        cells += [format_seconds(flow.seconds) if flow.status == "measured" else flow.status]
        faster = _ratio(bench, times_ours(records, point, FLOW.name), least, ".1f", at_least=True)
        table.add_row(*cells, faster, _ratio(bench, times_floor(records, point), most, ".2f"))
    return table


def _family_table(bench: AssignBench, records: Records) -> Table:
    size, threads = name_size(bench.robust_size), name_threads(bench.threads)
    slack = f"capacity\nfactor {CAPACITY_FACTOR:g}"
    table = new_table(
        f"Every family at {size}, {threads} (limit: {FAMILY_LIMIT:g} times argmax)",
        ["family"],
        ["argmax", "tight", "times\nargmax", slack, "times\nargmax", "gap"],
    )
    for name in FAMILIES:
        if not (figures := record_of(records, f"family/{name}").measured):
            continue
        cells: list[str | Text] = [name, format_seconds(figures["argmax"])]
        for kind in ("tight", "slack"):
            times = _ratio(bench, figures[kind] / figures["argmax"], FAMILY_LIMIT)
            cells += [format_seconds(figures[kind]), times]
        table.add_row(*cells, f"{max(figures['tight_gap'], figures['slack_gap']):.0e}")
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
        found = {size[0]: record_of(records, grid_key(size, solver.name)) for size in sizes}
        points = [(float(n), r.seconds) for n, r in found.items() if r.status == "measured" and r.seconds is not None]
        if points:
            width, order = 2.2 if solver.name == OURS else 1.5, 3 if solver.role == "ours" else 2
            how: dict[str, Any] = {**_LOOKS[solver.name].line, "markersize": 4.5, "linewidth": width, "zorder": order}
            axes.plot(*zip(*points, strict=True), **how)
            starts.append((*points[0], solver))
    rows = [n for n, _ in sizes]
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
    # Each solver's name left of its line, apart from its neighbours, with a hairline to the line.
    lowest, highest = (math.log10(bound) for bound in axes.get_ylim())
    starts.sort(key=lambda start: start[1])
    heights = spread([math.log10(seconds) for _, seconds, _ in starts], _LABEL_HEIGHT * (highest - lowest))
    where: dict[str, Any] = {"horizontalalignment": "right", "verticalalignment": "center"}
    for (n, seconds, solver), height in zip(starts, heights, strict=True):
        colour, weight = _LOOKS[solver.name].colour, "bold" if solver.name == OURS else "normal"
        axes.plot([n / 1.35, n / 1.06], [10.0**height, seconds], color=colour, linewidth=0.6)
        axes.annotate(solver.title, xy=(n / 1.42, 10.0**height), color=colour, fontweight=weight, **where)
    return figure


def _steps(bench: AssignBench) -> list[Step]:
    behaviours = {name: partial(BEHAVIOURS[name].measure, bench) for name in bench.behaviours}
    further = [Step(f"behaviour/{name}", f"behaviour {name}", measure) for name, measure in behaviours.items()]
    return [*assign_steps(bench), *further]


def _report(bench: AssignBench, records: Records) -> Report:
    tables = [make(bench, records) for make in (_grid_table, _several_table, _family_table, _limit_table)]
    return Report(summary=summary(bench, records), tables=tables, figure=_draw(bench, records))


_FULL = AssignBench(
    sizes=(
        *((1024, 64), (2048, 64), (4096, 16), (4096, 64), (8192, 64)),
        *((16384, 64), (32768, 64), (65536, 64), (65536, 256), (262144, 64)),
    ),
    robust_size=(16384, 64),
    several=((16384, 64, 2), (16384, 64, 8), (65536, 128, 2), (65536, 128, 8)),
    behaviours=tuple(BEHAVIOURS),
)
_QUICK = replace(
    _FULL,
    sizes=((1024, 64), (4096, 16), (4096, 64), (16384, 64)),
    several=((16384, 64, 2), (16384, 64, 8)),
    behaviours=("batch", "first-call", "import"),
    budget=2.0,
)
ASSIGN = Benchmark(name="assign", recipes={"full": _FULL, "quick": _QUICK}, steps=_steps, report=_report)
