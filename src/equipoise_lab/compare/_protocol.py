# SPDX-License-Identifier: Apache-2.0
"""What the comparisons share: figures of a contender over seeds, paired differences, and how both are shown."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table
from scipy import stats  # scikit-learn, whose digits are compared on, comes with it

from equipoise_lab._style import GREY, Look
from equipoise_lab._tables import new_table

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedLosses:
    """A contender at the setting that did best on the validation split."""

    contender: str  # its name
    setting: Any  # the chosen one
    loss: tuple[float, ...]  # on the test split, one for each seed
    curve: tuple[tuple[int, float], ...]  # the validation loss, averaged over seeds; pairs of step and loss

    @property
    def mean(self) -> float:
        """The mean test loss over seeds."""
        return statistics.fmean(self.loss)

    @property
    def spread(self) -> float:
        """The standard deviation of the test loss between seeds."""
        return statistics.stdev(self.loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """The test loss of one contender minus that of another, paired by seed."""

    ours: str  # a contender's name
    other: str  # another's
    mean: float  # below 0 where the first is better
    low: float  # of the confidence interval, Student's t over the seeds
    high: float  # of it
    spread: float  # the larger of the two standard deviations between seeds

    @property
    def better(self) -> bool:
        """Whether the first is better by more than the spread between seeds, and the interval leaves 0 out."""
        return self.mean < -self.spread and self.high < 0

    @property
    def interval(self) -> str:
        """The interval in words."""
        return f"{self.low:+.3f} to {self.high:+.3f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """What a comparison found."""

    outcomes: Sequence[SeedLosses]  # of the contenders
    tables: list[Table]  # what to show on a terminal
    paths: list[Path]  # the files that were written


def paired(ours: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Compares losses seed by seed.

    Returns:
        The numbers of a `PairedDifference`.

    Example:
        >>> round(paired([1.0, 2.0, 3.0], [1.1, 2.2, 3.3])["mean"], 3)
        -0.2
    """
    pairs = [a - b for a, b in zip(ours, other, strict=True)]
    mean, n = statistics.fmean(pairs), len(pairs)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * statistics.stdev(pairs) / math.sqrt(n)
    spread = max(statistics.stdev(ours), statistics.stdev(other))
    return {"mean": mean, "low": mean - half, "high": mean + half, "spread": spread}


def difference_table(rows: Iterable[tuple[str, str, str, PairedDifference]], *, condition: str) -> Table:
    """Lists paired differences: the labels of the two, the condition that they were evaluated under, and what it is."""
    title = f"Differences of the test loss, seeds paired, {CONFIDENCE:.0%} interval"
    table = new_table(title, ["", "minus", condition], ["difference", "interval"], title_justify="left")
    table.add_column("beyond the spread")
    for first, second, where, d in rows:
        table.add_row(first, second, where, f"{d.mean:+.3f}", d.interval, "better" if d.better else "no")
    return table


def draw_seeds(axes: Axes, place: int, outcome: SeedLosses, look: Look, size: float) -> None:
    """Draws a mark of a size for each seed in the line of a contender, and a bar at their mean."""
    axes.plot(outcome.loss, [place] * len(outcome.loss), **look.points(size))
    axes.plot([outcome.mean] * 2, [place - 0.3, place + 0.3], color=look.colour, linewidth=1.6)


def set_lines(axes: Axes, labels: Sequence[str]) -> None:
    """Names the lines of contenders, from below."""
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, len(labels) - 0.4)
    axes.spines["left"].set_color(GREY)
