# SPDX-License-Identifier: Apache-2.0
"""The paper's figure 1 as numbers: expectations and samples, balanced and not, for one small router.

Legend: n = 12 rows (datapoints), k = 3 columns (experts), capacity c = 4.
"""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from equipoise.balancing import sinkhorn
from equipoise.ops import draw_gumbel
from equipoise.sampling import sample_gumbel_matching, sample_independent, sample_skip
from equipoise_lab._style import GREY, INK, SEQUENTIAL, new_figure, row
from equipoise_lab.paper._rules import Study

NUM_POINTS = 12
NUM_EXPERTS = 3
# The router favours the first expert, as routers do before anything balances them.
_PREFERENCE = (0.9, 0.0, -0.7)
_OVER = "#b3400a"


def run(*, quick: bool = False, seed: int = 0) -> dict[str, Any]:
    """Draws a router and one sample of each kind from it, all three with the same Gumbel noise; quick or not.

    Returns:
        `capacity`; `router` (p) and `sinkhorn` (p balanced in expectation), n lists of k probabilities, rows in order
        of their most probable expert; `independent` and `balanced` (Gumbel-Matching), the expert of each row; `skip`,
        the same experts as `independent` with `kept` saying which rows their experts process.

    Example:
        >>> result = run()
        >>> [result["balanced"].count(expert) for expert in range(3)]
        [4, 4, 4]
    """
    del quick
    generator = torch.Generator().manual_seed(seed)
    shape = [NUM_POINTS, NUM_EXPERTS]
    logits = 1.3 * torch.randn(shape, generator=generator, dtype=torch.float64) + torch.tensor(_PREFERENCE)
    p = logits.softmax(-1)
    best, expert = p.max(-1)
    log_p = p[(expert - best).argsort()].log()
    gumbel = draw_gumbel(shape, generator=generator, dtype=torch.float64)
    priority = torch.rand(NUM_POINTS, generator=generator, dtype=torch.float64)
    skipped = sample_skip(log_p, gumbel, priority)
    return {
        "seed": seed,
        "capacity": NUM_POINTS // NUM_EXPERTS,
        "router": log_p.exp().tolist(),
        "sinkhorn": sinkhorn(log_p, tolerance=1e-9).log_p.exp().tolist(),
        "independent": sample_independent(log_p, gumbel).z.tolist(),
        "skip": skipped.z.tolist(),
        "kept": skipped.kept.tolist(),
        "balanced": sample_gumbel_matching(log_p, gumbel).z.tolist(),
    }


def draw(study: Study) -> Figure:
    """Draws expectations and samples as matrices side by side, with the sum of each column below."""
    figure = new_figure(7.6, 3.4)
    panels = row(figure, 5)
    capacity, rows = study["capacity"], len(study["router"])
    _draw_matrix(panels[0], study["router"], "router\nprobabilities", capacity, percent=True)
    _draw_matrix(panels[1], study["sinkhorn"], "Sinkhorn\nexpectations", capacity, percent=True)
    for axes, name, title in (
        (panels[2], "independent", "independent\nsample"),
        (panels[3], "skip", "the same,\nrest skipped"),
        (panels[4], "balanced", "Gumbel-Matching\nsample"),
    ):
        kept = study["kept"] if name == "skip" else [True] * rows
        drawn = list(zip(study[name], kept, strict=True))
        matrix = [[float(expert == j and stays) for j in range(NUM_EXPERTS)] for expert, stays in drawn]
        skipped = [(i, expert) for i, (expert, stays) in enumerate(drawn) if not stays]
        _draw_matrix(axes, matrix, title, capacity, skipped=skipped)
    panels[0].set_ylabel(f"{rows} datapoints")
    below = (
        f"Three experts of capacity {capacity}; below each column its sum, framed where it exceeds the capacity.\n"
        "Probabilities in percent. Crossed out: drawn, but skipped. The samples share their noise."
    )
    figure.supxlabel(below, fontsize=8, color=GREY)
    return figure


def _draw_matrix(
    axes: Axes,
    matrix: Sequence[Sequence[float]],
    title: str,
    capacity: int,
    *,
    percent: bool = False,
    skipped: Sequence[tuple[int, int]] = (),
) -> None:
    """Draws a cell for each pair, the darker the more, and the sum below each column, framed if beyond capacity."""
    shades, rows = mpl.colormaps[SEQUENTIAL], len(matrix)
    for i, values in enumerate(matrix):
        for j, value in enumerate(values):
            shade = shades(0.3 if (i, j) in skipped else 0.04 + 0.9 * value)
            axes.add_patch(Rectangle((j, i), 0.92, 0.88, facecolor=shade, linewidth=0))
            if percent:
                colour = "white" if value > 0.55 else INK
                text = f"{100 * value:.0f}"
                axes.text(j + 0.46, i + 0.46, text, fontsize=6.5, color=colour, ha="center", va="center")
    for i, j in skipped:
        for y in ((i + 0.14, i + 0.74), (i + 0.74, i + 0.14)):
            axes.plot([j + 0.28, j + 0.64], y, color=INK, linewidth=0.9)
    for j, total in enumerate(sum(column) for column in zip(*matrix, strict=True)):
        if total > capacity + 1e-6:
            axes.add_patch(Rectangle((j + 0.04, rows + 0.2), 0.84, 0.86, fill=False, edgecolor=_OVER, linewidth=1.2))
        text = f"{total:.1f}" if percent else f"{total:.0f}"
        axes.text(j + 0.46, rows + 0.64, text, ha="center", va="center", fontsize=8)
    axes.set(xlim=(-0.1, 3.02), ylim=(rows + 1.1, -0.1), aspect=0.62, xticks=[], yticks=[])
    axes.set_title(title, loc="center", fontsize=8.5)
    axes.spines[:].set_visible(False)
