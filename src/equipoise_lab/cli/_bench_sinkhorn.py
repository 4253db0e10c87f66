# SPDX-License-Identifier: Apache-2.0
"""`equipoise bench sinkhorn`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from equipoise_lab.cli._bench import run_benchmark, set_threads


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
    resume: Annotated[bool, typer.Option("--resume", help="Keep what a run that ended has measured too.")] = False,
) -> None:
    """Time balancing in expectation against torch.softmax and POT.

    Balances the same float32 logits, flat to sharp, with `eq.sinkhorn` (tight, with slack, with the backward pass) and
    POT's `ot.bregman.sinkhorn_log`, all to the same relative column error, beside `torch.softmax`, which balances
    nothing and is the floor. Each figure is held against a stated limit.

    Writes `bench-sinkhorn.json` (after every measurement), `bench-sinkhorn.svg` and
    `bench-sinkhorn.png`.

    When it is interrupted, the same command goes on from what is measured; after it has ended, it starts anew.

    For a first impression: `equipoise bench sinkhorn --grid quick`.
    """
    set_threads(threads)

    from equipoise_lab.bench import sinkhorn_benchmark, sinkhorn_recipe

    recipe = sinkhorn_recipe(grid, threads=threads, repeats=repeats, seed=seed, budget=budget)
    run_benchmark(sinkhorn_benchmark(recipe), out, resume=resume)
