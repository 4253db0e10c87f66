# SPDX-License-Identifier: Apache-2.0
"""What many ranks cost: tables, figure and summary. Every number says whether it was measured or computed."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from equipoise_lab._style import add_grid, new_figure
from equipoise_lab._tables import new_table
from equipoise_lab.bench._benchmark import Benchmark, Records
from equipoise_lab.bench._scale import SCALE_RECIPES, ScaleBench, computed_machine, far_layer, scale_steps, this_machine
from equipoise_lab.bench._scale_model import Cost, Machine, predict

FAR = tuple(2**power for power in range(3, 13))
"""Ranks that are computed: 4,096 tokens each, 16.8 million a step on 4,096 ranks."""
BOTTLENECK = 0.1
"""The share of a layer's time from which the assignment counts as one."""
_TRAFFIC = ("bytes a token, measured", "computed", "messages, measured", "computed")
_TIMES = {
    "layer, equal splits": "equal/seconds",
    "layer, uneven": "uneven/seconds",
    "layer, global": "global/seconds",
    "exchange, equal": "exchange/equal",
    "exchange, uneven": "exchange/uneven",
    "assignment, local": "solver/local",
    "assignment, global": "solver/global",
}
_VALUES = ("alike: free", "global", "local", "data differ: free", "global", "local")
_VALUE_KEYS = [f"value/{data}/{scope}" for data in ("alike", "different") for scope in ("free", "global", "local")]
_FAR = ("experts", "exchange", "assignment, local", "global", "share of global", "contested rows, global")


def _computed(
    bench: ScaleBench, records: Records
) -> tuple[dict[int, dict[str, float]], dict[int, Cost], Machine, Machine] | None:
    """Figures by number of ranks, their predictions, this machine and the one computed; None where some are missing."""
    measured = {size: records[f"{size} ranks"].figures for size in bench.ranks if f"{size} ranks" in records}
    if len(measured) < len(bench.ranks) or not all(measured.values()):
        return None
    here = this_machine(bench, records)
    costs = {size: predict(bench.layer(size), here, scope="local", equal=True) for size in measured}
    return measured, costs, here, computed_machine(bench, here)


def _far_costs(there: Machine) -> dict[str, list[Cost]]:
    return {
        scope: [predict(far_layer(size), there, scope=scope, equal=scope == "local") for size in FAR]
        for scope in ("local", "global")
    }


def _summary(bench: ScaleBench, records: Records) -> dict[str, Any]:
    """Predictions beside what was measured, and beyond it: what the results file adds to the measurements."""
    if (computed := _computed(bench, records)) is None:
        return {}
    measured, costs, here, there = computed
    checked = [
        {
            "ranks": size,
            "token bytes measured": figures["equal/token bytes"],
            "token bytes computed": costs[size].token_bytes,
            "token messages measured": figures["equal/token messages"],
            "token messages computed": costs[size].token_messages,
        }
        for size, figures in measured.items()
    ]
    far = _far_costs(there)
    heavy = [size for size, cost in zip(FAR, far["global"], strict=True) if cost.solver_share > BOTTLENECK]
    return {
        "machine measured": asdict(here),
        "machine computed": asdict(there),
        "cores": os.cpu_count(),
        "checked": checked,
        "computed": {
            "ranks": FAR,
            "layer": asdict(far_layer(FAR[-1])),
            **{scope: [asdict(cost) for cost in each] for scope, each in far.items()},
        },
        "global is the bottleneck from ranks": heavy[0] if heavy else None,
    }


def _tables(bench: ScaleBench, records: Records) -> list[Table]:
    """The tables for a terminal: traffic, times and values as measured, then what was computed."""
    if (computed := _computed(bench, records)) is None:
        return []
    measured, costs, _, there = computed
    traffic = {
        size: (f["equal/token bytes"] / bench.rows, costs[size].token_bytes / bench.rows)
        + (f["equal/token messages"], costs[size].token_messages)
        for size, f in measured.items()
    }
    times = {size: [1e3 * f[key] for key in _TIMES.values()] for size, f in measured.items()}
    values = {size: [f"{f[key]:.3f}" for key in _VALUE_KEYS] for size, f in measured.items()}
    network = f"{there.latency * 1e6:.0f} us a message, {there.bandwidth / 1e9:.0f} GB/s, ms a layer"
    cores = f"on {os.cpu_count()} cores (more processes than cores share them)"
    return [
        _table("Measured and computed: a layer's forward and backward pass, for one rank", _TRAFFIC, traffic),
        _table(f"Measured, ms, {cores}", _TIMES, times),
        _table("Measured: value a row of Gumbel-perturbed logits", _VALUES, values),
        _table(f"Computed: 4,096 tokens a rank, 256 experts, dim 4,096, {network}", _FAR, _far_rows(there)),
    ]


def _far_rows(there: Machine) -> dict[int, Sequence[str | float | int]]:
    costs = _far_costs(there)
    return {
        size: (
            *(1e3 * seconds for seconds in (local.compute, local.exchange, local.solver, whole.solver)),
            *(f"{whole.solver_share:.0%}", f"{whole.contested:,.0f}"),
        )
        for size, local, whole in zip(FAR, costs["local"], costs["global"], strict=True)
    }


def _table(title: str, columns: Iterable[str], rows: Mapping[int, Sequence[str | float | int]]) -> Table:
    """Makes a table with a line for each number of ranks."""
    table = new_table(title, right=("ranks", *columns), title_justify="left")
    for size, cells in rows.items():
        table.add_row(f"{size:,}", *(cell if isinstance(cell, str) else f"{cell:,.4g}" for cell in cells))
    return table


def _draw(bench: ScaleBench, records: Records) -> Figure | None:
    """Draws the computed time of each part against the ranks."""
    if (computed := _computed(bench, records)) is None:
        return None
    costs = _far_costs(computed[-1])
    parts = {
        "experts": [cost.compute for cost in costs["local"]],
        "exchange": [cost.exchange for cost in costs["local"]],
        "assignment of own rows": [cost.solver for cost in costs["local"]],
        "assignment of all rows": [cost.solver for cost in costs["global"]],
    }
    figure = new_figure(5.5, 3.4)
    axes = figure.subplots()
    add_grid(axes)
    for name, seconds in parts.items():
        axes.plot(FAR, [1e3 * part for part in seconds], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms a layer (computed)")
    axes.legend()
    return figure


SCALE = Benchmark(name="scale", recipes=SCALE_RECIPES, steps=scale_steps, tables=_tables, summary=_summary, draw=_draw)
