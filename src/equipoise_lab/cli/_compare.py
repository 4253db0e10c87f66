# SPDX-License-Identifier: Apache-2.0
"""`equipoise compare`."""

from pathlib import Path
from typing import Annotated, Any

import typer

_LOG_WIDTH = 130


def compare(
    task: Annotated[
        str,
        typer.Argument(help="What to learn: 'digits', 'digits-raw' (need scikit-learn), or 'lm', a language model."),
    ] = "digits",
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)] = Path("out/compare"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A small run of under a minute, to try the command; it decides nothing.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(help="Number of runs of each setting. [default: 5]")] = None,
    first_seed: Annotated[
        int | None, typer.Option(help="First seed; other seeds give other runs. [default: 0]")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of training. [default: 600; lm: 2500]")] = None,
    settings: Annotated[
        Path | None,
        typer.Option(
            help="lm: a result of this command whose chosen settings to take. [default: tune]", dir_okay=False
        ),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="lm: token ids; above 128, with frequent pairs of bytes. [default: 128]")
    ] = None,
    contenders: Annotated[
        str | None, typer.Option(help="lm: which to compare, for example 'dense,hash,switch'. [default: all]")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes. [default: one for each core]")] = None,
) -> None:
    """Compare routers on real data, each tuned over as many settings.

    'digits' trains one mixture-of-experts layer of 8 small experts to classify handwritten digits, with the recipes,
    Switch and BASE. Settings are chosen on a validation split; the test split is read once, for the chosen ones. Losses
    are evaluated without a capacity and with 1.25 times an even share, where rows beyond it are dropped.

    'lm' trains a small byte-level transformer with two layers of 8 experts on the sources of Python's standard library,
    with the recipes for language models, every common router, and controls. Settings are chosen on validation files and
    seeds that are not reported.

    Writes `compare.json`, `compare.svg` and `compare.png` (`compare-lm.*`). When it is interrupted, the same command
    goes on from what is done; after it has ended, it starts anew.
    """
    from dataclasses import replace
    from functools import partial

    import torch

    from equipoise._core import check_one_of
    from equipoise_lab.cli._progress import count_workers, make_console, print_paths, run_experiment
    from equipoise_lab.compare import TASKS, Comparison, compare, lm, load_task, quick_comparison

    names = None if contenders is None else tuple(contenders.split(","))
    of_models = {"vocabulary": vocabulary, "contenders": names, "settings": settings}
    for name, value in of_models.items():
        if task != "lm" and value is not None:
            raise ValueError(f"{name} must come with 'lm', got {value} with {task!r}: leave it out")
    given = {"seeds": seeds, "first_seed": first_seed, "steps": steps, "vocabulary": vocabulary, "contenders": names}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    processes, console = count_workers(workers), make_console(_LOG_WIDTH)
    if quick:
        # In small it takes less time than processes to start. Tensors of this size gain nothing from more threads.
        processes = 0
        torch.set_num_threads(1)
    if task == "lm":
        recipe = replace(lm.quick_language_models() if quick else lm.LanguageModels(), **changes)
        tuned = None if settings is None else lm.read_tuned(settings, recipe)
        run, total = partial(lm.compare_models, tuned=tuned), recipe.total_steps(tuned=tuned is not None)
    else:
        check_one_of("task", task, (*TASKS, "lm"))
        recipe = replace(quick_comparison() if quick else Comparison(), task=task, **changes)
        load_task(task)  # says what is missing before a folder is made
        run, total = compare, len(recipe.runs()) * recipe.steps
    found = run_experiment(console, "compare", run, recipe, out, total, workers=processes)
    for table in found.tables:
        console.print(table)
    print_paths(console, found.paths)
