# SPDX-License-Identifier: Apache-2.0
"""The whole command: runs, studies, claims, figures, report."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise_lab._environment import environment
from equipoise_lab._ledger import Ledger, begin
from equipoise_lab._tasks import Part, Progress, ignore, run_parts
from equipoise_lab.paper._beyond import beyond_recipe, draw_beyond_figures, run_beyond
from equipoise_lab.paper._claims import Claim, judge, write_claims
from equipoise_lab.paper._recipe import Paper
from equipoise_lab.paper._report import write_report
from equipoise_lab.paper._result_figures import draw_result_figures, quick_note
from equipoise_lab.paper._results import Result
from equipoise_lab.paper._runner import load_unit, run_units
from equipoise_lab.paper._sensitivity import run_sensitivity
from equipoise_lab.paper._solved import panel_tables
from equipoise_lab.paper._studies import ON_RECIPE, STUDIES, save_study_figures
from equipoise_lab.paper._studies._traces import path_of

# Measured alone, on one process, because it is a time.
_ALONE = "solver_time"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """What the command found."""

    results: list[Result]  # every training run
    claims: list[Claim]  # the paper's, judged
    paths: list[Path]  # the files that were written


def reproduce(
    recipe: Paper,
    out: Path,
    *,
    command: str,
    quick: bool = False,
    sensitivity: bool = False,
    beyond: bool = False,
    workers: int = 2,
    say: Callable[[str], object] = print,
    advance: Progress | None = None,
) -> Reproduction:
    """Runs the experiment and the studies, judges the claims, and draws and writes everything.

    Args:
        recipe: the experiment.
        out: the folder to write to. What it holds of an interrupted run of the same recipe is used.
        command: what was typed, for the report.
        quick: studies in small too.
        sensitivity: run the panels once more under every alternative to an open choice.
        beyond: also train what the paper does not have, on other seeds.
        workers: processes; in small this one does it all.
        say: called with a line when a part begins.
        advance: called with training steps as they are done.

    Returns:
        The results, and where they are.
    """
    began = time.perf_counter()
    begin_anew_if_complete(out, [n for n, wanted in (("sensitivity", sensitivity), ("beyond", beyond)) if wanted])
    resumed = any(out.glob("**/units/*.json"))
    advance = advance or ignore
    if quick:
        workers = 0  # all of it takes less time than processes to start
    say(f"training {len(recipe.runs()):,} runs of {recipe.steps:,} steps")
    results = run_units(recipe, out, workers=workers, progress=advance)
    say("studies of the other statements")
    studies = run_studies(recipe, out, quick=quick, workers=workers)
    if sensitivity:
        say("the panels under other readings of the paper")
        studies["sensitivity"] = run_sensitivity(recipe, results, studies, out, workers=workers, advance=advance)
    further = beyond_recipe(recipe)
    if beyond:
        say(f"beyond the paper: {len(further.runs()):,} runs on other seeds")
        studies["beyond"] = run_beyond(further, out, workers=workers, advance=advance)
    claims = judge(results, studies)
    write_claims(out / "claims.json", claims, panel_tables(results))
    say("figures and report")
    described = {**recipe.describe(), "quick": quick}
    paths = [out / "results.csv", out / "claims.json"]
    paths += draw_result_figures(out, results, described, model=studies["traces"].get("model"))
    paths += save_study_figures(studies, out / "figures")
    if beyond:
        paths += draw_beyond_figures(out / "figures", studies["beyond"], quick_note(described))
    how: dict[str, Any] = {"environment": environment(), "command": command, "resumed": resumed}
    report = write_report(out, described, results, claims, studies, seconds=time.perf_counter() - began, **how)
    return Reproduction(results=results, claims=claims, paths=[*paths, report])


def begin_anew_if_complete(out: Path, extras: Sequence[str]) -> None:
    """Forgets the runs and studies of a command that ended; those of one that was interrupted stay.

    What is asked for besides the experiment, `extras`, is named by its folders. If one of them was not run before, the
    rest need not be run again.
    """
    kept = not all((out / name).exists() for name in extras)
    folders = [out / "studies", *out.glob("**/units")]
    begin(out / "report.html", [Ledger(folder) for folder in folders], keep=kept)


def run_studies(recipe: Paper, out: Path, *, quick: bool, workers: int) -> dict[str, dict[str, Any]]:
    """Runs the studies that `out` does not hold yet, the timing of the solver last and alone."""
    described, ledger = {"quick": quick, "experiment": recipe.describe()}, Ledger(out / "studies")
    parts = {
        name: Part(task=(_run_study, name, recipe, quick, out), recipe=described, write=dict, read=dict)
        for name in sorted(STUDIES, key=("traces", "noise").__contains__, reverse=True)
    }
    alone = {_ALONE: parts.pop(_ALONE)}
    found = {**dict(run_parts(parts, ledger, workers, ignore)), **dict(run_parts(alone, ledger, 0, ignore))}
    return {name: found[name] for name in STUDIES}


def _run_study(name: str, recipe: Paper, quick: bool, out: Path, *, progress: Progress) -> dict[str, Any]:
    del progress
    given: dict[str, Any] = {"recipe": recipe} if name in ON_RECIPE else {}
    if name == "traces":
        paths = given["paths"] = {}
        for method in recipe.methods:
            trained = load_unit(out, f"direct-{method}", recipe)
            if trained is not None:
                with suppress(KeyError):  # the traced temperatures may not be among the runs
                    paths[method] = path_of(trained, recipe)
    return STUDIES[name](**given, quick=quick, seed=recipe.first_seed)
