# SPDX-License-Identifier: Apache-2.0
"""Trains the units of the experiment, on several processes; what is done is kept.

What runs at once (a unit: one method, one way of sampling) is one part in `units/`. When one ends, `results.csv` is
written anew.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from equipoise_lab._ledger import Ledger
from equipoise_lab._tasks import Part, Progress, ignore, run_parts
from equipoise_lab.paper._recipe import Paper
from equipoise_lab.paper._results import Result, Run, write_results
from equipoise_lab.paper._studies._traces import checkpoints
from equipoise_lab.paper._train import Trained, train


def run_units(
    recipe: Paper, out: Path, *, workers: int | None = None, progress: Progress | None = None
) -> list[Result]:
    """Trains every run of a recipe that `out` does not hold yet.

    Args:
        recipe: the experiment.
        out: folder for `results.csv` and `units/`.
        workers: processes; 0 stays in this one. None: one for each core.
        progress: called with steps as they are done, those of units that were found counted at once.

    Returns:
        The results of all runs, in the order of `Paper.runs`.
    """
    workers = (os.cpu_count() or 1) if workers is None else workers
    # The slowest first, so that no process is left with a long task at the end.
    units = dict(sorted(recipe.units().items(), key=lambda item: _cost(*item), reverse=True))
    parts = {
        name: Part(
            task=(_train_unit, runs, recipe),
            steps=recipe.steps,
            recipe=_depends_on(runs, recipe),
            write=_write,
            read=partial(_read, runs),
        )
        for name, runs in units.items()
    }
    done: dict[str, Trained] = {}
    for name, trained in run_parts(parts, Ledger(out / "units"), workers, progress or ignore):
        done[name] = trained
        write_results(out / "results.csv", _collect(done, recipe))
    return _collect(done, recipe)


def load_unit(out: Path, name: str, recipe: Paper) -> Trained | None:
    """Reads the models of a unit back.

    Returns:
        The models, or None where the folder holds none that this recipe would give.
    """
    runs = recipe.units().get(name, [])
    return Ledger(out / "units").load(name, _depends_on(runs, recipe), partial(_read, runs))


def _cost(name: str, runs: Sequence[Run]) -> float:
    """About how long a unit takes: its size, more for balancing and for solving assignments."""
    return (len(runs) + 200) * (1 + ("sinkhorn" in name or "gm-sh" in name) + 0.5 * ("gm" in name or "skip" in name))


def _collect(done: dict[str, Trained], recipe: Paper) -> list[Result]:
    """The results of the units that are done, in the order of the recipe."""
    by_run: dict[Run, Result] = {}
    for trained in done.values():
        by_run.update(zip(trained.runs, trained.results(recipe), strict=True))
    return [by_run[run] for run in recipe.runs() if run in by_run]


def _train_unit(runs: Sequence[Run], recipe: Paper, *, progress: Progress) -> Trained:
    # glibc keeps a freed block for reuse if it has seen a larger one freed. Without this, the temporaries of a step (up
    # to 1.6 MB) go back to the system and are mapped anew: a tenth of the time of training.
    torch.empty(31 << 20, dtype=torch.uint8)
    # The plain runs are looked into later.
    kept = checkpoints(recipe.steps) if any(run.variant == "plain" for run in runs) else ()
    return train(runs, recipe, snapshots=kept, progress=progress)


def _depends_on(runs: Sequence[Run], recipe: Paper) -> dict[str, Any]:
    """What the models of a unit depend on: not how they are measured, nor which other units there are."""
    described = recipe.describe()
    panels = ("methods", "losses", "variants", "temperatures", "seeds", "panel_seeds", "baselines", "sweeps")
    for name in (*panels, "measure", "measured_at"):
        del described[name]
    return {"experiment": described, "runs": [asdict(run) for run in runs]}


def _write(trained: Trained) -> dict[str, Any]:
    return {
        "parameters": trained.parameters.tolist(),
        "mse": trained.mse.tolist(),
        "mse_expected": trained.mse_expected.tolist(),
        "snapshots": {step: parameters.tolist() for step, parameters in trained.snapshots.items()},
    }


def _read(runs: Sequence[Run], content: Any) -> Trained:
    return Trained(
        runs=tuple(runs),
        parameters=torch.tensor(content["parameters"]),
        mse=torch.tensor(content["mse"]),
        mse_expected=torch.tensor(content["mse_expected"]),
        snapshots={int(step): torch.tensor(parameters) for step, parameters in content["snapshots"].items()},
    )
