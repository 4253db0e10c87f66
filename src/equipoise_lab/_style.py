# SPDX-License-Identifier: Apache-2.0
"""The look of every figure: one style, one mark for each strategy, one way to save.

Strategies differ in colour, marker and dashes, so that any one of the three tells them apart: in grey print, and for
readers who do not see all colours. Families share a hue (skip blue, Gumbel-Matching orange); what is unbiased is solid.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from equipoise.estimators import PAPER_STRATEGIES

INK = "#1a1a1a"
GREY = "#6b6b6b"
GRID = "#dddddd"
# A sequential map that is as monotone in grey as in colour.
SEQUENTIAL = "Blues"
DPI = 200

STYLE: dict[Any, Any] = {
    # Comes with matplotlib: the same widths, and so the same figure, on every machine.
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
    # Text stays text: it can be searched, and it takes the reader's font.
    "svg.fonttype": "none",
    "svg.hashsalt": "equipoise",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """How a line is drawn."""

    colour: str  # of line and marker
    marker: str  # its shape
    dashes: str | tuple[int, tuple[float, ...]] = "-"  # a line style of matplotlib
    filled: bool = True  # whether the marker is

    @property
    def line(self) -> dict[str, Any]:
        """The keywords of `Axes.plot` for a line with markers."""
        return {
            "color": self.colour,
            "linestyle": self.dashes,
            "marker": self.marker,
            "markerfacecolor": self.colour if self.filled else "white",
            "markeredgecolor": self.colour,
        }

    def dotted(self, every: int) -> dict[str, Any]:
        """Returns the keywords of `Axes.plot` for a line of many points, with a small marker at every so many."""
        return {**self.line, "markersize": 3.6, "linewidth": 1.3, "markevery": every}

    def points(self, size: float = 4.2) -> dict[str, Any]:
        """Returns the keywords of `Axes.plot` for markers of a size without a line."""
        return {**self.line, "linestyle": "", "markersize": size, "markeredgewidth": 0.9}


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """A name beside a mark: where the mark is, and how the name is written."""

    x: float
    y: float
    text: str
    colour: str
    bold: bool = False
    size: float = 9.0


LOOKS: dict[str, Look] = {
    "sample": Look(colour="#222222", marker="o"),
    "skip-iw": Look(colour="#0b4f94", marker="s"),
    "skip": Look(colour="#5b9bd0", marker="D", dashes="--", filled=False),
    "gm-iw": Look(colour="#8c2d04", marker="^"),
    "gm-sh": Look(colour="#cc6a1b", marker="v", dashes=(0, (5.0, 1.5, 1.0, 1.5)), filled=False),
    "gm": Look(colour="#d9a441", marker="X", dashes=":"),
}
_OTHER = Look(colour=GREY, marker="P", dashes=(0, (1.0, 1.0)))


def look(method: str) -> Look:
    """Finds the look of a strategy by name; one that is added later gets a grey line until it has its own.

    Example:
        >>> look("gm-iw").marker
        '^'
    """
    return LOOKS.get(method, _OTHER)


def legend_lines(marks: Iterable[tuple[str, Look]] | None = None) -> list[Line2D]:
    """Makes labelled lines for a legend that panels share; None: one for each strategy, in the order of the table."""
    pairs = ((s.label, look(name)) for name, s in PAPER_STRATEGIES.items()) if marks is None else marks
    return [Line2D([], [], label=label, **mark.line) for label, mark in pairs]


def style() -> AbstractContextManager[None]:
    """Applies the style to the figures made inside."""
    return mpl.rc_context(STYLE)


def new_figure(width: float, height: float) -> Figure:
    """Makes a figure of a size in inches, on white: the page puts it on a light card in dark mode too."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def stack(figure: Figure, *heights: float) -> list[SubFigure]:
    """Divides a figure into parts, one below the other, of relative heights."""
    return list(cast(Any, figure.subfigures(len(heights), 1, height_ratios=heights)))


