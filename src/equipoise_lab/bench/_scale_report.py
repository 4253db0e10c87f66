# SPDX-License-Identifier: Apache-2.0
"""What many ranks cost: tables, figure and summary. Every number says whether it was measured or computed."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from equipoise_lab._style import add_grid, new_figure, save, style
from equipoise_lab.bench._benchmark import Benchmark, Records
from equipoise_lab.bench._scale import NAME, ScaleBench, computed_machine, far_layer, scale_steps, this_machine
from equipoise_lab.bench._scale_model import Cost, predict

FAR = tuple(2**power for power in range(3, 13))
"""Ranks that are computed: 4,096 tokens each, 16.8 million a step on 4,096 ranks."""
BOTTLENECK = 0.1
"""The share of a layer's time from which the assignment counts as one."""


def scale_benchmark(bench: ScaleBench) -> Benchmark:
    """Plans a run.

    Args:
        bench: its options.
    """
    return Benchmark(
        name=NAME,
        options=asdict(bench),
        steps=scale_steps(bench),
        tables=lambda records: scale_tables(bench, records),
        summary=lambda records: scale_summary(bench, records),
        draw=lambda records, folder: _draw(bench, records, folder),
    )


def _measured(bench: ScaleBench, records: Records) -> list[tuple[int, dict[str, float]]]:
    found = [(size, records.get(f"{size} ranks")) for size in bench.ranks]
    return [(size, record.figures) for size, record in found if record is not None and record.figures]


def scale_summary(bench: ScaleBench, records: Records) -> dict[str, Any]:
    """Computes predictions beside what was measured, and beyond it.

    Args:
        bench: the options.
        records: the measurements.

    Returns:
        What the results file adds to the measurements.
    """
    measured = _measured(bench, records)
    if len(measured) < len(bench.ranks):
        return {}
    here = this_machine(bench, records)
    there = computed_machine(bench, here)
    checked = [
        {"ranks": size, **_compared(figures, predict(bench.layer(size), here, scope="local", equal=True))}
        for size, figures in measured
    ]
    far = {
        scope: [asdict(predict(far_layer(size), there, scope=scope, equal=scope == "local")) for size in FAR]
        for scope in ("local", "global")
    }
    return {
        "machine measured": asdict(here),
        "machine computed": asdict(there),
        "cores": os.cpu_count(),
        "checked": checked,
        "computed": {"ranks": FAR, "layer": asdict(far_layer(FAR[-1])), **far},
        "global is the bottleneck from ranks": bottleneck(bench, records),
    }


def _compared(figures: dict[str, float], cost: Cost) -> dict[str, float]:
    """Bytes and messages, as counted and as predicted."""
    return {
        "token bytes measured": figures["equal/token bytes"],
        "token bytes computed": cost.token_bytes,
        "token messages measured": figures["equal/token messages"],
        "token messages computed": cost.token_messages,
    }


def bottleneck(bench: ScaleBench, records: Records) -> int | None:
    """Finds the ranks from which the assignment of all rows takes a tenth of a layer's time; None: not up to 4,096."""
    there = computed_machine(bench, this_machine(bench, records))
    for size in FAR:
        if predict(far_layer(size), there, scope="global", equal=False).solver_share > BOTTLENECK:
            return size
    return None


def scale_tables(bench: ScaleBench, records: Records) -> list[Table]:
    """Makes the tables for a terminal.

    Args:
        bench: the options.
        records: the measurements.
    """
    measured = _measured(bench, records)
    if len(measured) < len(bench.ranks):
        return []
    here = this_machine(bench, records)
    there = computed_machine(bench, here)
    cost = {size: predict(bench.layer(size), here, scope="local", equal=True) for size, _ in measured}
    traffic = _table(
        "Measured and computed: a layer's forward and backward pass, for one rank",
        "ranks",
        (
            "bytes a token, measured",
            "computed",
            "messages, measured",
            "computed",
        ),
    )
    for size, f in measured:
        traffic.add_row(
            *_cells(
                size,
                f["equal/token bytes"] / bench.rows,
                cost[size].token_bytes / bench.rows,
                f["equal/token messages"],
                cost[size].token_messages,
            )
        )
    times = _table(
        f"Measured, ms, on {os.cpu_count()} cores (more processes than cores share them)",
        "ranks",
        (
            "layer, equal splits",
            "layer, uneven",
            "layer, global",
            "exchange, equal",
            "exchange, uneven",
            "assignment, local",
            "assignment, global",
        ),
    )
    keys = (
        "equal/seconds",
        "uneven/seconds",
        "global/seconds",
        "exchange/equal",
        "exchange/uneven",
        "solver/local",
        "solver/global",
    )
    for size, f in measured:
        times.add_row(*_cells(size, *(1e3 * f[key] for key in keys)))
    values = _table(
        "Measured: value a row of Gumbel-perturbed logits",
        "ranks",
        (
            "alike: free",
            "global",
            "local",
            "data differ: free",
            "global",
            "local",
        ),
    )
    for size, f in measured:
        names = [f"value/{data}/{scope}" for data in ("alike", "different") for scope in ("free", "global", "local")]
        values.add_row(*(f"{size}", *(f"{f[name]:.3f}" for name in names)))
    far = _table(
        f"Computed: 4,096 tokens a rank, 256 experts, dim 4,096, {there.latency * 1e6:.0f} us a message, "
        f"{there.bandwidth / 1e9:.0f} GB/s, ms a layer",
        "ranks",
        (
            "experts",
            "exchange",
            "assignment, local",
            "global",
            "share of global",
            "contested rows, global",
        ),
    )
    for size in FAR:
        local, whole = (predict(far_layer(size), there, scope=s, equal=s == "local") for s in ("local", "global"))
        far.add_row(
            *_cells(size, 1e3 * local.compute, 1e3 * local.exchange, 1e3 * local.solver, 1e3 * whole.solver),
            f"{whole.solver_share:.0%}",
            f"{whole.contested:,.0f}",
        )
    return [traffic, times, values, far]


def _table(title: str, first: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in (first, *columns):
        table.add_column(column, justify="right")
    return table


def _cells(size: int, *numbers: float | int) -> list[str]:
    return [f"{size:,}", *(f"{number:,.4g}" for number in numbers)]


def _draw(bench: ScaleBench, records: Records, folder: Path) -> list[Path]:
    """Draws the computed time of each part against the ranks."""
    if len(_measured(bench, records)) < len(bench.ranks):
        return []
    there = computed_machine(bench, this_machine(bench, records))
    costs = {
        s: [predict(far_layer(size), there, scope=s, equal=s == "local") for size in FAR] for s in ("local", "global")
    }
    parts: dict[str, Callable[[int], float]] = {
        "experts": lambda i: costs["local"][i].compute,
        "exchange": lambda i: costs["local"][i].exchange,
        "assignment of own rows": lambda i: costs["local"][i].solver,
        "assignment of all rows": lambda i: costs["global"][i].solver,
    }
    with style():
        figure = new_figure(5.5, 3.4)
        axes = figure.subplots()
        add_grid(axes)
        for name, part in parts.items():
            axes.plot(FAR, [1e3 * part(i) for i in range(len(FAR))], marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms a layer (computed)")
        axes.legend()
        return save(figure, folder, f"bench-{NAME}")
