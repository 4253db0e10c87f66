# SPDX-License-Identifier: Apache-2.0
"""Figures of the experiment beyond the paper: solved seeds against temperature, and the whole table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from equipoise_lab._style import INK, Look, add_grid, new_figure, row, save, style, write_note
from equipoise_lab.paper._beyond import COMPARED, SLACKENED, TIGHT, beyond_tables
from equipoise_lab.paper._recipe import Paper
from equipoise_lab.paper._results import read_results
from equipoise_lab.paper._solved import draw_tables

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


def draw_beyond_figures(out: Path, study: Mapping[str, Any], recipe: Paper, note: str) -> list[Path]:
    """Draws both figures of what is in `beyond` of a folder into its `figures`.

    Returns:
        The files written: SVG and PNG of `beyond` and `beyond-solved`.
    """
    results = read_results(out / "beyond" / "results.csv")
    with style():
        paths = save(_draw_lines(study, note), out / "figures", "beyond")
        tables = draw_tables(beyond_tables(results, recipe), 11.0, note)
        return paths + save(tables, out / "figures", "beyond-solved")


def _draw_lines(study: Mapping[str, Any], note: str) -> Figure:
    figure = new_figure(10.8, 4.6)
    panels = row(figure, 2, sharey=True)
    by_name = {entry["method"]: entry for entry in study["rows"]}
    for axes, (key, title) in zip(panels, _PANELS, strict=True):
        for name, look in _LOOKS.items():
            entry, above = by_name[name], 2.0 if name in COMPARED else 4.0 if name == TIGHT else 3.0
            axes.plot(study["temperatures"], entry[key], label=entry["label"], zorder=above, **look.line)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(ylim=(-0.02 * study["seeds"], 1.04 * study["seeds"]), xlabel="temperature of the proposal")
        axes.set_title(title, fontweight="bold", color=INK)
        add_grid(axes)
    panels[0].set_ylabel(f"solved seeds of {study['seeds']}")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    write_note(figure, note)
    return figure
