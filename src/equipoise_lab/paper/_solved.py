# SPDX-License-Identifier: Apache-2.0
"""How many seeds are solved, counted: the panels, and the sweeps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """Counts solved seeds.

    Args:
        runs: what to count; every run is in one cell.
        title: of the table.
        varies: what the columns are.
        value: the column of a run.
        methods: the rows.
        solved: what counts.
    """
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
