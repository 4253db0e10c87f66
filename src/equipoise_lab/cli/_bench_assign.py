# SPDX-License-Identifier: Apache-2.0
"""`equipoise bench assign`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from equipoise_lab.cli._bench import run_benchmark, set_threads


def assign(
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)] = Path("out/bench-assign"),
    grid: Annotated[
        Literal["quick", "full"], typer.Option(help="Sizes and checks: quick takes about a minute, full several.")
    ] = "full",
    threads: Annotated[int, typer.Option(min=1, help="Threads for torch and equipoise. Peers use one.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each measurement; the best counts.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the score matrices.")] = 0,
    family: Annotated[
        str,
        typer.Option(help="Score matrices for the sizes: gumbel, logits, sharp, rank-2, ... as in the second table."),
    ] = "gumbel",
    budget: Annotated[
        float | None,
        typer.Option(help="Seconds that one call may take; slower solvers skip the size. [default: the grid's own]"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what a run that ended has measured too.")] = False,
) -> None:
    """Time the exact balanced assignment against its peers.

    Solves the same float32 score matrices with `eq.assign` (all methods), POT's `ot.emd`, OR-tools' min-cost flow and
    scipy's `linear_sum_assignment`, and with `torch.argmax`, which balances nothing and is the floor. Every value is
    compared with ours, so a solver that is fast but inexact shows what it loses.

    Then: every family of difficult matrices at 16,384 x 64, tight and with slack; batches, warm starts, two threads,
    peak memory, first call and import in fresh processes. Each figure is held against a stated limit.

    Writes `bench-assign.json` (after every measurement), `bench-assign.svg` and
    `bench-assign.png`.

    When it is interrupted, the same command goes on from what is measured; after it has ended, it starts anew.

    For a first impression: `equipoise bench assign --grid quick`. For matrices that are hard to balance:
    `equipoise bench assign --family rank-2 --out out/rank-2`.
    """
    set_threads(threads)

    from equipoise_lab.bench import assign_benchmark, assign_recipe

    recipe = assign_recipe(grid, family=family, threads=threads, repeats=repeats, seed=seed, budget=budget)
    run_benchmark(assign_benchmark(recipe), out, resume=resume)
