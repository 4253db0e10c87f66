# SPDX-License-Identifier: Apache-2.0
"""`equipoise compare`."""

from pathlib import Path
from typing import Annotated, Any

import typer

_LOG_WIDTH = 130


def compare(
    task: Annotated[str, typer.Argument(help="The task: digits or digits-raw, which need scikit-learn.")] = "digits",
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)] = Path("out/compare"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A small run of under a minute, to try the command; it decides nothing.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(help="Number of runs of each setting. [default: 5]")] = None,
    first_seed: Annotated[
        int | None, typer.Option(help="First seed; other seeds give other runs. [default: 0]")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps. [default: 600]")] = None,
    workers: Annotated[int | None, typer.Option(help="Number of processes. [default: one for each core]")] = None,
) -> None:
    """Compare the library's recipes with Switch and BASE on real data, each tuned over the same number of settings.

    Trains one mixture-of-experts layer of 8 small experts to classify handwritten digits. Settings are chosen on a
    validation split. The test split is read once, for the chosen settings. Losses are evaluated without a capacity, and
    with a capacity of 1.25 times an even share, beyond which rows are dropped.

    Writes `compare.json`, `compare.svg` and `compare.png`. After an interruption, the same command continues. After a
    finished run, it starts again.
    """
    from dataclasses import replace

    import torch

    from equipoise_lab.cli._console import make_console
    from equipoise_lab.cli._training import count_workers, print_paths, run_with_bar, typed_command
    from equipoise_lab.compare import Comparison, compare, load_task, quick_comparison, result_tables

    given = {"seeds": seeds, "first_seed": first_seed, "steps": steps}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    recipe = replace(quick_comparison() if quick else Comparison(), task=task, **changes)
    processes, console = count_workers(workers), make_console(_LOG_WIDTH)
    load_task(task)  # says what is missing before a folder is made
    if quick:
        # In small it takes less time than processes to start. Tensors of this size gain nothing from more threads.
        processes = 0
        torch.set_num_threads(1)
    found = run_with_bar(
        console,
        len(recipe.runs()) * recipe.steps,
        out,
        lambda bar: compare(
            recipe, out, command=typed_command("compare"), workers=processes, say=bar.say, advance=bar.advance
        ),
    )
    for table in result_tables(recipe, found.outcomes, found.differences):
        console.print(table)
    print_paths(console, found.paths)
