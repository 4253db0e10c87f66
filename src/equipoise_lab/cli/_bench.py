# SPDX-License-Identifier: Apache-2.0
"""`equipoise bench assign`, `balance`, `sinkhorn`, `layer` and `scale`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table

Grid = Literal["quick", "full"]
Out = Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)]
Repeats = Annotated[int, typer.Option(min=1, help="Repetitions of each measurement; the best one is reported.")]
Resume = Annotated[bool, typer.Option("--resume", help="Keep the measurements of a finished run too.")]

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LOG_WIDTH = 120
_LAYER_THREADS = (1, 2)


def assign(
    out: Out = Path("out/bench-assign"),
    grid: Annotated[Grid, typer.Option(help="Sizes and checks. quick takes a minute or so, full several.")] = "full",
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch and equipoise. Peers use one.")] = 1,
    repeats: Repeats = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the score matrices.")] = 0,
    family: Annotated[
        str,
        typer.Option(help="Family of the score matrices: gumbel, logits, sharp, rank-2, ... as in the second table."),
    ] = "popular",
    budget: Annotated[
        float | None,
        typer.Option(help="Most seconds for one call; a slower solver skips the size. [default: the grid's own]"),
    ] = None,
    resume: Resume = False,
) -> None:
    """Time the exact balanced assignment against other solvers.

    Solves the same float32 score matrices with `eq.assign` (all methods), POT's `ot.emd`, OR-tools' min-cost flow,
    scipy's `linear_sum_assignment`, and `torch.argmax`, which does not balance and is the floor. Compares every value
    with ours, so that the loss of an inexact solver is visible.

    Gives every row K = 2 and 8 experts, against `torch.topk` and one call of OR-tools.

    Then measures every family of difficult matrices at 16,384 x 64, tight and with slack; batches, warm starts and two
    threads; peak memory; and the first call and import in fresh processes. Compares each number with a stated limit.

    Writes `bench-assign.json` (after every measurement), `bench-assign.svg` and `bench-assign.png`.

    After an interruption, the same command continues. After a finished run, it starts again.

    For a quick look: `equipoise bench assign --grid quick`. For matrices that are hard to balance:
    `equipoise bench assign --family rank-2 --out out/rank-2`.
    """
    changes = {"family": family, "repeats": repeats, "seed": seed, "budget": budget}
    _run("assign", grid, out, resume, threads, threads=threads, **changes)


def sinkhorn(
    out: Out = Path("out/bench-sinkhorn"),
    grid: Annotated[
        Grid, typer.Option(help="Sizes and deviations. quick takes a minute or so, full several.")
    ] = "full",
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch and numpy.")] = 1,
    repeats: Repeats = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the logits.")] = 0,
    budget: Annotated[
        float | None,
        typer.Option(help="Most seconds for one call of POT; larger sizes are skipped. [default: the grid's own]"),
    ] = None,
    resume: Resume = False,
) -> None:
    """Time balancing in expectation against torch.softmax and POT.

    Balances the same float32 logits, flat to sharp, with `eq.sinkhorn` (tight, with slack, with the backward pass) and
    POT's `ot.bregman.sinkhorn_log`, all to the same relative column error. Also times `torch.softmax`, which does not
    balance and is the floor. Compares each number with a stated limit.

    Writes `bench-sinkhorn.json` (after every measurement), `bench-sinkhorn.svg` and `bench-sinkhorn.png`.

    After an interruption, the same command continues. After a finished run, it starts again.

    For a quick look: `equipoise bench sinkhorn --grid quick`.
    """
    changes = {"repeats": repeats, "seed": seed, "budget": budget}
    _run("sinkhorn", grid, out, resume, threads, threads=threads, **changes)


def layer(
    out: Out = Path("out/bench-layer"),
    grid: Annotated[
        Grid, typer.Option(help="Size of the layer. quick takes a minute or two, full takes a quarter of an hour.")
    ] = "full",
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Threads for torch; may be repeated. [default: 1 and 2]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each comparison; the best time is reported.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the parameters, the tokens and the noise.")] = 0,
    resume: Resume = False,
) -> None:
    """Time the layer against a dense one, Switch and Hugging Face transformers.

    Measures one forward and backward pass of `eq.nn.MoE` with every router, and the share of the router; `gm-iw` and
    `skip-iw` against `switch`; `topk` against `MixtralSparseMoeBlock` of transformers with the same parameters, in the
    fastest of its modes; and peak memory against the dense layer of the same active size. Layers that are compared take
    turns. Compares each number with a stated limit.

    The comparison with transformers needs `pip install 'equipoise[transformers]'`; everything else runs without it.

    Writes `bench-layer.json` (after every measurement), `bench-layer.svg` and `bench-layer.png`.

    After an interruption, the same command continues. After a finished run, it starts again.

    For a quick look: `equipoise bench layer --grid quick`.
    """
    wanted = tuple(threads) if threads else _LAYER_THREADS
    _run("layer", grid, out, resume, max(wanted), threads=wanted, repeats=repeats, seed=seed)


def scale(
    out: Out = Path("out/bench-scale"),
    grid: Annotated[Grid, typer.Option(help="Sizes: quick takes half a minute, full a few minutes.")] = "full",
    ranks: Annotated[
        list[int] | None, typer.Option(min=1, help="Processes; repeat it for several. [default: 1, 2, 4 and 8]")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Tokens of a process. [default: the grid's own]")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts. [default: the grid's own]")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Repetitions; the best counts.")] = None,
    latency: Annotated[float, typer.Option(help="Seconds a message, of the machine that is computed.")] = 20e-6,
    bandwidth: Annotated[float, typer.Option(help="Bytes a second and rank, of that machine.")] = 25e9,
    flops: Annotated[float, typer.Option(help="Operations a second and rank, of that machine.")] = 2e14,
    seed: Annotated[int, typer.Option(min=0, help="Seed of parameters and tokens.")] = 0,
    resume: Resume = False,
) -> None:
    """Measure a layer on several processes, and compute what it costs on thousands.

    Starts 1, 2, 4 and 8 processes on this machine and measures one layer: bytes and messages, the exchange with equal
    and with uneven splits, the assignment of each rank's own rows and of all rows, and what the latter is worth where
    ranks see different data. A model of bytes, messages and solver time is held against that. The model then says what
    a layer costs on up to 4,096 ranks of a machine whose network and speed you name. Tables say what was measured and
    what was computed.

    Writes `bench-scale.json`, `bench-scale.svg` and `bench-scale.png`.
    """
    sizes = {"ranks": tuple(ranks) if ranks else None, "rows": rows, "experts": experts, "repeats": repeats}
    _run("scale", grid, out, resume, 1, **sizes, latency=latency, bandwidth=bandwidth, flops=flops, seed=seed)


def balance(
    out: Out = Path("out/bench-balance"),
    grid: Annotated[
        Grid, typer.Option(help="Experts and batches. quick takes less than a minute, full takes about five.")
    ] = "full",
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch and equipoise.")] = 1,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Repetitions with other logits, averaged. [default: the grid's own]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first trial.")] = 0,
    resume: Resume = False,
) -> None:
    """Measure how well routers balance batches that they have not seen.

    Routers that learn one number for each expert from past batches (`loss-free`, `quantile`, `priced`) observe 1 to 100
    batches of logits, from a distribution that is fixed or drifts. Then MaxVio, the largest load over the mean load
    minus 1, is measured on fresh batches. It is also measured for `topk`, which does not balance, and for exact prices
    of a very large batch, the floor that sampling noise sets. Compares `priced` with stated limits.

    Writes `bench-balance.json` (after every measurement), `bench-balance.svg` and `bench-balance.png`.

    After an interruption, the same command continues. After a finished run, it starts again.

    For a quick look: `equipoise bench balance --grid quick`.
    """
    _run("balance", grid, out, resume, threads, trials=trials, seed=seed)


def _run(name: str, grid: str, out: Path, resume: bool, cores: int, /, **changes: Any) -> None:
    """Measures, prints the tables, writes the files.

    The options are those of the grid, with changes; None leaves what the grid says.
    """
    # For the libraries that are loaded from here on, which read these variables once, at load.
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(cores)))

    from equipoise_lab.bench import BENCHMARKS, Log
    from equipoise_lab.cli._progress import ProgressBar, make_console, print_paths, run_with_bar

    benchmark, console = BENCHMARKS[name], make_console(_LOG_WIDTH)
    recipe = benchmark.recipe(grid, **changes)

    def measure(bar: ProgressBar) -> "tuple[list[Path], list[Table]]":
        log = Log(benchmark, recipe, out, resume=resume)
        for number, step in enumerate(log.steps, start=1):
            bar.show(step.title)
            record = log.run(step)
            outcome = "done" if record.seconds is None else f"{record.seconds:.3g} s"
            outcome = outcome if record.status == "measured" else f"{record.status} ({record.note})"
            bar.log(f"[{number}/{len(log.steps)}] {step.title}: {outcome}")
            bar.advance(1)
        return log.finish()

    paths, tables = run_with_bar(console, len(benchmark.steps(recipe)), out, measure, unit=None)
    for table in tables:
        console.print(table)
    print_paths(console, paths)
