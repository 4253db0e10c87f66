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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from equipoise._core import check_at_least, check_positive
from equipoise_lab._style import add_grid, new_figure
from equipoise_lab._tables import new_table
from equipoise_lab.bench._benchmark import Benchmark, Measurement, Records, Report, Step, check_run
from equipoise_lab.bench._scale_model import Cost, Layer, Machine, predict
from equipoise_lab.bench._verdicts import record_of

_Measured = Mapping[int, Mapping[str, float]]  # figures by the number of ranks
_PATIENCE_SECONDS = 600
FAR = tuple(2**power for power in range(3, 13))
"""Ranks that are computed: 4,096 tokens each, 16.8 million a step on 4,096 ranks."""
# The layer that is computed: that of a large language model, in bfloat16.
_FAR_LAYER = Layer(ranks=FAR[-1], rows=4096, experts=256, top_k=1, dim=4096, hidden=4096, width=2)
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
_FAR = ("experts", "exchange", "assignment, local", "global", "share of global", "rows gathered, global")


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
        check_run(self)
        for name in ("rows", "experts", "dim", "hidden"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("latency", "bandwidth", "flops"):
            check_positive(name, getattr(self, name))
        for size in self.ranks:
            check_at_least("ranks", size, 1)
            if self.experts % size:
                raise ValueError(
                    f"experts must be a multiple of every number of ranks, got {self.experts} and {size}: raise it"
                )


def scale_steps(bench: ScaleBench) -> list[Step]:
    """Lists the measurements of a run, in order."""
    return [Step(f"{size} ranks", f"{size} processes", partial(_run_ranks, bench, size)) for size in bench.ranks]


def _run_ranks(bench: ScaleBench, size: int) -> Measurement:
    """Starts the processes of one world, and reads what the first wrote."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder, options = Path(name), (str(size), name, json.dumps(asdict(bench)))
        with (folder / "log").open("w") as log:
            command = [sys.executable, "-m", "equipoise_lab.bench._scale_rank"]
            processes = [
                subprocess.Popen([*command, str(rank), *options], stderr=log, env=environment) for rank in range(size)
            ]
            codes = [process.wait(_PATIENCE_SECONDS) for process in processes]
        if any(codes):
            return Measurement(status="failed", note=(folder / "log").read_text().strip()[-500:])
        figures: dict[str, float] = json.loads((folder / "figures.json").read_text())
    return Measurement(seconds=figures["equal/seconds"], repeats=bench.repeats, figures=figures)


def _this_machine(bench: ScaleBench, every: Sequence[Mapping[str, float]]) -> Machine:
    """Reads the speeds of this machine from the figures of one and of the most ranks; the best, as it is shared."""
    alone, most, size = every[0], every[-1], bench.ranks[-1]
    work = 3 * 2 * 2 * bench.rows * bench.dim * bench.hidden
    moved = bench.rows * bench.dim * 4 * (size - 1) / size
    return Machine(
        latency=most["message"] / max(2 * (size - 1).bit_length(), 1),
        bandwidth=moved / max(most["exchange/equal"] - most["message"], 1e-9) if size > 1 else 1e9,
        flops=work / max(alone["equal/seconds"] - alone["solver/local"], 1e-9),
        pass_seconds=min(figures["solver/pass number"] for figures in every),
        solve_seconds=min(figures["solver/gathered number"] for figures in every),
    )


def _report(bench: ScaleBench, records: Records) -> Report:
    """Predictions beside what was measured, and beyond it; empty where measurements are missing."""
    measured = {size: record_of(records, f"{size} ranks").figures for size in bench.ranks}
    if not all(measured.values()):
        return Report(summary={}, tables=[], figure=None)
    here = _this_machine(bench, list(measured.values()))
    # The machine that is extrapolated to: its network and ranks are assumed, the solver is this machine's. A number of
    # four bytes is read at 1 TB/s.
    assumed = {name: getattr(bench, name) for name in ("latency", "bandwidth", "flops")}
    there = replace(here, **assumed, pass_seconds=4.0 / 1e12)
    near = Layer(ranks=1, rows=bench.rows, experts=bench.experts, top_k=1, dim=bench.dim, hidden=bench.hidden, width=4)
    costs = {size: predict(replace(near, ranks=size), here, scope="local", equal=True) for size in measured}
    local, whole = (
        {size: predict(replace(_FAR_LAYER, ranks=size), there, scope=scope, equal=scope == "local") for size in FAR}
        for scope in ("local", "global")
    )
    checked = {
        size: {
            "token bytes measured": figures["equal/token bytes"],
            "token bytes computed": costs[size].token_bytes,
            "token messages measured": figures["equal/token messages"],
            "token messages computed": costs[size].token_messages,
        }
        for size, figures in measured.items()
    }
    summary = {
        "machine measured": asdict(here),
        "machine computed": asdict(there),
        "cores": os.cpu_count(),
        "checked": [{"ranks": size, **figures} for size, figures in checked.items()],
        "computed": {
            "ranks": FAR,
            "layer": asdict(_FAR_LAYER),
            "local": [asdict(cost) for cost in local.values()],
            "global": [asdict(cost) for cost in whole.values()],
        },
        "global is the bottleneck from ranks": next((s for s in FAR if whole[s].solver_share > BOTTLENECK), None),
    }
    return Report(summary=summary, tables=_tables(bench, measured, checked, local, whole), figure=_draw(local, whole))


def _tables(
    bench: ScaleBench, measured: _Measured, checked: _Measured, local: Mapping[int, Cost], whole: Mapping[int, Cost]
) -> list[Table]:
    """Traffic, times and values as measured, then what was computed."""
    # Bytes for a token, messages for a rank.
    traffic = {
        size: [figure / bench.rows if "bytes" in name else figure for name, figure in figures.items()]
        for size, figures in checked.items()
    }
    times = {size: [1e3 * figures[key] for key in _TIMES.values()] for size, figures in measured.items()}
    values = {size: [f"{figures[key]:.3f}" for key in _VALUE_KEYS] for size, figures in measured.items()}
    far = {
        size: (
            *(1e3 * seconds for seconds in (cost.compute, cost.exchange, cost.solver, whole[size].solver)),
            *(f"{whole[size].solver_share:.0%}", f"{whole[size].gathered:,.0f}"),
        )
        for size, cost in local.items()
    }
    cores = f"on {os.cpu_count()} cores (more processes than cores share them)"
    network = f"{bench.latency * 1e6:.0f} us a message, {bench.bandwidth / 1e9:.0f} GB/s, ms a layer"
    return [
        _table("Measured and computed: a layer's forward and backward pass, for one rank", _TRAFFIC, traffic),
        _table(f"Measured, ms, {cores}", _TIMES, times),
        _table("Measured: value a row of Gumbel-perturbed logits", _VALUES, values),
        _table(f"Computed: 4,096 tokens a rank, 256 experts, dim 4,096, {network}", _FAR, far),
    ]


def _table(title: str, columns: Iterable[str], rows: Mapping[int, Sequence[str | float | int]]) -> Table:
    """Makes a table with a line for each number of ranks."""
    table = new_table(title, right=("ranks", *columns), title_justify="left")
    for size, cells in rows.items():
        table.add_row(f"{size:,}", *(cell if isinstance(cell, str) else f"{cell:,.4g}" for cell in cells))
    return table


def _draw(local: Mapping[int, Cost], whole: Mapping[int, Cost]) -> Figure:
    """Draws the computed time of each part against the ranks."""
    parts = {
        "experts": [cost.compute for cost in local.values()],
        "exchange": [cost.exchange for cost in local.values()],
        "assignment of own rows": [cost.solver for cost in local.values()],
        "assignment of all rows": [cost.solver for cost in whole.values()],
    }
    figure = new_figure(5.5, 3.4)
    axes = figure.subplots()
    add_grid(axes)
    for name, seconds in parts.items():
        axes.plot(FAR, [1e3 * part for part in seconds], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms a layer (computed)")
    axes.legend()
    return figure


_QUICK = ScaleBench(ranks=(1, 2), rows=512, experts=16, dim=64, hidden=64, repeats=2)
SCALE = Benchmark(name="scale", recipes={"full": ScaleBench(), "quick": _QUICK}, steps=scale_steps, report=_report)
