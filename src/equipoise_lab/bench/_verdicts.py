# SPDX-License-Identifier: Apache-2.0
"""What measurements say: ratios, their verdicts against stated limits, and the table of those."""

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace

from rich.table import Table
from rich.text import Text

from equipoise_lab._tables import format_seconds, new_table
from equipoise_lab.bench._benchmark import Measurement, Records, Size

_WORDS = {True: ("pass", "green"), False: ("FAIL", "bold red")}


def record_of(records: Records, key: str) -> Measurement:
    """A measurement; one that says so where it was not made."""
    return records.get(key, Measurement(status="skipped", note="not measured"))


def ratio(figure: float | None, other: float | None) -> float | None:
    """Divides a figure by another, where both were measured."""
    return figure / other if figure is not None and other else None


def over_budget(
    budget: float, keys: Mapping[Size, str], size: Size, growth: tuple[float, float], records: Records
) -> str:
    """Says that a call would take too long, if the last smaller size that was measured suggests it.

    Args:
        budget: seconds that one call may take.
        keys: of the measurements, by size n x k, in order.
        size: one of them.
        growth: exponents of n and k in what time is proportional to.
        records: what was measured.
    """
    expected = 0.0
    for (n, k), key in keys.items():
        if (n, k) == size:
            break
        if (seconds := record_of(records, key).seconds) is not None:
            expected = seconds * (size[0] / n) ** growth[0] * (size[1] / k) ** growth[1]
    return f"about {expected:,.1f} s expected, budget {budget:g} s" if expected > budget else ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure against its limit."""

    group: str  # of the limits: "size", "family", "behaviour", ...
    title: str  # what was measured
    figure: float | None  # what came out; None when it was not measured
    limit: float
    _: KW_ONLY
    at_least: bool = False  # whether larger is better
    unit: str = "x"  # "x" for a ratio, "s" for seconds
    passed: bool | None = None  # None when the figure is missing, or the limits are not stated for such a run
    note: str = ""  # why there is no figure, or what to know about it


def judge(verdicts: Iterable[Verdict], *, when: bool = True) -> list[Verdict]:
    """Says of each verdict with a figure whether it passed, if the limits are stated for such a run."""
    return [
        replace(v, passed=_holds(v.figure, v.limit, v.at_least)) if when and v.figure is not None else v
        for v in verdicts
    ]


def worst_of(figures: Mapping[str, float | None]) -> tuple[str, float | None]:
    """The largest figure and its name; no name where nothing was measured."""
    known = {name: figure for name, figure in figures.items() if figure is not None}
    worst = max(known, key=known.__getitem__, default="")
    return worst, known.get(worst)


def limit_table(
    verdicts: Iterable[Verdict], *, title: str = "Limits", unjudged: str = "-", notes: bool = False
) -> Table:
    """Lists verdicts.

    Args:
        verdicts: what to list.
        title: of the table.
        unjudged: the word where nothing was judged.
        notes: whether notes have a column of their own; else they stand in for a missing figure.
    """
    table = new_table(title, ["what"], ["measured", "limit", "verdict", *(["note"] if notes else [])])
    for verdict in verdicts:
        missing = "-" if notes else verdict.note or "-"
        figure = missing if verdict.figure is None else _quantity(verdict.figure, verdict.unit)
        limit = f"{'>=' if verdict.at_least else '<='} {_quantity(verdict.limit, verdict.unit)}"
        word = Text(unjudged, "dim") if verdict.passed is None else Text(*_WORDS[verdict.passed])
        table.add_row(verdict.title, figure, limit, word, *([verdict.note] if notes else []))
    return table


def ratio_text(figure: float | None, form: str, limit: float | None = None, *, at_least: bool = False) -> Text:
    """Writes a figure for a table, coloured where there is a limit; a dim dash where there is no figure."""
    if figure is None:
        return Text("-", style="dim")
    return Text(format(figure, form), style="" if limit is None else _WORDS[_holds(figure, limit, at_least)][1])


def _holds(figure: float, limit: float, at_least: bool) -> bool:
    return figure >= limit if at_least else figure <= limit


def _quantity(figure: float, unit: str) -> str:
    if unit == "s":
        return format_seconds(figure)
    return f"{figure:.3g}" if unit == "x" else f"{figure:.1e}"
