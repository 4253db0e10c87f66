# SPDX-License-Identifier: Apache-2.0
"""Figures held against stated limits, and the table that shows them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rich.table import Table
from rich.text import Text

from equipoise_lab._tables import format_seconds, new_table

_WORDS = {True: ("pass", "green"), False: ("FAIL", "bold red")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A figure against its limit.

    Attributes:
        group: "size", "family" or "behaviour".
        title: what was measured.
        figure: what came out; None when it was not measured.
        limit: what it is held against.
        at_least: True when larger is better.
        unit: "x" for a ratio, "s" for seconds.
        passed: None when the figure is missing or the run is not one that the limits are stated for.
        note: why there is no figure, or what to know about it.
    """

    group: str
    title: str
    figure: float | None
    limit: float
    at_least: bool = False
    unit: str = "x"
    passed: bool | None = None
    note: str = ""

    def judged(self) -> "Verdict":
        """Returns the verdict with `passed` set, where there is a figure."""
        if self.figure is None:
            return self
        return replace(self, passed=self.figure >= self.limit if self.at_least else self.figure <= self.limit)


def limit_table(
    verdicts: Iterable[Verdict], *, title: str = "Limits", unjudged: str = "-", notes: bool = False
) -> Table:
    """Lists verdicts.

    Args:
        verdicts: what to list.
        title: of the table.
        unjudged: the word where nothing was judged.
        notes: whether notes have a column of their own; else they stand in for a missing figure.

    Returns:
        The table.
    """
    table = new_table(title, ["what"], ["measured", "limit", "verdict", *(["note"] if notes else [])])
    for verdict in verdicts:
        missing = "-" if notes else verdict.note or "-"
        figure = missing if verdict.figure is None else _quantity(verdict.figure, verdict.unit)
        limit = f"{'>=' if verdict.at_least else '<='} {_quantity(verdict.limit, verdict.unit)}"
        word = judged_text(unjudged, None) if verdict.passed is None else Text(*_WORDS[verdict.passed])
        table.add_row(verdict.title, figure, limit, word, *([verdict.note] if notes else []))
    return table


def judged_text(text: str, passed: bool | None) -> Text:
    """Colours what was held against a limit; dim where it was not."""
    return Text(text, style="dim" if passed is None else _WORDS[passed][1])


def _quantity(figure: float, unit: str) -> str:
    if unit == "s":
        return format_seconds(figure)
    return f"{figure:.3g}" if unit == "x" else f"{figure:.1e}"
