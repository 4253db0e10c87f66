# SPDX-License-Identifier: Apache-2.0
"""Trains the runs of a comparison on several processes; what is done is kept, one part a run in `runs/`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from equipoise_lab._ledger import Ledger
from equipoise_lab._tasks import Part, ignore, run_parts
from equipoise_lab.compare._recipe import Comparison, Run
from equipoise_lab.compare._task import Task, load_task
from equipoise_lab.compare._train import Trained, measured_at, train

# The slowest first, so that no process is left with a long task at the end.
_SLOW = ("gm", "skip")


def run_all(
    recipe: Comparison, out: Path, *, workers: int, progress: Callable[[int], object] | None = None
) -> list[Trained]:
    """Trains every run of a recipe that `out` does not hold yet.

    Args:
        recipe: the comparison.
        out: the folder of the command.
        workers: processes, of one thread each; 0 stays in this one.
        progress: called with steps as they are done, those of runs that were found counted at once.

    Returns:
        The runs, in the order of the recipe.
    """
    runs = {run.name: run for run in recipe.runs()}
    parts = {
        name: Part(
            task=(_train_run, runs[name], recipe),
            steps=recipe.steps,
            recipe=depends_on(runs[name], recipe),
            write=_write,
            read=partial(_read, runs[name], recipe),
        )
        for name in sorted(runs, key=_slowness)
    }
    done = dict(run_parts(parts, Ledger(out / "runs"), workers, progress or ignore))
    return [done[name] for name in runs]


def _train_run(run: Run, recipe: Comparison, *, progress: Callable[[int], object]) -> Trained:
    return train(run, recipe, _task(recipe.task), progress=progress)


_loaded: dict[str, Task] = {}


def _task(name: str) -> Task:
    """Loads a task once in a process."""
    if name not in _loaded:
        _loaded[name] = load_task(name)
    return _loaded[name]


def depends_on(run: Run, recipe: Comparison) -> dict[str, Any]:
    """Lists what the model of a run depends on: not which other runs there are."""
    described = recipe.describe()
    for name in ("contenders", "seeds", "first_seed", "learning_rates"):
        del described[name]
    return {"comparison": described, "run": run.describe()}


def _write(trained: Trained) -> dict[str, Any]:
    parameters = {name: x.tolist() for name, x in trained.parameters.items()}
    return {"parameters": parameters, "validation": trained.validation.tolist()}


def _read(run: Run, recipe: Comparison, content: Any) -> Trained:
    parameters = {name: torch.tensor(x) for name, x in content["parameters"].items()}
    return Trained(run, parameters, measured_at(recipe.steps), torch.tensor(content["validation"]))


def _slowness(name: str) -> int:
    return next((i for i, part in enumerate(_SLOW) if part in name), len(_SLOW))
