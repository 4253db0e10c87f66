# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the concept pages, from real assignments.

python docs/_tools/pictures.py
"""

from pathlib import Path

import torch

import equipoise as eq
from equipoise_lab._style import GREY, new_figure, row, style

PAGES = Path(__file__).parents[1]
BUSY, CALM = "#8c2d04", "#0b4f94"


def draw_problem() -> None:
    """Loads of eight experts in three cases: unlimited, dropped beyond the capacity, balanced exactly."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(256, 8, generator=generator) + torch.linspace(1.2, -1.2, 8)
    capacity = 32
    wanted = logits.argmax(-1).bincount(minlength=8)
    a = eq.assign(logits)
    dropped = int((wanted - capacity).clamp_min(0).sum())
    moved = int((a.z != logits.argmax(-1)).sum())
    with style():
        figure = new_figure(9.0, 2.9)
        left, middle, right = row(figure, 3, sharey=True)
        left.bar(range(8), wanted, color=GREY, width=0.75)
        left.set_title("each row takes its favourite:\nno hardware has room for that")
        middle.bar(range(8), wanted.clamp_max(capacity), color=CALM, width=0.75)
        over = (wanted - capacity).clamp_min(0)
        hatched = {"facecolor": "none", "edgecolor": BUSY, "hatch": "////", "linewidth": 0.8}
        middle.bar(range(8), over, bottom=capacity, width=0.75, **hatched)
        middle.set_title(f"beyond the capacity, rows are dropped:\n{dropped} of 256, and slots stay empty")
        right.bar(range(8), a.counts, color=CALM, width=0.75)
        right.set_title(f"the best balanced assignment: {moved} rows\nmove, none is dropped, no slot is empty")
        for axes in (left, middle, right):
            axes.axhline(capacity, color="#1a1a1a", linewidth=0.9, linestyle="--")
            axes.set(xlabel="expert", xticks=range(8))
        left.set_ylabel("rows")
        left.text(7.5, capacity + 1.5, "capacity", ha="right")
        figure.savefig(PAGES / "concepts" / "problem.png", dpi=170)


if __name__ == "__main__":
    draw_problem()
