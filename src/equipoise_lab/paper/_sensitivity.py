# SPDX-License-Identifier: Apache-2.0
"""Whether the verdicts depend on what the paper leaves open."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from equipoise_lab._ledger import write_whole
from equipoise_lab._tasks import Progress
from equipoise_lab.paper._beyond import beyond_recipe
from equipoise_lab.paper._claims import judge
from equipoise_lab.paper._recipe import OPEN_CHOICES, Paper
from equipoise_lab.paper._results import SAME, Result, select_main
from equipoise_lab.paper._runner import load_unit, run_units
from equipoise_lab.paper._task import draw_data, minority_share

# Claims that say something about the runs of the six panels; one of them needs a sweep too.
_PANEL_CLAIMS = (1, 2, 3, 5, 6, 7, 8, 9)
_SWEEPS = ("gating-balance",)


def run_sensitivity(
    recipe: Paper,
    results: list[Result],
    studies: Mapping[str, Mapping[str, Any]],
    out: Path,
    *,
    workers: int,
    advance: Progress,
) -> dict[str, Any]:
    """Judges the claims about the panels once more under every alternative to what the paper leaves open.

    Only what an alternative can change is trained again; the rest is taken from the experiment itself. The folder
    `sensitivity` holds the runs and `sensitivity.json`, written as each alternative ends.

    Returns:
        `rows`: `field`, `value`, `default`, `verdicts` by claim, `without` (the same without a baseline), `solved`
        (fraction of the runs of the panels), `minority` (of the one dataset, where all seeds share it: the share of
        its points with x >= 0.5). In the first nothing is changed: `field` is None.
    """
    note = "One choice changed at a time; what it cannot affect is taken from the experiment itself."
    panels = _panels(recipe)
    wanted = set(panels.runs())
    rows = [_row(recipe, None, None, [result for result in results if result.run in wanted], studies)]
    for name, value in alternatives(recipe):
        changed = replace(panels, **{name: value})
        affected = _affected(changed, name)
        if affected is None:
            trained = [load_unit(out, unit, recipe) for unit in recipe.units()]
            fresh = [result for models in trained if models is not None for result in models.results(changed)]
        else:
            folder = out / "sensitivity" / f"{name}-{value.lower()}"
            fresh = run_units(affected, folder, workers=workers, progress=advance)
        by_run = {result.run: result for result in (*results, *fresh)}
        merged = [result for run, result in by_run.items() if run in wanted]
        rows.append(_row(recipe, name, value, merged, studies))
        path = out / "sensitivity" / "sensitivity.json"
        write_whole(path, json.dumps({"rows": rows, "note": note}, indent=1) + "\n")
    return {"rows": rows, "note": note}


def _panels(recipe: Paper) -> Paper:
    return replace(recipe, sweeps=tuple(sweep for sweep in recipe.sweeps if sweep in _SWEEPS))


def _row(
    recipe: Paper, name: str | None, value: str | None, results: list[Result], studies: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    judged = [claim for claim in judge(results, studies) if claim.number in _PANEL_CLAIMS]
    main = select_main(results)
    minority = minority_share(draw_data(0, recipe.num_points, recipe.noise_sd)[0])
    return {
        "field": name,
        "value": value,
        "default": None if name is None else str(getattr(recipe, name)),
        "verdicts": {str(claim.number): claim.verdict for claim in judged},
        "without": {str(claim.number): claim.verdict_without for claim in judged if claim.verdict_without},
        "minority": minority if name == "dataset" else None,
        "solved": sum(result.solved for result in main) / max(1, len(main)),
    }


def alternatives(recipe: Paper) -> list[tuple[str, str]]:
    """Lists every other value of every open choice.

    Example:
        >>> alternatives(Paper())[0]
        ('dataset', 'shared')
    """
    return [(name, value) for name, known in OPEN_CHOICES.items() for value in known if value != getattr(recipe, name)]


def total_steps(recipe: Paper, *, sensitivity: bool = False, beyond: bool = False) -> int:
    """Counts the training steps of the command, those of runs that are trained together once."""
    units = len(recipe.units()) + (len(beyond_recipe(recipe).units()) if beyond else 0)
    if sensitivity:
        for name, value in alternatives(recipe):
            affected = _affected(replace(_panels(recipe), **{name: value}), name)
            units += 0 if affected is None else len(affected.units())
    return units * recipe.steps


def _affected(changed: Paper, name: str) -> Paper | None:
    """The part of the experiment that must be trained again; None where only the reading of errors changes."""
    if name in ("measure", "measured_at"):
        return None
    if name == "sinkhorn_order":
        changes_nothing = {method for variant, method in SAME if variant == "sinkhorn"}
        methods = tuple(method for method in changed.methods if method not in changes_nothing)
        return replace(changed, variants=("sinkhorn",), methods=methods)
    if name == "balance_load":
        return replace(changed, losses=("gating",))
    return changed
