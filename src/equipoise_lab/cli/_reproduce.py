# SPDX-License-Identifier: Apache-2.0
"""`equipoise reproduce`."""

from pathlib import Path
from typing import Annotated, Any

import typer


def reproduce(
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)] = Path("out/reproduce"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A small run of under a minute, to try the command; it decides little.")
    ] = False,
    sensitivity: Annotated[
        bool,
        typer.Option("--sensitivity", help="Also train the panels with other values of what the paper leaves open."),
    ] = False,
    beyond: Annotated[
        bool, typer.Option("--beyond", help="Also train the estimators that the paper does not have, on 40 seeds.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(help="Number of runs of each setting. [default: 40 for the REINFORCE panels, else 20]")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps. [default: 10000]")] = None,
    choose: Annotated[
        list[str] | None,
        typer.Option(help="Choose what the paper leaves open, as name=value (dataset=shared); may be repeated."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Number of processes. [default: one for each core]")] = None,
) -> None:
    """Reproduce the paper: train all its runs, draw its figures, test its claims.

    Trains the toy experiment of Kool, Maddison and Mnih (2021) in full: two ways for the router to learn, three ways to
    sample, six estimators, twelve temperatures, 20 to 40 seeds with a dataset each, REINFORCE with and without a
    baseline, and the sweeps of the balance loss and the learning rate. Then runs the studies behind the paper's other
    statements. Judges every claim by a rule that was fixed in advance.

    Writes `results.csv` (a line for each run), `claims.json`, `figures/` and `report.html`, one page with everything.
    Takes about 10 minutes on two cores. After an interruption, the same command continues. After a finished run, it
    starts again.
    """
    from dataclasses import replace

    from rich.console import Console

    from equipoise_lab.cli._progress import count_workers, print_paths, run_experiment
    from equipoise_lab.paper import OPEN_CHOICES, Paper, claims_table, quick_recipe, reproduce, total_steps

    given = (("seeds", seeds), ("panel_seeds", seeds), ("steps", steps))
    changes: dict[str, Any] = {name: v for name, v in given if v is not None}
    for choice in choose or ():
        name, equals, value = choice.partition("=")
        if not equals or name not in OPEN_CHOICES:
            known = ", ".join(f"{name}={'|'.join(values)}" for name, values in OPEN_CHOICES.items())
            raise ValueError(f"choose must be one of {known}, got {choice!r}")
        changes[name] = value
    recipe = replace(quick_recipe() if quick else Paper(), **changes)
    processes, console = count_workers(workers), Console()
    total = total_steps(recipe, sensitivity=sensitivity, beyond=beyond)
    how = {"quick": quick, "sensitivity": sensitivity, "beyond": beyond, "workers": processes}
    found = run_experiment(console, "reproduce", reproduce, recipe, out, total, **how)
    console.print(claims_table(found.claims))
    print_paths(console, found.paths)
