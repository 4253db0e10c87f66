# SPDX-License-Identifier: Apache-2.0
"""Trains the units of a comparison on several processes, keeps what is done, and goes on where it was interrupted."""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from equipoise.experiments.paper._runner import run_tasks
from equipoise.experiments.training._recipe import Comparison, Run
from equipoise.experiments.training._task import Task, load_task
from equipoise.experiments.training._train import Trained, measured_at, train

# The slowest first, so that no process is left with a long task at the end.
_SLOW = ("gm", "skip")


def run_units(
    recipe: Comparison, out: Path, *, workers: int, progress: Callable[[int], object] | None = None
) -> dict[str, Trained]:
    """Trains every unit of a recipe that `out` does not hold yet; a unit that ends is written to `units/`.

    Args:
        recipe: the comparison.
        out: the folder of the command.
        workers: processes, of one thread each; 0 stays in this one.
        progress: called with steps as they are done, those of units that were found counted at once.

    Returns:
        The units by name, in the order of the recipe.
    """
    advance = progress or _ignore
    folder = out / "units"
    folder.mkdir(parents=True, exist_ok=True)
    units = recipe.units()
    done: dict[str, Trained] = {}
    for name, runs in units.items():
        found = load_unit(folder / f"{name}.pt", runs, recipe)
        if found is not None:
            done[name] = found
            advance(recipe.steps)
    missing = sorted((name for name in units if name not in done), key=_slowness)
    for name, trained in run_tasks({name: (_train_unit, units[name], recipe) for name in missing}, workers, advance):
        _save(folder / f"{name}.pt", trained, recipe)
        done[name] = trained
    return {name: done[name] for name in units}


def load_unit(path: Path, runs: Sequence[Run], recipe: Comparison) -> Trained | None:
    """Reads the models of a unit back.

    Args:
        path: the file.
        runs: that the unit should have.
        recipe: the comparison.

    Returns:
        The models, or None where the file is missing or comes from another recipe or version.
    """
    if not path.exists():
        return None
    content: dict[str, Any] = torch.load(path, weights_only=True)
    if content["key"] != _key(runs, recipe):
        return None
    return Trained(
        runs=tuple(runs),
        parameters=content["parameters"],
        steps=measured_at(recipe.steps),
        validation=content["validation"],
    )


def _train_unit(runs: Sequence[Run], recipe: Comparison, *, progress: Callable[[int], object]) -> Trained:
    return train(runs, recipe, _task(recipe.task), progress=progress)


_loaded: dict[str, Task] = {}


def _task(name: str) -> Task:
    """Loads a task once in a process."""
    if name not in _loaded:
        _loaded[name] = load_task(name)
    return _loaded[name]


def _key(runs: Sequence[Run], recipe: Comparison) -> dict[str, Any]:
    """What the models of a unit depend on: not which other units there are."""
    described = recipe.describe()
    for name in ("contenders", "seeds", "first_seed", "learning_rates"):
        del described[name]
    return {"version": version("equipoise"), "recipe": described, "runs": [run.describe() for run in runs]}


def _save(path: Path, trained: Trained, recipe: Comparison) -> None:
    content = {
        "key": _key(trained.runs, recipe),
        "parameters": trained.parameters,
        "validation": trained.validation,
    }
    part = path.with_suffix(".part")
    torch.save(content, part)
    part.replace(path)


def _slowness(name: str) -> int:
    return next((i for i, part in enumerate(_SLOW) if part in name), len(_SLOW))


def _ignore(steps: int) -> None:
    del steps
