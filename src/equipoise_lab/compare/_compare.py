# SPDX-License-Identifier: Apache-2.0
"""The whole command: runs on several processes, choice of settings, test figures, JSON, picture."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from equipoise_lab._environment import environment
from equipoise_lab._ledger import Ledger, begin, write_whole
from equipoise_lab._tasks import Part, Progress, ignore, run_parts
from equipoise_lab.compare._protocol import CONFIDENCE, Compared
from equipoise_lab.compare._recipe import CONTENDERS, Comparison, Run
from equipoise_lab.compare._report import NAME, differences, result_tables, save_figure, summarise
from equipoise_lab.compare._task import Task, load_task
from equipoise_lab.compare._train import Trained, measured_at, train


def compare(
    recipe: Comparison,
    out: Path,
    *,
    command: str,
    workers: int = 2,
    say: Callable[[str], object] = print,
    advance: Progress = ignore,
) -> Compared:
    """Trains all runs, chooses settings on the validation split, and reports those on the test split.

    Args:
        recipe: the comparison.
        out: the folder to write to. What it holds of an interrupted run of the same recipe is used.
        command: what was typed, for the record.
        workers: processes; 0 stays in this one.
        say: called with a line when a part begins.
        advance: called with training steps as they are done.

    Returns:
        What was found, and where it is.
    """
    began = time.perf_counter()
    task = _task(recipe.task)
    if recipe.batch_size > len(task.train):
        raise ValueError(
            f"batch_size must be at most the {len(task.train)} rows for training of task {recipe.task!r}, "
            f"got {recipe.batch_size}"
        )
    path = out / f"{NAME}.json"
    begin(path, [Ledger(out / "runs")])
    say(f"training {len(recipe.runs()):,} runs of {recipe.steps:,} steps")
    trained = run_all(recipe, out, workers=workers, progress=advance)
    say("test figures of the chosen settings")
    outcomes = summarise(recipe, trained, task)
    found = differences(outcomes)
    pictures = save_figure(recipe, outcomes, out)
    content = {
        "command": command,
        "seconds": round(time.perf_counter() - began, 1),
        "environment": environment(),
        "recipe": asdict(recipe),
        "rows": {"train": len(task.train), "validation": len(task.validation), "test": len(task.test)},
        "contenders": {name: CONTENDERS[name].doc for name in recipe.contenders},
        "outcomes": [{**asdict(o), "mean": o.mean, "spread": o.spread} for o in outcomes],
        "confidence": CONFIDENCE,
        "differences": [{**asdict(d), "better": d.better} for d in found],
        # What the choice was made on.
        "validation": [
            m.run.describe() | dict(zip(recipe.evaluations(), m.validation[-1].tolist(), strict=True)) for m in trained
        ],
    }
    write_whole(path, json.dumps(content, indent=1) + "\n")
    return Compared(outcomes=outcomes, tables=result_tables(recipe, outcomes, found), paths=[path, *pictures])


def run_all(recipe: Comparison, out: Path, *, workers: int, progress: Progress = ignore) -> list[Trained]:
    """Trains every run of a recipe that `out` does not hold yet; returns all, in the order of the recipe."""
    runs = {run.name: run for run in recipe.runs()}
    parts = {
        name: Part(
            task=(_train_run, run, recipe),
            steps=recipe.steps,
            recipe=depends_on(run, recipe),
            write=_write,
            read=partial(_read, run, recipe),
        )
        # The slowest first, so that no process is left with a long task at the end.
        for name, run in sorted(runs.items(), key=lambda item: ("gm" not in item[0], "skip" not in item[0]))
    }
    done = dict(run_parts(parts, Ledger(out / "runs"), workers, progress))
    return [done[name] for name in runs]


def _train_run(run: Run, recipe: Comparison, *, progress: Progress) -> Trained:
    return train(run, recipe, _task(recipe.task), progress=progress)


@cache
def _task(name: str) -> Task:
    """Loads a task once in a process."""
    return load_task(name)


def depends_on(run: Run, recipe: Comparison) -> dict[str, Any]:
    """Lists what the model of a run depends on: not which other runs there are."""
    others = ("contenders", "seeds", "first_seed", "learning_rates")
    described = {name: value for name, value in asdict(recipe).items() if name not in others}
    return {"comparison": described, "run": run.describe()}


def _write(trained: Trained) -> dict[str, Any]:
    parameters = {name: x.tolist() for name, x in trained.parameters.items()}
    return {"parameters": parameters, "validation": trained.validation.tolist()}


def _read(run: Run, recipe: Comparison, content: Any) -> Trained:
    parameters = {name: torch.tensor(x) for name, x in content["parameters"].items()}
    return Trained(run, parameters, measured_at(recipe.steps), torch.tensor(content["validation"]))
