# SPDX-License-Identifier: Apache-2.0
"""The balance benchmark's means, verdicts, tables and figure: functions of the records.

Legend: E experts, K experts a row. MaxVio is the largest load over the mean load, minus 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from equipoise_lab._style import GREY, INK, Look, add_grid, new_figure, plot_known
from equipoise_lab._tables import new_table
from equipoise_lab.bench._balance import BALANCE_RECIPES, FLOOR, LOSS_FREE_RATE, BalanceBench, Setting, balance_steps
from equipoise_lab.bench._benchmark import Benchmark, Records
from equipoise_lab.bench._verdicts import Verdict, judge, limit_table, ratio_text, worst_of

# Where priced is held against the floor: so many batches of so many rows, so many experts, logits that stay.
LIMIT_BATCHES, LIMIT_ROWS, LIMIT_EXPERTS = 20, 4096, 64
FLOOR_LIMIT = 1.25
QUANTILE_LIMIT = 1.0
LOOKS = {
    "topk": Look(colour=GREY, marker="P", dashes=":"),
    "loss-free": Look(colour="#cc6a1b", marker="v", dashes="--", filled=False),
    "quantile": Look(colour="#5b9bd0", marker="D", dashes="--"),
    "priced": Look(colour="#0b3c6f", marker="o"),
    FLOOR: Look(colour=INK, marker="", dashes=":"),
}


def violation(bench: BalanceBench, records: Records, at: Setting, who: str, step: int) -> float | None:
    """The mean MaxVio of a router, or of the floor, after so many batches, over the trials that there are."""
    keys = [at.key(trial) for trial in range(bench.trials)]
    found = [records[key].figures.get(f"{who} {step}") for key in keys if key in records]
    known = [figure for figure in found if figure is not None]
    return fmean(known) if known else None


def times(bench: BalanceBench, records: Records, at: Setting, other: str, steps: Sequence[int]) -> float | None:
    """MaxVio of `priced` divided by that of another router or the floor, each the mean over so many batches."""
    pairs = [[violation(bench, records, at, who, step) for step in steps] for who in ("priced", other)]
    ours, others = ([figure for figure in figures if figure is not None] for figures in pairs)
    return sum(ours) / sum(others) if ours and len(ours) == len(others) and sum(others) > 0 else None


def balance_verdicts(bench: BalanceBench, records: Records) -> list[Verdict]:
    """Holds `priced` against the floor and against `quantile`.

    Returns:
        Of each setting with 64 experts whether `priced` is near the floor after 20 batches; of all settings whether it
        is above `quantile` from then on, and at any single point.
    """
    found: list[Verdict] = []
    for at in bench.settings() if bench.rows == LIMIT_ROWS and LIMIT_BATCHES in bench.steps else ():
        if at.num_experts == LIMIT_EXPERTS:
            title = f"{_name(at)}: priced after {LIMIT_BATCHES} batches, times the floor"
            figure = times(bench, records, at, FLOOR, [LIMIT_BATCHES])
            found.append(Verdict(group="floor", title=title, figure=figure, limit=FLOOR_LIMIT))
    late = [step for step in bench.steps if step >= LIMIT_BATCHES] or list(bench.steps[-1:])
    title = f"priced, times quantile, mean from {late[0]} batches on, at most"
    found.append(_closest(bench, records, title, {"": late}))
    title = "priced, times quantile, after any number of batches, at most"
    found.append(_closest(bench, records, title, {f", after {step}": [step] for step in bench.steps}))
    return judge(found)


def _closest(bench: BalanceBench, records: Records, title: str, spans: Mapping[str, Sequence[int]]) -> Verdict:
    """Finds where, over all settings and spans of batches, `priced` is nearest to `quantile`, or furthest above it."""
    places = {_name(at) + span: (at, steps) for at in bench.settings() for span, steps in spans.items()}
    worst, ratio = worst_of({p: times(bench, records, at, "quantile", steps) for p, (at, steps) in places.items()})
    return Verdict(group="peer", title=title, figure=ratio, limit=QUANTILE_LIMIT, note=worst)


def _summary(bench: BalanceBench, records: Records) -> dict[str, Any]:
    """The means over trials and the verdicts in the form that the results file stores."""
    shown = (*bench.routers, FLOOR)
    means = [
        {
            **asdict(at),
            "steps": bench.steps,
            **{who: [violation(bench, records, at, who, step) for step in bench.steps] for who in shown},
        }
        for at in bench.settings()
    ]
    return {"max_violation": means, "verdicts": [asdict(v) for v in balance_verdicts(bench, records)]}


def _tables(bench: BalanceBench, records: Records) -> list[Table]:
    """The tables of a run: MaxVio at the start, after 20 batches and at the end, then limits."""
    table = new_table(
        f"MaxVio on fresh batches of {bench.rows:,} rows, mean of {bench.trials} trials",
        right=("E", "K", "drift", "batches", *bench.routers, FLOOR, "priced\n/ floor"),
        no_wrap=True,
        caption=f"drift: standard deviations that logits move in a step. loss-free: rate {LOSS_FREE_RATE:g}.",
        caption_justify="left",
    )
    shown = [step for step in bench.steps if step in (bench.steps[0], LIMIT_BATCHES, bench.steps[-1])]
    for at in bench.settings():
        for step in shown:
            cells = [violation(bench, records, at, who, step) for who in (*bench.routers, FLOOR)]
            names = [f"{at.num_experts}", f"{at.top_k}", f"{at.drift:g}"] if step == shown[0] else [""] * 3
            written = ["-" if cell is None else f"{cell:.3f}" for cell in cells]
            limit = FLOOR_LIMIT if step == LIMIT_BATCHES else None
            ratio = ratio_text(times(bench, records, at, FLOOR, [step]), ".2f", limit)
            table.add_row(*names, f"{step}", *written, ratio)
    return [table, limit_table(balance_verdicts(bench, records), notes=True)]


def _draw(bench: BalanceBench, records: Records) -> Figure:
    """Draws MaxVio against the number of batches: a row of panels for each E and drift, a column for each K."""
    rows = [(e, drift) for e in bench.experts for drift in bench.drifts]
    figure = new_figure(3.2 * len(bench.top_ks) + 1.4, 2.3 * len(rows) + 0.6)
    panels = figure.subplots(len(rows), len(bench.top_ks), squeeze=False, sharex=True, sharey=True)
    for line, (num_experts, drift) in zip(panels, rows, strict=True):
        for axes, top_k in zip(line, bench.top_ks, strict=True):
            _draw_panel(axes, bench, records, Setting(num_experts, top_k, drift))
        line[0].set_ylabel("MaxVio")
    for axes in panels[-1]:
        axes.set_xlabel("batches observed")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _draw_panel(axes: Axes, bench: BalanceBench, records: Records, at: Setting) -> None:
    for who in (*bench.routers, FLOOR):
        points = ((step, violation(bench, records, at, who, step)) for step in bench.steps)
        plot_known(axes, points, label=who, **LOOKS[who].line)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(list(bench.steps), [str(step) for step in bench.steps])
    axes.yaxis.set_major_formatter(lambda figure, _: f"{figure:g}")
    axes.xaxis.minorticks_off()
    add_grid(axes)
    axes.set_title(_name(at))


def _name(at: Setting) -> str:
    return f"E = {at.num_experts}, K = {at.top_k}, " + (f"drift {at.drift:g}" if at.drift else "no drift")


BALANCE = Benchmark(
    name="balance", recipes=BALANCE_RECIPES, steps=balance_steps, tables=_tables, summary=_summary, draw=_draw
)