def row(figure: Figure | SubFigure, columns: int, **how: Any) -> list[Axes]:
    """Makes axes side by side."""
    return list(figure.subplots(1, columns, squeeze=False, **how)[0])


def write_note(figure: Figure, note: str) -> None:
    """Writes at the top what a reader of the figure must know; nothing where that is empty."""
    if note:
        figure.suptitle(note, fontsize=9, color=GREY, x=0.995, horizontalalignment="right")


def plot_known(axes: Axes, points: Iterable[tuple[float | int, float | None]], **how: Any) -> None:
    """Draws a line through the points that have a height; none, if no point has."""
    known = [(x, y) for x, y in points if y is not None]
    if known:
        axes.plot(*zip(*known, strict=True), **how)


def name_ticks(axes: Axes, ticks: Sequence[float | int], form: str = "g") -> None:
    """Puts ticks on a logarithmic x-axis, and removes those in between, of the other axis too."""
    axes.set_xticks(ticks, [format(tick, form) for tick in ticks])
    axes.minorticks_off()


def add_grid(axes: Axes, which: str = "both") -> None:
    """Draws hairlines at the major ticks of "x", "y" or "both"."""
    axes.grid(visible=True, which="major", axis=which, color=GRID, linewidth=0.6)  # pyright: ignore[reportArgumentType]


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes a figure as SVG and PNG into a folder, the same bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    # One layout serves both. With an engine, even an idle one, matplotlib would draw everything twice for each file.
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)
    figure.set_layout_engine(None)
    with style():  # ids and text of an SVG depend on it, whoever drew the figure
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=DPI)
    return paths


def spread(heights: list[float], least: float) -> list[float]:
    """Moves sorted heights apart to at least `least`, keeping their order and the middle of every group that touches.

    Example:
        >>> spread([0.0, 0.0, 5.0], 1.0)
        [-0.5, 0.5, 5.0]
    """
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while (
            len(groups) > 1
            and _middle(groups[-1]) - _middle(groups[-2]) < least * (len(groups[-1]) + len(groups[-2])) / 2.0
        ):
            last = groups.pop()
            groups[-1] += last
    return [_middle(group) + least * (i - (len(group) - 1) / 2.0) for group in groups for i in range(len(group))]


def _middle(group: list[float]) -> float:
    return sum(group) / len(group)


def tick_seconds(seconds: float) -> str:
    """Writes a power of ten of a second on an axis.

    Example:
        >>> tick_seconds(0.01)
        '10 ms'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.999 * scale:
            return f"{seconds / scale:.0f} {unit}"
    return f"{seconds:.0e} s"


def label_column(axes: Axes, marks: Sequence[Label], column: float, height: float) -> None:
    """Writes names in a column, each as near the height of its mark as there is room, with a hairline to the mark.

    The axes have logarithmic scales and final limits, the marks are sorted by height, the names begin at `column`, and
    the height of a name is a fraction of that of the axes.
    """
    lowest, highest = (math.log10(bound) for bound in axes.get_ylim())
    least = height * (highest - lowest)
    for i, (mark, wanted) in enumerate(zip(marks, spread([math.log10(m.y) for m in marks], least), strict=True)):
        # Within the axes, with room for the names below and above.
        low, high = lowest + (i + 0.5) * least, highest - (len(marks) - i - 0.5) * least
        y = 10.0 ** min(max(wanted, low), high)
        axes.plot([mark.x, column], [mark.y, y], color=mark.colour, linewidth=0.5, alpha=0.7, zorder=1)
        font = {"color": mark.colour, "fontsize": mark.size, "fontweight": "bold" if mark.bold else "normal"}
        where: dict[str, Any] = {**font, "textcoords": "offset points", "verticalalignment": "center"}
        axes.annotate(mark.text, (column, y), (3, 0), parse_math=False, **where)  # a name may have a $
