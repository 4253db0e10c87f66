# SPDX-License-Identifier: Apache-2.0
"""How many seeds are solved: the panels and the sweeps, counted, and as tables that can be read as pictures."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from equipoise_lab._style import GREY, INK, SEQUENTIAL, new_figure, save, write_note
from equipoise_lab.paper._methods import METHOD_TABLE
from equipoise_lab.paper._recipe import METHODS
from equipoise_lab.paper._results import (
    LOSSES,
    MAIN_BALANCE_WEIGHT,
    MAIN_BASELINE,
    MAIN_LEARNING_RATE,
    VARIANTS,
    Baseline,
    Loss,
    Result,
    Variant,
    select,
    select_main,
)

_PANEL_NAMES = {"reinforce": "REINFORCE", "gating": "Gating"}
_VARIANT_NAMES = {"plain": "", "sinkhorn": ", Sinkhorn first", "no-iw": ", no importance weights"}

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


def count_solved(
    runs: Sequence[Result],
    title: str,
    varies: str,
    value: Callable[[Result], float],
    *,
    methods: Sequence[str] = METHODS,
    solved: Callable[[Result], bool] = lambda run: run.solved,
) -> SolvedTable:
    """Counts the runs that solve the task, or what else counts as `solved`, in a row for each method."""
    counts: dict[tuple[str, float], list[int]] = {}
    for run in runs:
        tally = counts.setdefault((run.method, value(run)), [0, 0])
        tally[0] += solved(run)
        tally[1] += 1
    columns = sorted({column for _, column in counts})
    rows = [[counts.get((name, column)) for column in columns] for name in methods]
    return SolvedTable(
        title=title,
        varies=varies,
        columns=tuple(columns),
        labels=tuple(METHOD_TABLE[name].label for name in methods),
        rows=tuple(tuple((cell[0], cell[1]) if cell else None for cell in row) for row in rows),
    )


def panel_tables(results: Sequence[Result]) -> list[SolvedTable]:
    """Counts solved seeds by strategy and temperature for each panel that was run; REINFORCE without a baseline too."""
    panels: list[tuple[Loss, Variant, Baseline, str]] = [
        (loss, variant, "ema", "") for loss in LOSSES for variant in VARIANTS
    ]
    panels.insert(1, ("reinforce", "plain", "none", ", no baseline"))
    tables = [
        count_solved(
            select(select_main(results, baseline=baseline), loss=loss, variant=variant),
            f"{_PANEL_NAMES[loss]}{_VARIANT_NAMES[variant]}{named}",
            "temperature",
            lambda run: run.temperature,
        )
        for loss, variant, baseline, named in panels
    ]
    return [table for table in tables if table.columns]


def sweep_tables(results: Sequence[Result]) -> list[SolvedTable]:
    """Counts solved seeds by the weight of the balance loss and by learning rate, for each temperature swept."""
    plain = select(results, variant="plain")
    tables: list[SolvedTable] = []
    for loss in LOSSES:
        runs = select(plain, loss=loss, learning_rate=MAIN_LEARNING_RATE, baseline=MAIN_BASELINE[loss])
        swept = sorted({run.temperature for run in runs if run.balance_weight != MAIN_BALANCE_WEIGHT[loss]})
        for t in swept:
            title = f"{_PANEL_NAMES[loss]}, temperature {t:g}"
            at = select(runs, temperature=t)
            tables.append(count_solved(at, title, "weight of the balance loss", lambda run: run.balance_weight))
    runs = select(plain, loss="reinforce", balance_weight=MAIN_BALANCE_WEIGHT["reinforce"], baseline="ema")
    swept = sorted({run.temperature for run in runs if run.learning_rate != MAIN_LEARNING_RATE})
    for t in swept:
        at = select(runs, temperature=t)
        tables.append(count_solved(at, f"REINFORCE, temperature {t:g}", "learning rate", lambda run: run.learning_rate))
    return tables


def draw_solved_figures(folder: Path, results: Sequence[Result], note: str) -> list[Path]:
    """Draws the panels and the sweeps, as far as they were run, as tables that can be read as pictures."""
    both = {"solved": panel_tables(results), "sweeps": sweep_tables(results)}
    drawn = {name: draw_tables(tables, 8.6, note) for name, tables in both.items() if tables}
    return [path for name, figure in drawn.items() for path in save(figure, folder, name)]


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
    axes.set(xlim=(-0.5, len(table.columns) - 0.5), ylim=(len(table.rows) - 0.5, -0.5))
    axes.set_xticks(range(len(table.columns)), [f"{value:g}" for value in table.columns], fontsize=7.5)
    axes.set_yticks(range(len(table.rows)), table.labels if labelled else [], fontsize=8)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel(table.varies, fontsize=8)
    most = max((cell[1] for row in table.rows for cell in row if cell), default=0)
    axes.set_title(table.title, fontweight="bold", fontsize=8.5)
    axes.set_title(f"of {most} seeds", loc="right", fontsize=7.5, color=GREY)
