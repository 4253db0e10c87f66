# SPDX-License-Identifier: Apache-2.0
"""How many seeds are solved: the panels and the sweeps, counted, and as tables that can be read as pictures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from equipoise_lab._style import GREY, INK, SEQUENTIAL, new_figure, write_note
from equipoise_lab.paper._methods import METHOD_TABLE
from equipoise_lab.paper._recipe import METHODS
from equipoise_lab.paper._results import (
    LOSSES,
    MAIN_BALANCE_WEIGHT,
    MAIN_BASELINE,
    MAIN_LEARNING_RATE,
    VARIANTS,
    Result,
    select,
    select_main,
)

_LOSS_NAMES = {"reinforce": "REINFORCE", "gating": "Gating"}
_VARIANT_NAMES = {"plain": "", "sinkhorn": ", Sinkhorn first", "no-iw": ", no importance weights"}
PANEL_NAMES = {(loss, variant): _LOSS_NAMES[loss] + _VARIANT_NAMES[variant] for loss in LOSSES for variant in VARIANTS}
# What varies over the columns of a table.
_COLUMN_NAMES = {
    "temperature": "temperature",
    "balance_weight": "weight of the balance loss",
    "learning_rate": "learning rate",
}

# The map's dark end swallows black figures, so only its lighter part is used, and figures turn white near its end.
_DARKEST, _WHITE_FROM = 0.8, 0.62


@dataclass(frozen=True, kw_only=True, slots=True)
class SolvedTable:
    """Solved seeds by strategy and by one number that varies."""

    title: str  # of what
    varies: str  # the name of that number
    columns: tuple[float, ...]  # its values
    labels: tuple[str, ...]  # of the rows
    # Solved and all runs for each column; None where there is none.
    rows: tuple[tuple[tuple[int, int] | None, ...], ...]


def count_solved(runs: Sequence[Result], title: str, column: str = "temperature") -> SolvedTable:
    """Counts the runs that solve the task, by method and by a column of the runs."""
    counts: dict[tuple[str, float], tuple[int, int]] = {}
    for run in runs:
        key = (run.method, getattr(run, column))
        solved, all_runs = counts.get(key, (0, 0))
        counts[key] = (solved + run.solved, all_runs + 1)
    columns = tuple(sorted({value for _, value in counts}))
    return SolvedTable(
        title=title,
        varies=_COLUMN_NAMES[column],
        columns=columns,
        labels=tuple(METHOD_TABLE[name].label for name in METHODS),
        rows=tuple(tuple(counts.get((name, value)) for value in columns) for name in METHODS),
    )


def panel_tables(results: Sequence[Result]) -> list[SolvedTable]:
    """Counts solved seeds by strategy and temperature for each panel that was run; REINFORCE without a baseline too."""
    main = select_main(results)
    panels = [(title, select(main, loss=x, variant=v)) for (x, v), title in PANEL_NAMES.items()]
    without = select(select_main(results, baseline="none"), loss="reinforce", variant="plain")
    panels.insert(1, ("REINFORCE, no baseline", without))
    return [count_solved(runs, title) for title, runs in panels if runs]


def sweep_tables(results: Sequence[Result]) -> list[SolvedTable]:
    """Counts solved seeds by the weight of the balance loss and by learning rate, for each temperature swept."""
    tables: list[SolvedTable] = []
    for column, losses in (("balance_weight", LOSSES), ("learning_rate", LOSSES[:1])):
        for loss in losses:
            main = {"balance_weight": MAIN_BALANCE_WEIGHT[loss], "learning_rate": MAIN_LEARNING_RATE}
            value = main.pop(column)
            runs = select(results, variant="plain", loss=loss, baseline=MAIN_BASELINE[loss], **main)
            for t in sorted({run.temperature for run in runs if getattr(run, column) != value}):
                title = f"{_LOSS_NAMES[loss]}, temperature {t:g}"
                tables.append(count_solved(select(runs, temperature=t), title, column))
    return tables


def draw_tables(tables: Sequence[SolvedTable], width: float, note: str) -> Figure:
    """Draws tables, two side by side."""
    across, down = min(2, len(tables)), -(-len(tables) // 2)
    height = 0.27 * max(len(table.rows) for table in tables) + 0.73
    figure = new_figure(width, height * down + 0.2)
    grid = figure.subplots(down, across, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place < len(tables):
            _draw_table(axes, tables[place], labelled=place % across == 0)
        else:
            axes.set_axis_off()
    write_note(figure, note)
    return figure


def _draw_table(axes: Axes, table: SolvedTable, *, labelled: bool) -> None:
    """Draws one cell a setting: the number of solved seeds, and the darker the more."""
    fractions = [[math.nan if cell is None else cell[0] / cell[1] for cell in row] for row in table.rows]
    edges = [[place - 0.5 for place in range(len(cells) + 1)] for cells in (table.columns, table.rows)]
    shades: dict[str, Any] = {"cmap": SEQUENTIAL, "vmin": 0.0, "vmax": 1.0 / _DARKEST}
    axes.pcolormesh(*edges, fractions, **shades, edgecolors="white", linewidth=1.5)
    known = [(x, y, *cell) for y, cells in enumerate(table.rows) for x, cell in enumerate(cells) if cell]
    for x, y, solved, runs in known:
        colour = "white" if solved >= _WHITE_FROM * runs else INK if solved else GREY
        text = axes.text(x, y, str(solved), ha="center", va="center", fontsize=7.5, color=colour)
        # It is inside the axes anyway; asking each for its extent is most of the time of the layout.
        text.set_in_layout(False)
    axes.set(xlim=(-0.5, len(table.columns) - 0.5), ylim=(len(table.rows) - 0.5, -0.5))
    axes.set_xticks(range(len(table.columns)), [f"{value:g}" for value in table.columns], fontsize=7.5)
    axes.set_yticks(range(len(table.rows)), table.labels if labelled else [], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(table.varies, fontsize=8)
    most = max((runs for *_, runs in known), default=0)
    axes.set_title(table.title, fontweight="bold", fontsize=8.5)
    axes.set_title(f"of {most} seeds", loc="right", fontsize=7.5, color=GREY)
