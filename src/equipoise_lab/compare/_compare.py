# SPDX-License-Identifier: Apache-2.0
"""The whole command: runs, choice of settings, test figures, JSON, picture."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from equipoise_lab._environment import environment
from equipoise_lab._ledger import Ledger, begin, write_whole
from equipoise_lab.compare._contenders import CONTENDERS
from equipoise_lab.compare._figure import NAME, save_figure
from equipoise_lab.compare._recipe import EVALUATIONS, Comparison
from equipoise_lab.compare._runner import run_all
from equipoise_lab.compare._summary import CONFIDENCE, Difference, Outcome, differences, summarise
from equipoise_lab.compare._task import load_task
from equipoise_lab.compare._train import Trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """What the command found.

    Attributes:
        outcomes: each contender in both evaluations.
        differences: ours against the others.
        paths: the files that were written.
    """

    outcomes: list[Outcome]
    differences: list[Difference]
    paths: list[Path]


def compare(
    recipe: Comparison,
    out: Path,
    *,
    command: str,
    workers: int = 2,
    say: Callable[[str], object] = print,
    advance: Callable[[int], object] | None = None,
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
    task = load_task(recipe.task)
    if recipe.batch_size > len(task.train):
        raise ValueError(
            f"batch_size must be at most the {len(task.train)} rows for training of task {task.name!r}, "
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
        "recipe": recipe.describe(),
        "rows": {"train": len(task.train), "validation": len(task.validation), "test": len(task.test)},
        "contenders": {name: CONTENDERS[name].doc for name in recipe.contenders},
        "outcomes": [{**asdict(o), "mean": o.mean, "spread": o.spread} for o in outcomes],
        "confidence": CONFIDENCE,
        "differences": [{**asdict(d), "better": d.better} for d in found],
        "validation": [_validation_row(model) for model in trained],
    }
    write_whole(path, json.dumps(content, indent=1) + "\n")
    return Compared(outcomes=outcomes, differences=found, paths=[path, *pictures])


def _validation_row(trained: Trained) -> dict[str, Any]:
    """A run with its validation loss at the end: what the choice was made on."""
    return {**trained.run.describe(), **dict(zip(EVALUATIONS, trained.validation[-1].tolist(), strict=True))}
