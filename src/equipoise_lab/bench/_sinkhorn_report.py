# SPDX-License-Identifier: Apache-2.0
"""The balancing benchmark's ratios, verdicts, table and figure: functions of the records.

Legend: n rows (datapoints), k columns (experts).
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from equipoise_lab._style import add_grid, name_ticks, new_figure, plot_known
from equipoise_lab._tables import format_seconds, name_size, name_threads, new_table
from equipoise_lab.bench._benchmark import Benchmark, Measurement, Records, Size
from equipoise_lab.bench._sinkhorn import (
    CAPACITY_FACTOR,
    SINKHORN_RECIPES,
    SinkhornBench,
    sinkhorn_key,
    sinkhorn_steps,
)
from equipoise_lab.bench._verdicts import Verdict, judge, limit_table, ratio_text

# Multiples of torch.softmax on the same matrix, by standard deviation of the logits, at this size.
LIMIT_SIZE = (65536, 64)
SOFTMAX_LIMITS: Mapping[float, float] = {1.0: 40.0, 10.0: 80.0}
# Ours may not be slower than POT anywhere.
POT_LIMIT = 1.0
_CURVES = (
    ("pot", "POT sinkhorn_log", "#8c2d04", "^", "-"),
    ("backward", "eq.sinkhorn with backward", "#7fb3dd", "D", "-"),
    ("tight", "eq.sinkhorn", "#0b3c6f", "o", "-"),
    ("slack", f"eq.sinkhorn, uneven logits,\ncapacity factor {CAPACITY_FACTOR:g}", "#2f7fc1", "s", "--"),
)


def times_softmax(records: Records, size: Size, deviation: float, what: str = "tight") -> float | None:
    """A time ("tight", "slack", "backward" or "pot") divided by that of torch.softmax on the same matrix."""
    ours = records.get(sinkhorn_key(size, deviation, "ours"))
    if ours is None or not ours.figures:
        return None
    if what == "pot":
        pot = records.get(sinkhorn_key(size, deviation, "pot"))
        return None if pot is None or pot.seconds is None else pot.seconds / ours.figures["softmax"]
    return ours.figures[what] / ours.figures["softmax"]


def times_faster_than_pot(records: Records, size: Size, deviation: float) -> float | None:
    """POT's time divided by ours; None unless both reached the tolerance."""
    ours, pot = (records.get(sinkhorn_key(size, deviation, who)) for who in ("ours", "pot"))
    if ours is None or pot is None or ours.seconds is None or pot.status != "measured" or pot.seconds is None:
        return None
    return pot.seconds / ours.seconds


def sinkhorn_verdicts(bench: SinkhornBench, records: Records) -> list[Verdict]:
    """Holds softmax times and the closest race with POT against their limits; not judged with more than one thread."""
    found: list[Verdict] = []
    for deviation, limit in SOFTMAX_LIMITS.items():
        title = f"{name_size(LIMIT_SIZE)}, sd {deviation:g}: times torch.softmax"
        figure = times_softmax(records, LIMIT_SIZE, deviation)
        found.append(Verdict(group="size", title=title, figure=figure, limit=limit))
    races = [times_faster_than_pot(records, size, deviation) for size, deviation in bench.cells()]
    closest = min((race for race in races if race is not None), default=None)
    title = "times faster than POT, at least, over all sizes and deviations"
    found.append(Verdict(group="peer", title=title, figure=closest, limit=POT_LIMIT, at_least=True))
    return judge(found, when=bench.threads == 1)


def _tables(bench: SinkhornBench, records: Records) -> list[Table]:
    """The tables of a run: times by size and deviation, then limits."""
    headings = ("n x k", "sd", "softmax", "ours", "ours", "passes", "error", f"slack\n{CAPACITY_FACTOR:g}", "backward")
    table = new_table(
        f"Balancing to {bench.tolerance:g}, float32 logits, {name_threads(bench.threads)}, best of {bench.repeats}",
        right=(*headings, "POT", "POT\n/ ours"),
        no_wrap=True,
        caption="In multiples of torch.softmax on the same matrix, except where a unit is given.",
        caption_justify="left",
    )
    for size, deviation in bench.cells():
        table.add_row(*_row(records, size, deviation))
    return [table, limit_table(sinkhorn_verdicts(bench, records))]


def _summary(bench: SinkhornBench, records: Records) -> dict[str, Any]:
    """The ratios and verdicts in the form that the results file stores."""
    ratios = [
        {
            "n": size[0],
            "k": size[1],
            "deviation": deviation,
            "times_softmax": times_softmax(records, size, deviation),
            "times_faster_than_pot": times_faster_than_pot(records, size, deviation),
        }
        for size, deviation in bench.cells()
    ]
    return {"ratios": ratios, "verdicts": [asdict(v) for v in sinkhorn_verdicts(bench, records)]}


def _row(records: Records, size: Size, deviation: float) -> list[Text]:
    ours = records.get(sinkhorn_key(size, deviation, "ours"), Measurement(status="skipped"))
    pot = records.get(sinkhorn_key(size, deviation, "pot"), Measurement(status="skipped"))
    if not ours.figures:
        return [Text(name_size(size)), Text(f"{deviation:g}"), Text(ours.status, style="dim")]
    figures = ours.figures
    limit = SOFTMAX_LIMITS.get(deviation) if size == LIMIT_SIZE else None
    ratio = figures["tight"] / figures["softmax"]
    cells = [name_size(size), f"{deviation:g}", format_seconds(figures["softmax"]), format_seconds(figures["tight"])]
    cells += [f"{figures['iterations']:.0f}", f"{figures['error']:.0e}"]
    cells += [f"{figures[what] / figures['softmax']:.1f}" for what in ("slack", "backward")]
    race = times_faster_than_pot(records, size, deviation)
    cells += [format_seconds(pot.seconds) if race is not None and pot.seconds is not None else pot.status]
    texts = [Text(cell) for cell in cells]
    texts.insert(4, ratio_text(ratio, ".1f", limit))
    return [*texts, ratio_text(race, ".1f", POT_LIMIT, at_least=True)]


def _draw(bench: SinkhornBench, records: Records) -> Figure:
    """Draws time in multiples of torch.softmax against the deviation of the logits, at the size that has limits."""
    size = LIMIT_SIZE if LIMIT_SIZE in bench.sizes else bench.sizes[-1]
    figure = new_figure(7.2, 4.2)
    axes = figure.add_subplot()
    for what, title, colour, marker, dashes in _CURVES:
        points = ((sd, times_softmax(records, size, sd, what)) for sd in bench.deviations)
        how = {"linestyle": dashes, "color": colour, "marker": marker, "markersize": 4.5}
        plot_known(axes, points, label=title, **how)
    axes.axhline(1.0, color="#555555", linestyle=":", linewidth=1.2, label="torch.softmax")
    axes.set(xscale="log", yscale="log")
    name_ticks(axes, bench.deviations)
    add_grid(axes)
    axes.set(xlabel="standard deviation of the logits", ylabel="time, in multiples of torch.softmax")
    axes.set_title(f"Balancing {name_size(size)} logits to a relative column error of {bench.tolerance:g}")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


SINKHORN = Benchmark(
    name="sinkhorn", recipes=SINKHORN_RECIPES, steps=sinkhorn_steps, tables=_tables, summary=_summary, draw=_draw
)
