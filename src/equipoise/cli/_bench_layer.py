# SPDX-License-Identifier: Apache-2.0
"""`equipoise bench layer`."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Without a terminal rich assumes 80 columns, too few for the tables.
_LOG_WIDTH = 120
_THREADS = (1, 2)


def layer(
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)] = Path("out/bench-layer"),
    grid: Annotated[
        Literal["quick", "full"],
        typer.Option(help="Size of the layer: quick takes a minute or two, full a quarter of an hour."),
    ] = "full",
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Threads for torch; repeat it for several. [default: 1 and 2]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each comparison; the best time counts.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of parameters, tokens and noise.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what an interrupted run has measured.")] = False,
) -> None:
    """Time the layer against a dense one, Switch and Hugging Face transformers.

    One forward and backward pass of `eq.nn.MoE` with every router, with the share that the router takes; `gm-iw` and
    `skip-iw` against `switch`; `topk` against `MixtralSparseMoeBlock` of transformers with the same parameters, in the
    fastest of its modes (without it: `pip install 'equipoise[transformers]'`, the rest runs); peak memory against the
    dense layer of the same active size. Layers that are compared take turns. Each figure is held against a stated
    limit.

    Writes `bench-layer.json` (after every measurement, so that nothing is lost), `bench-layer.svg` and
    `bench-layer.png`.

    For a first impression: `equipoise bench layer --grid quick`.
    """
    wanted = tuple(threads) if threads else _THREADS
    # Libraries that are loaded from here on read these once, at load; torch is told before each measurement.
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(max(wanted))))

    from rich.console import Console

    from equipoise.cli._progress import run_steps
    from equipoise.experiments.bench import (
        layer_recipe,
        layer_steps,
        layer_tables,
        open_layer_ledger,
        write_layer_outcome,
    )

    recipe = layer_recipe(grid, threads=wanted, repeats=repeats, seed=seed)
    ledger = open_layer_ledger(recipe, out, resume=resume)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH)
    run_steps(console, layer_steps(recipe), ledger)
    for table in layer_tables(recipe, ledger.records):
        console.print(table)
    for path in write_layer_outcome(recipe, ledger):
        console.print(f"wrote {path}", highlight=False)
