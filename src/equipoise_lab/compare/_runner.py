# SPDX-License-Identifier: Apache-2.0
"""Trains the units of a comparison on several processes; what is done is kept, one part a unit in `units/`."""

from collections.abc import Callable, Sequence
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


def run_units(
    recipe: Comparison, out: Path, *, workers: int, progress: Callable[[int], object] | None = None
) -> dict[str, Trained]:
    """Trains every unit of a recipe that `out` does not hold yet.

    Args:
        recipe: the comparison.
        out: the folder of the command.
        workers: processes, of one thread each; 0 stays in this one.
        progress: called with steps as they are done, those of units that were found counted at once.

    Returns:
        The units by name, in the order of the recipe.
    """
    units = recipe.units()
    parts = {
        name: Part(
            task=(_train_unit, units[name], recipe),
            steps=recipe.steps,
            recipe=depends_on(units[name], recipe),
            write=_write,
            read=partial(_read, units[name], recipe),
        )
        for name in sorted(units, key=_slowness)
    }
    done = dict(run_parts(parts, Ledger(out / "units"), workers, progress or ignore))
    return {name: done[name] for name in units}


def _train_unit(runs: Sequence[Run], recipe: Comparison, *, progress: Callable[[int], object]) -> Trained:
    return train(runs, recipe, _task(recipe.task), progress=progress)


_loaded: dict[str, Task] = {}


def _task(name: str) -> Task:
    """Loads a task once in a process."""
    if name not in _loaded:
        _loaded[name] = load_task(name)
    return _loaded[name]


def depends_on(runs: Sequence[Run], recipe: Comparison) -> dict[str, Any]:
    """Lists what the models of a unit depend on: not which other units there are."""
    described = recipe.describe()
    for name in ("contenders", "seeds", "first_seed", "learning_rates"):
        del described[name]
    return {"comparison": described, "runs": [run.describe() for run in runs]}


def _write(trained: Trained) -> dict[str, Any]:
    parameters = {name: x.tolist() for name, x in trained.parameters.items()}
    return {"parameters": parameters, "validation": trained.validation.tolist()}


def _read(runs: Sequence[Run], recipe: Comparison, content: Any) -> Trained:
    return Trained(
        runs=tuple(runs),
        parameters={name: torch.tensor(x) for name, x in content["parameters"].items()},
        steps=measured_at(recipe.steps),
        validation=torch.tensor(content["validation"]),
    )


def _slowness(name: str) -> int:
    return next((i for i, part in enumerate(_SLOW) if part in name), len(_SLOW))
