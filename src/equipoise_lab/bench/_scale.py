# SPDX-License-Identifier: Apache-2.0
"""A layer on 1, 2, 4, 8 processes of this machine: what is measured. `_scale_model.py` predicts it and goes further."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from equipoise._core import check_at_least, check_positive, check_seed
from equipoise_lab.bench._benchmark import Measurement, Records, Step
from equipoise_lab.bench._scale_model import Layer, Machine

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
