# SPDX-License-Identifier: Apache-2.0
"""`report.html`: what was run, the figures, the claims with their verdicts, on one page that needs nothing else."""

import base64
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jinja2

from equipoise import __version__
from equipoise_lab._ledger import write_whole
from equipoise_lab.paper._claims import VERDICT_RULE, Claim, summarise
from equipoise_lab.paper._result_figures import quick_note
from equipoise_lab.paper._results import THRESHOLD, Result
from equipoise_lab.paper._rules import Verdict
from equipoise_lab.paper._solved import panel_tables, sweep_tables

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

# A vector image of thousands of dots is larger than the picture of it, and slower to show.
_LARGEST_SVG = 400_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A figure that is part of the page."""

    name: str  # of its file, without ending
    title: str  # above it
    caption: str  # below it
    source: str  # its data URI


def write_report(
    out: Path,
    recipe_description: Mapping[str, Any],
    results: Sequence[Result],
    claims: Sequence[Claim],
    studies: Mapping[str, Mapping[str, Any]],
    *,
    environment: Mapping[str, Any],
    command: str,
    seconds: float,
    resumed: bool = False,
) -> Path:
    """Writes the page, with the figures that are in `figures` below the folder of the command.

    In the description of the recipe, `quick` says that it was not the experiment in full. Of the studies, `sensitivity`
    and `beyond` are shown as tables, the others as figures. `resumed`: part of the work had been done before, so that
    the time is not that of all of it.
    """
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("equipoise_lab.paper"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    counts = Counter(claim.verdict for claim in claims)
    page = templates.get_template("report.html.jinja").render(
        version=__version__,
        note=quick_note(recipe_description),
        recipe=[(name.replace("_", " "), describe_value(v)) for name, v in recipe_description.items()],
        threshold=THRESHOLD,
        runs={
            "all": len(results),
            "solved": sum(run.solved for run in results),
            "diverged": sum(not math.isfinite(run.mse) for run in results),
        },
        verdicts=[(verdict, counts[verdict]) for verdict in VERDICTS if counts[verdict]],
        verdict_rule=VERDICT_RULE,
        summary=summarise(claims),
        claims=claims,
        pictures=find_pictures(out / "figures"),
        tables=panel_tables(results),
        sweeps=sweep_tables(results),
        sensitivity=studies.get("sensitivity"),
        environment=[(name, describe_value(v)) for name, v in environment.items()],
        command=command,
        beyond=studies.get("beyond"),
        duration=f"{describe_duration(seconds)}{', after parts that were there before' if resumed else ''}",
    )
    path = out / "report.html"
    write_whole(path, page)
    return path


def find_pictures(folder: Path) -> list[Picture]:
    """Finds the figures of a folder: those with a caption first, in the order of the table, then any other."""
    names = [path.stem for path in sorted(folder.glob("*.svg"))]
    captions = tomllib.loads((Path(__file__).parent / "templates" / "captions.toml").read_text(encoding="utf-8"))
    ordered = [name for name in captions if name in names] + [name for name in names if name not in captions]
    pictures: list[Picture] = []
    for name in ordered:
        # The vector image, unless it is large and there is a picture of it.
        path, kind = folder / f"{name}.svg", "svg+xml"
        if path.stat().st_size > _LARGEST_SVG and path.with_suffix(".png").exists():
            path, kind = path.with_suffix(".png"), "png"
        source = f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
        unknown = {"title": name.removeprefix("study-").replace("-", " ").capitalize(), "caption": ""}
        pictures.append(Picture(name=name, source=source, **captions.get(name, unknown)))
    return pictures


def describe_value(value: object) -> str:
    """Writes a setting for people.

    Example:
        >>> describe_value([0.01, 1.0, 100.0]), describe_value(True), describe_value(10_000)
        ('0.01, 1, 100', 'yes', '10,000')
        >>> describe_value({"torch": "2.13.0", "cores": 2})
        'torch 2.13.0, cores 2'
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {describe_value(entry)}" for name, entry in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(describe_value(entry) for entry in value)
    return str(value)


def describe_duration(seconds: float) -> str:
    """Writes a duration for people.

    Example:
        >>> describe_duration(42.3), describe_duration(754.0), describe_duration(3700.0)
        ('42 s', '12 min 34 s', '1 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
