# SPDX-License-Identifier: Apache-2.0
"""The toy experiment with what the paper does not have: bounded weights, slack, averaged conditionals, a critic.

Trained, judged by two goals, and drawn. No setting of what is compared was chosen on these seeds.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from equipoise_lab._ledger import write_whole
from equipoise_lab._style import INK, Look, add_grid, new_figure, row, save, style, write_note
from equipoise_lab._tasks import Progress
from equipoise_lab.paper._methods import BEYOND, METHOD_TABLE
from equipoise_lab.paper._recipe import Paper
from equipoise_lab.paper._results import Result
from equipoise_lab.paper._runner import run_units
from equipoise_lab.paper._solved import SolvedTable, draw_tables

# What the paper has, to compare with: no capacity; skipping; balanced sampling.
COMPARED = ("sample", "skip-iw", "gm-iw")
# The strategies that the two goals are about, named before these seeds were run.
TIGHT, SLACKENED = "gm-iw-mix-critic", "gm-iw-mix-critic-slack"
# How far the seeds are from those of the paper's experiment: none of theirs is among these, nor is a dataset.
_FURTHER = 1000
# The goals speak of these temperatures, and of 38 seeds in 40.
_LOWEST, _HIGHEST, _ENOUGH = 0.03, 30.0, 0.95
# The paper's in grey, ours in colour.
_LOOKS = {
    "sample": Look(colour="#3d3d3d", marker="o"),
    "skip-iw": Look(colour="#7a7a7a", marker="s", dashes="--"),
    "gm-iw": Look(colour="#a3a3a3", marker="^", dashes=":"),
    "skip-iw-mix-critic": Look(colour="#0b4f94", marker="D", dashes="--", filled=False),
    "gm-iw-mix": Look(colour="#cc6a1b", marker="v", dashes=(0, (5.0, 1.5, 1.0, 1.5)), filled=False),
    TIGHT: Look(colour="#8c2d04", marker="P"),
    SLACKENED: Look(colour="#1a6b3c", marker="X"),
}
_PANELS = (("solved", "Error of the argmax expert"), ("solved_expected", "Error in expectation under the router"))


def beyond_recipe(recipe: Paper) -> Paper:
    """Makes the experiment that goes with one of the paper: REINFORCE alone, other seeds, a dataset for each.

    Example:
        >>> beyond_recipe(Paper()).seed_range
        range(2000, 2040)
    """
    return replace(
        recipe,
        methods=(*COMPARED, *BEYOND),
        losses=("reinforce",),
        variants=("plain",),
        seeds=recipe.panel_seeds,
        first_seed=recipe.first_seed + _FURTHER,
        dataset="per-seed",
        baselines=("ema",),
        sweeps=(),
    )


def compare_paired(ours: Sequence[bool], theirs: Sequence[bool]) -> tuple[float, float, float]:
    """Estimates the difference of two success rates on the same seeds, and the ends of its 95% confidence interval.

    Wald's interval after half a seed is added to each of the four outcomes, which keeps it honest at small numbers
    (Agresti and Min, Simple improved confidence intervals for comparing matched proportions, 2005).

    Example:
        >>> compare_paired([True] * 9 + [False], [True] * 8 + [False] * 2)[0]
        0.1
    """
    n = len(ours)
    gained = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    lost = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    up, down, total = gained + 0.5, lost + 0.5, n + 2
    middle = (up - down) / total
    half = 1.96 * math.sqrt(up + down - (up - down) ** 2 / total) / total
    return round((gained - lost) / n, 12), middle - half, middle + half


def run_beyond(recipe: Paper, out: Path, *, workers: int, advance: Progress) -> dict[str, Any]:
    """Trains the runs of `beyond_recipe` that the folder does not hold yet, and judges the goals.

    Returns:
        What `beyond.json` holds: `seeds`, `first_seed`, `threshold`, `temperatures`, `rows` (for each method the solved
        seeds by temperature, of the argmax expert and in expectation), `best` (Sample's), `goals`.
    """
    folder = out / "beyond"
    results = run_units(recipe, folder, workers=workers, progress=advance)
    study = judge_beyond(results, recipe)
    write_whole(folder / "beyond.json", json.dumps(study, indent=1))
    return study


def judge_beyond(results: Sequence[Result], recipe: Paper) -> dict[str, Any]:
    """Counts solved seeds, and judges the goals by rule."""
    runs: dict[tuple[str, float], list[Result]] = {}
    for run in sorted(results, key=attrgetter("seed")):
        runs.setdefault((run.method, run.temperature), []).append(run)
    below, temperatures = recipe.threshold, recipe.temperatures
    rows: list[dict[str, Any]] = [
        {
            "method": name,
            "label": METHOD_TABLE[name].label,
            "capacity_factor": METHOD_TABLE[name].capacity_factor,
            "solved": [sum(run.mse < below for run in runs[name, t]) for t in temperatures],
            "solved_expected": [sum(run.mse_expected < below for run in runs[name, t]) for t in temperatures],
        }
        for name in recipe.methods
    ]
    of_sample = rows[recipe.methods.index("sample")]["solved"]
    best = temperatures[of_sample.index(max(of_sample))]
    theirs = [run.solved for run in runs["sample", best]]
    against: dict[str, list[dict[str, float]]] = {name: [] for name in recipe.methods if name != "sample"}
    for name, pairs in against.items():
        for t in (t for t in temperatures if _LOWEST <= t <= _HIGHEST):
            ours = [run.solved for run in runs[name, t]]
            difference, low, high = compare_paired(ours, theirs)
            counted = {"temperature": t, "solved": sum(ours)}
            pairs.append(counted | {"difference": difference, "low": low, "high": high})
    return {
        "seeds": recipe.seeds,
        "first_seed": recipe.first_seed,
        "threshold": recipe.threshold,
        "temperatures": list(recipe.temperatures),
        "rows": rows,
        "best": {"temperature": best, "solved": max(of_sample)},
        "against": against,
        "goals": [_judge_tight(against[TIGHT]), _judge_slack(against[SLACKENED], recipe.seeds)],
    }


def _judge_tight(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    worst = min(pairs, key=lambda pair: pair["difference"])
    return {
        "goal": (
            f"{METHOD_TABLE[TIGHT].label}, exactly balanced and unbiased at tight capacity: at every temperature from "
            f"{_LOWEST:g} to {_HIGHEST:g} not below Sample, which has no capacity, at Sample's best temperature"
        ),
        "holds": all(pair["difference"] >= 0 for pair in pairs),
        "measured": (
            f"solved {min(p['solved'] for p in pairs)} to {max(p['solved'] for p in pairs)} seeds; at its worst "
            f"temperature, {worst['temperature']:g}, a difference of {worst['difference']:+.3f} (95% interval "
            f"{worst['low']:+.3f} to {worst['high']:+.3f}) of the seeds"
        ),
    }


def _judge_slack(pairs: Sequence[Mapping[str, Any]], seeds: int) -> dict[str, Any]:
    enough = math.ceil(_ENOUGH * seeds)
    least = min(pairs, key=lambda pair: pair["solved"])
    return {
        "goal": (
            f"{METHOD_TABLE[SLACKENED].label}: with capacity 1.25 at least {enough} of {seeds} seeds at every "
            f"temperature from {_LOWEST:g} to {_HIGHEST:g}"
        ),
        "holds": all(pair["solved"] >= enough for pair in pairs),
        "measured": f"solved at least {least['solved']} of {seeds} (temperature {least['temperature']:g})",
    }


def draw_beyond_figures(folder: Path, study: Mapping[str, Any], note: str) -> list[Path]:
    """Draws the figures `beyond` and `beyond-solved` of what `run_beyond` returned."""
    tables = [
        SolvedTable(
            title=title,
            varies="temperature",
            columns=tuple(study["temperatures"]),
            labels=tuple(entry["label"] for entry in study["rows"]),
            rows=tuple(tuple((count, study["seeds"]) for count in entry[key]) for entry in study["rows"]),
        )
        for key, title in (("solved", "Argmax expert"), ("solved_expected", "In expectation"))
    ]
    with style():
        paths = save(_draw_lines(study, note), folder, "beyond")
        return paths + save(draw_tables(tables, 11.0, note), folder, "beyond-solved")


def _draw_lines(study: Mapping[str, Any], note: str) -> Figure:
    figure = new_figure(10.8, 4.6)
    panels = row(figure, 2, sharey=True)
    by_name = {entry["method"]: entry for entry in study["rows"]}
    for axes, (key, title) in zip(panels, _PANELS, strict=True):
        for name, look in _LOOKS.items():
            entry, above = by_name[name], 2.0 if name in COMPARED else 4.0 if name == TIGHT else 3.0
            axes.plot(study["temperatures"], entry[key], label=entry["label"], zorder=above, **look.line)
        limits = (-0.02 * study["seeds"], 1.04 * study["seeds"])
        axes.set(xscale="log", ylim=limits, xlabel="temperature of the proposal")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(title, fontweight="bold", color=INK)
        add_grid(axes)
    panels[0].set_ylabel(f"solved seeds of {study['seeds']}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    write_note(figure, note)
    return figure
