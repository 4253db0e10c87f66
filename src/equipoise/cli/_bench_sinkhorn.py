# SPDX-License-Identifier: Apache-2.0
"""`equipoise bench sinkhorn`."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Without a terminal rich assumes 80 columns, too few for the table.
_LOG_WIDTH = 120


def sinkhorn(
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)] = Path("out/bench-sinkhorn"),
    grid: Annotated[
        Literal["quick", "full"], typer.Option(help="Sizes and deviations: quick takes about a minute, full several.")
    ] = "full",
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch and numpy.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each measurement; the best counts.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the logits.")] = 0,
    budget: Annotated[
        float | None,
        typer.Option(help="Seconds that one call of POT may take; it skips larger sizes. [default: the grid's own]"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what an interrupted run has measured.")] = False,
) -> None:
    """Time balancing in expectation against torch.softmax and POT.

    Balances the same float32 logits, flat to sharp, with `eq.sinkhorn` (tight, with slack, with the backward pass) and
    POT's `ot.bregman.sinkhorn_log`, all to the same relative column error, beside `torch.softmax`, which balances
    nothing and is the floor. Each figure is held against a stated limit.

    Writes `bench-sinkhorn.json` (after every measurement, so that nothing is lost), `bench-sinkhorn.svg` and
    `bench-sinkhorn.png`.

    For a first impression: `equipoise bench sinkhorn --grid quick`.
    """
    # Libraries that are loaded from here on read these once, at load.
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))

    from rich.console import Console

    from equipoise.cli._progress import run_steps
    from equipoise.experiments.bench import (
        open_sinkhorn_ledger,
        sinkhorn_recipe,
        sinkhorn_steps,
        sinkhorn_tables,
        write_sinkhorn_outcome,
    )

    recipe = sinkhorn_recipe(grid, threads=threads, repeats=repeats, seed=seed, budget=budget)
    ledger = open_sinkhorn_ledger(recipe, out, resume=resume)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH)
    run_steps(console, sinkhorn_steps(recipe), ledger)
    for table in sinkhorn_tables(recipe, ledger.records):
        console.print(table)
    for path in write_sinkhorn_outcome(recipe, ledger):
        console.print(f"wrote {path}", highlight=False)
