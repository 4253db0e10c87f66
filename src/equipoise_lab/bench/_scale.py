# SPDX-License-Identifier: Apache-2.0
"""A layer on 1, 2, 4, 8 processes of this machine, measured; `_scale_model.py` predicts it and goes further.

Every number of the tables, the figure and the summary says whether it was measured or computed.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from equipoise._core import check_at_least, check_positive, check_seed
from equipoise_lab._style import add_grid, new_figure
from equipoise_lab._tables import new_table
from equipoise_lab.bench._benchmark import Benchmark, Measurement, Records, Step
from equipoise_lab.bench._scale_model import Cost, Layer, Machine, predict

_PATIENCE_SECONDS = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleBench:
    """One run of the benchmark of many ranks."""

    ranks: tuple[int, ...] = (1, 2, 4, 8)  # world sizes to measure
    rows: int = 2048  # tokens of a rank
    experts: int = 64  # k, a multiple of every world size
    dim: int = 256  # features of a token
    hidden: int = 512  # features of an expert's hidden layer
    repeats: int = 5  # of which the best counts
    seed: int = 0  # of parameters and tokens
    latency: float = 20e-6  # seconds a message, of the machine that is computed
    bandwidth: float = 25e9  # bytes a second and rank, of that machine
    flops: float = 2e14  # of that machine's ranks

    def __post_init__(self) -> None:
        """Refuses a run that cannot be made."""
        for name in ("rows", "experts", "dim", "hidden", "repeats"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("latency", "bandwidth", "flops"):
            check_positive(name, getattr(self, name))
        check_seed("seed", self.seed)
        for size in self.ranks:
            check_at_least("ranks", size, 1)
            if self.experts % size:
                raise ValueError(
                    f"experts must be a multiple of every number of ranks, got {self.experts} and {size}: raise it"
                )

    def layer(self, ranks: int) -> Layer:
        """Returns the sizes of the layer that is measured, on so many ranks."""
        sizes = {name: getattr(self, name) for name in ("rows", "experts", "dim", "hidden")}
        return Layer(ranks=ranks, top_k=1, width=4, **sizes)


def far_layer(ranks: int) -> Layer:
    """Returns the sizes of the layer that is computed: that of a large language model, in bfloat16."""
    return Layer(ranks=ranks, rows=4096, experts=256, top_k=1, dim=4096, hidden=4096, width=2)


SCALE_RECIPES = {
    "full": ScaleBench(),
    "quick": ScaleBench(ranks=(1, 2), rows=512, experts=16, dim=64, hidden=64, repeats=2),
}


def scale_steps(bench: ScaleBench) -> list[Step]:
    """Lists the measurements of a run, in order."""
    return [Step(f"{size} ranks", f"{size} processes", partial(_run_ranks, bench, size)) for size in bench.ranks]


def _run_ranks(bench: ScaleBench, size: int) -> Measurement:
    """Starts the processes of one world, and reads what the first wrote."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    options = json.dumps(asdict(bench))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "log").open("w") as log:
            command = [sys.executable, "-m", "equipoise_lab.bench._scale_rank"]
            processes = [
                subprocess.Popen([*command, str(rank), str(size), name, options], stderr=log, env=environment)
                for rank in range(size)
            ]
            codes = [process.wait(_PATIENCE_SECONDS) for process in processes]
        if any(codes):
            return Measurement(status="failed", note=(folder / "log").read_text().strip()[-500:])
        figures: dict[str, float] = json.loads((folder / "figures.json").read_text())
    return Measurement(seconds=figures["equal/seconds"], repeats=bench.repeats, figures=figures)


def this_machine(bench: ScaleBench, records: Records) -> Machine:
    """Reads the speeds of this machine from the measurements of one and of the most ranks."""
    every = [records[f"{size} ranks"].figures for size in bench.ranks]  # the best counts: the machine is shared
    alone, most = every[0], every[-1]
    size = bench.ranks[-1]
    work = 3 * 2 * 2 * bench.rows * bench.dim * bench.hidden
    moved = bench.rows * bench.dim * 4 * (size - 1) / size
    return Machine(
        latency=most["message"] / max(2 * (size - 1).bit_length(), 1),
        bandwidth=moved / max(most["exchange/equal"] - most["message"], 1e-9) if size > 1 else 1e9,
        flops=work / max(alone["equal/seconds"] - alone["solver/local"], 1e-9),
        pass_seconds=min(figures["solver/pass number"] for figures in every),
        solve_seconds=min(figures["solver/contested number"] for figures in every),
    )


def computed_machine(bench: ScaleBench, here: Machine) -> Machine:
    """The machine that is extrapolated to: its network and ranks are assumed, the solver is this machine's."""
    return Machine(
        latency=bench.latency,
        bandwidth=bench.bandwidth,
        flops=bench.flops,
        pass_seconds=4.0 / 1e12,  # a number of four bytes, read at 1 TB/s
        solve_seconds=here.solve_seconds,
    )


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
