# SPDX-License-Identifier: Apache-2.0
"""The whole command: tuning runs, choice of settings, final runs, JSON, picture."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from equipoise_lab._environment import environment
from equipoise_lab._ledger import Ledger, begin, write_whole
from equipoise_lab._tasks import Part, Progress, ignore, run_parts
from equipoise_lab.compare._protocol import CONFIDENCE, Compared
from equipoise_lab.compare.lm._recipe import CONTENDERS, LanguageModels, Run, Setting
from equipoise_lab.compare.lm._report import (
    NAME,
    Outcome,
    choose_settings,
    differences,
    judge,
    model_tables,
    save_figure,
    summarise,
)
from equipoise_lab.compare.lm._text import Text, read_text
from equipoise_lab.compare.lm._train import Trained, read_trained, train


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The settings to train at."""

    chosen: Mapping[str, Setting]  # one for each contender
    tuning: list[dict[str, Any]]  # the runs that they were chosen by, and their validation losses, as JSON knows them


def compare_models(
    recipe: LanguageModels,
    out: Path,
    *,
    command: str,
    tuned: Tuned | None = None,
    workers: int = 2,
    say: Callable[[str], object] = print,
    advance: Progress = ignore,
) -> Compared:
    """Tunes every contender on the validation split, then trains the chosen settings and reads the test split.

    The arguments are those of `equipoise_lab.compare.compare`, and the settings, from `read_tuned`; None: tunes.
    """
    text, path = _text(recipe.vocabulary), out / f"{NAME}.json"
    begin(path, [Ledger(out / "lm-runs")])
    if tuned is None:
        runs = recipe.tuning_runs()
        say(f"tuning: {len(runs):,} runs of {recipe.steps:,} steps")
        tried = run_all(runs, recipe, out, workers=workers, progress=advance)
        rows = [{**t.run.describe(), "validation": t.validation} for t in tried]
        tuned = Tuned(chosen=choose_settings(recipe, tried), tuning=rows)
    runs = recipe.final_runs(tuned.chosen)
    say(f"the chosen settings: {len(runs):,} runs of {recipe.steps:,} steps")
    final = run_all(runs, recipe, out, workers=workers, progress=advance)
    outcomes = summarise(recipe, final)
    found = differences(outcomes)
    goals = judge(outcomes, found)
    content = {
        "command": command,
        "training_seconds": round(sum(t.step_time * recipe.steps for t in final), 1),
        "environment": environment(),
        "recipe": recipe.describe(),
        "text": text.describe(),
        "contenders": {name: CONTENDERS[name].doc for name in recipe.contenders},
        "goals": [asdict(goal) for goal in goals],
        "outcomes": [_outcome_row(outcome) for outcome in outcomes],
        "confidence": CONFIDENCE,
        "differences": [{**asdict(d), "better": d.better} for d in found],
        "tuning": tuned.tuning,
    }
    pictures = save_figure(outcomes, out)
    write_whole(path, json.dumps(content, indent=1) + "\n")
    tables = model_tables(recipe, outcomes, found, goals)
    return Compared(outcomes=outcomes, tables=tables, paths=[path, *pictures])


def read_tuned(path: Path, recipe: LanguageModels) -> Tuned:
    """Reads the setting that an earlier result of this command chose for each contender, and how they were found.

    Raises:
        ValueError: the file is no result of this command; or it has no setting for a contender, or one that the
            contender no longer has.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tuning, stored = content["tuning"], {row["contender"]: row["setting"] for row in content["outcomes"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"settings must be a compare-lm.json that this command wrote, got {path}: leave it out to tune"
        ) from error
    chosen: dict[str, Setting] = {}
    for name in recipe.contenders:
        found = [setting for setting in CONTENDERS[name].settings() if setting.describe() == stored.get(name)]
        if not found:
            raise ValueError(
                f"settings must hold one of the settings of {name!r}, got {stored.get(name)}: leave it out to tune"
            )
        chosen[name] = found[0]
    return Tuned(chosen=chosen, tuning=tuning)


@cache
def _text(vocabulary: int) -> Text:
    """Reads the text once in a process."""
    return read_text(vocabulary=vocabulary)


def run_all(
    runs: Sequence[Run], recipe: LanguageModels, out: Path, *, workers: int, progress: Progress
) -> list[Trained]:
    """Trains every run that `out` does not hold yet, in the order given."""
    parts = {
        run.name: Part(
            task=(_train_run, run, recipe),
            steps=recipe.steps,
            recipe=depends_on(run, recipe),
            write=Trained.write,
            read=partial(read_trained, run),
        )
        for run in runs
    }
    done = dict(run_parts(parts, Ledger(out / "lm-runs"), workers, progress))
    return [done[run.name] for run in runs]


def _train_run(run: Run, recipe: LanguageModels, *, progress: Progress) -> Trained:
    return train(run, recipe, _text(recipe.vocabulary), progress=progress)


def depends_on(run: Run, recipe: LanguageModels) -> dict[str, Any]:
    """Lists what a run depends on: not which other runs there are."""
    others = ("contenders", "seeds", "first_seed", "tuning_seeds")
    described = {name: value for name, value in recipe.describe().items() if name not in others}
    row = CONTENDERS[run.contender]
    how = {"router": row.router, "options": dict(row.options), "gate": row.gate, "weights": row.weights}
    text = _text(recipe.vocabulary).sha256
    return {"comparison": described, "contender": how, "run": run.describe(), "text": text}


def _outcome_row(outcome: Outcome) -> dict[str, Any]:
    row = CONTENDERS[outcome.contender]
    how = {"label": row.label, "kind": row.kind, "routed": row.router is not None}
    described = {**asdict(outcome), "setting": outcome.setting.describe()}
    return {**how, **described, "mean": outcome.mean, "spread": outcome.spread, "limited_mean": outcome.limited_mean}
