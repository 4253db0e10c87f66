# SPDX-License-Identifier: Apache-2.0
"""How many seeds are solved, as tables that can be read as pictures: the panels, and the sweeps."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from equipoise_lab._style import GREY, INK, SEQUENTIAL, new_figure, save
from equipoise_lab.paper._results import Result
from equipoise_lab.paper._solved import SolvedTable, panel_tables, sweep_tables

# The map's dark end swallows black figures, so only its lighter part is used, and figures turn white near its end.
_DARKEST, _WHITE_FROM = 0.8, 0.62


def draw_solved_figures(folder: Path, results: Sequence[Result], note: str) -> list[Path]:
    """Draws both kinds of tables, as far as they were run."""
    paths: list[Path] = []
    for name, tables, across, width in (
        ("solved", panel_tables(results), 2, 8.6),
        ("sweeps", sweep_tables(results), 2, 8.6),
    ):
        if tables:
            paths += save(draw_tables(tables, across, width, note), folder, name)
    return paths


def draw_tables(tables: Sequence[SolvedTable], across: int, width: float, note: str) -> Figure:
    """Draws tables side by side."""
    down = -(-len(tables) // across)
    across = min(across, len(tables))
    height = 0.27 * max(len(table.rows) for table in tables) + 0.73
    figure = new_figure(width, height * down + 0.2)
    grid = figure.subplots(down, across, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place < len(tables):
            _draw_table(axes, tables[place], labelled=place % across == 0)
        else:
            axes.set_axis_off()
    if note:
        figure.suptitle(note, fontsize=9, color=GREY, x=0.995, horizontalalignment="right")
    return figure


def _draw_table(axes: Axes, table: SolvedTable, *, labelled: bool) -> None:
    """Draws one cell a setting: the number of solved seeds, and the darker the more."""
    fractions = [[math.nan if cell is None else cell[0] / cell[1] for cell in row] for row in table.rows]
    axes.pcolormesh(
        [column - 0.5 for column in range(len(table.columns) + 1)],
        [row - 0.5 for row in range(len(table.rows) + 1)],
        fractions,
        cmap=SEQUENTIAL,
        vmin=0.0,
        vmax=1.0 / _DARKEST,
        edgecolors="white",
        linewidth=1.5,
    )
    for row, cells in enumerate(table.rows):
        for column, cell in enumerate(cells):
            if cell is not None:
                colour = "white" if cell[0] >= _WHITE_FROM * cell[1] else INK if cell[0] else GREY
                text = axes.text(column, row, str(cell[0]), ha="center", va="center", fontsize=7.5, color=colour)
                # It is inside the axes anyway; asking each for its extent is most of the time of the layout.
                text.set_in_layout(False)
    axes.set_xlim(-0.5, len(table.columns) - 0.5)
    axes.set_ylim(len(table.rows) - 0.5, -0.5)
    axes.set_xticks(range(len(table.columns)), [f"{value:g}" for value in table.columns], fontsize=7.5)
    axes.set_yticks(range(len(table.rows)), table.labels if labelled else [], fontsize=8)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel(table.varies, fontsize=8)
    most = max((cell[1] for row in table.rows for cell in row if cell), default=0)
    axes.set_title(table.title, fontweight="bold", fontsize=8.5)
    axes.set_title(f"of {most} seeds", loc="right", fontsize=7.5, color=GREY)
