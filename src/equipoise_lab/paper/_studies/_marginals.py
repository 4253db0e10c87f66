# SPDX-License-Identifier: Apache-2.0
"""How near Sinkhorn's expectations are to the marginals that they stand in for (section 2.3 of the paper).

Three matrices for the same logits: Sinkhorn's expectations, the marginals of Gumbel-Matching, and those of the Gibbs
distribution (eq. 5). The first and the last are computed exactly. Gumbel-Matching has no closed form, so its marginals
are means over draws of the exact conditionals q(z_i | G_-i) of eq. (9): the expectation is the same as that of counting
how often z_i = j, the variance is that of the conditional alone.

Logits at temperature 1 are standard normal. A temperature tau divides them by tau, so that a spread sd of the logits
stands for the temperature 1 / sd.

Legend: n rows (datapoints), k columns (experts), m matrices of logits, s spreads.
"""

import math
import statistics
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import Tensor

from equipoise import reference
from equipoise.balancing import sinkhorn
from equipoise.ops import draw_gumbel
from equipoise.sampling import sample_gumbel_matching
from equipoise_lab._style import GREY, Look, add_grid, new_figure, row, stack
from equipoise_lab.paper._rules import Part, Study, decided, finite

SIZES = ((2, 2), (4, 2), (8, 2), (16, 2), (32, 2), (4, 4), (8, 4), (16, 4), (32, 4), (8, 8), (16, 8))
QUICK_SIZES = ((2, 2), (4, 2), (8, 2), (16, 2), (4, 4), (8, 4))
PAIRS = (
    ("sinkhorn", "gumbel_matching"),
    ("sinkhorn", "gibbs"),
    ("gumbel_matching", "gibbs"),
    ("unbalanced", "gumbel_matching"),
    ("unbalanced", "gibbs"),
)
# The sizes and the spread whose entries are kept, for a picture.
SHOWN_SIZES = ((2, 2), (4, 2), (16, 2))
SHOWN_SD = 2.0
# Draws that are solved at once: bounds the memory, changes nothing else.
_CHUNK = 1024
# The standard deviation of the logits at temperature 1, and "closely": this part of the distance of the router's own p.
_AT_ONE, _CLOSE = 1.0, 0.25
_MATCHING = Look(colour="#8c2d04", marker="^")
_GIBBS = Look(colour="#0b4f94", marker="o", filled=False, dashes="--")
_LINES = (
    ("unbalanced_vs_gumbel_matching", "router's p, Gumbel-Matching", Look(colour=GREY, marker="x", dashes=":")),
    ("sinkhorn_vs_gibbs", "Sinkhorn, Gibbs", _GIBBS),
    ("sinkhorn_vs_gumbel_matching", "Sinkhorn, Gumbel-Matching", _MATCHING),
)


def run(*, quick: bool = False, seed: int = 0) -> dict[str, Any]:
    """Compares the kinds of marginals over sizes, spreads of the logits, and random matrices.

    Returns:
        `sizes`, one record for each (n, k) with all spreads together, and `rows`, the same for each spread `sd`. A
        record has `n`, `k`, `problems`, `draws` and, for each pair of `PAIRS`, the mean absolute difference `<pair>`
        over entries and problems, `<pair>_se` (its standard error over problems), `<pair>_max`, and `<pair>_rms`, from
        which the noise of the draws is taken out (0 where nothing is left). "unbalanced" is the router's own p, as a
        yardstick. `standard_error` and `max_standard_error` are the mean and the largest over entries of the estimated
        Gumbel-Matching marginals; `counting_standard_error` is the mean of what counting would have had. `points` holds
        [Sinkhorn, Gumbel-Matching, Gibbs] of every entry at the sizes and the spread that the figure shows.
    """
    sds = (1.0, 2.0) if quick else (0.5, 1.0, 2.0, 4.0)
    matrices, draws = (4, 1024) if quick else (6, 8192)
    generator = torch.Generator().manual_seed(seed)
    sizes: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    for n, k in QUICK_SIZES if quick else SIZES:
        scale = torch.tensor(sds, dtype=torch.float64)[:, None, None, None]
        logits = scale * torch.randn(len(sds), matrices, n, k, dtype=torch.float64, generator=generator)
        size = {"n": n, "k": k, "draws": draws * max(8 // n, 1)}
        matching, error, counting = gumbel_matching_marginals(logits, size["draws"], generator)
        gibbs = [reference.gibbs_log_marginals(a).exp() for a in logits.flatten(0, 1)]
        kinds = {
            "unbalanced": logits.softmax(-1),
            "sinkhorn": sinkhorn(logits, tolerance=1e-9).log_p.exp(),
            "gibbs": torch.stack(gibbs).reshape(logits.shape),
            "gumbel_matching": matching,
            "error": error,
            "counting": counting,
        }
        sizes.append(size | differences({name: kind.flatten(0, 1) for name, kind in kinds.items()}))
        for s, sd in enumerate(sds):
            rows.append(size | {"sd": sd} | differences({name: kind[s] for name, kind in kinds.items()}))
        if (n, k) in SHOWN_SIZES:
            shown = [kinds[name][sds.index(SHOWN_SD)].flatten() for name in ("sinkhorn", "gumbel_matching", "gibbs")]
            points.append({"n": n, "k": k, "sd": SHOWN_SD, "entries": torch.stack(shown, -1).tolist()})
    return {"quick": quick, "seed": seed, "sds": list(sds), "sizes": sizes, "rows": rows, "points": points}


def gumbel_matching_marginals(
    logits: Float[Tensor, "*m n k"], draws: int, generator: torch.Generator
) -> tuple[Float[Tensor, "*m n k"], Float[Tensor, "*m n k"], Float[Tensor, "*m n k"]]:
    """Estimates P(z_i = j) under Gumbel-Matching by averaging the exact conditionals over draws.

    Unbiased, because E[q(z_i = j | G_-i)] = P(z_i = j); by the law of total variance never worse than counting.

    Returns:
        The estimate, its standard error, and the standard error that counting z_i = j would have.

    Example:
        >>> logits = torch.zeros(1, 4, 2, dtype=torch.float64)
        >>> p, error, counting = gumbel_matching_marginals(logits, 200, torch.Generator().manual_seed(0))
        >>> bool(((p - 0.5).abs() < 6 * error).all()), bool((error < counting).all())
        (True, True)
    """
    total, squares = torch.zeros_like(logits), torch.zeros_like(logits)
    for start in range(0, draws, _CHUNK):
        shape = [min(_CHUNK, draws - start), *logits.shape]
        noise = draw_gumbel(shape, generator=generator, dtype=logits.dtype)
        q = sample_gumbel_matching(logits.expand(shape), noise).log_q.exp()
        total += q.sum(0)
        squares += q.square().sum(0)
    mean = total / draws
    variance = (squares / draws - mean.square()).clamp_min(0.0) * (draws / (draws - 1))
    return mean, (variance / draws).sqrt(), (mean * (1.0 - mean) / draws).clamp_min(0.0).sqrt()


def differences(kinds: dict[str, Float[Tensor, "m n k"]]) -> dict[str, Any]:
    """Summarises how far the kinds of marginals are apart, as `run` documents it.

    Args:
        kinds: "unbalanced" (the router's), "sinkhorn", "gibbs", "gumbel_matching", and the standard errors of the last:
            of the estimate ("error") and of counting ("counting").
    """
    record: dict[str, Any] = {
        "problems": len(kinds["error"]),
        "standard_error": float(kinds["error"].mean()),
        "max_standard_error": float(kinds["error"].amax()),
        "counting_standard_error": float(kinds["counting"].mean()),
    }
    # What the draws add, on average, to the square of a difference from the estimate.
    noise = float(kinds["error"].square().mean())
    for one, other in PAIRS:
        difference = (kinds[one] - kinds[other]).abs()
        each = difference.mean((1, 2))
        estimated = noise if "gumbel_matching" in (one, other) else 0.0
        record[f"{one}_vs_{other}"] = float(each.mean())
        record[f"{one}_vs_{other}_se"] = float(each.std() / math.sqrt(len(each)))
        record[f"{one}_vs_{other}_max"] = float(difference.amax())
        record[f"{one}_vs_{other}_rms"] = math.sqrt(max(float(difference.square().mean()) - estimated, 0.0))
    return record


def judge(study: Study) -> list[Part]:
    """Claim 11: Sinkhorn is close to the marginals of Gumbel-Matching for n >= 4, and to those of Gibbs, at tau = 1.

    How close is relative: the mean absolute difference of Sinkhorn, divided by that of the router's own p.
    """
    at_one = [r for r in study["rows"] if r["sd"] == _AT_ONE]
    small, large = (
        max(finite(r["sinkhorn_vs_gumbel_matching"] for r in at_one if (r["n"] >= 4) == big)) for big in (False, True)
    )
    measured = f"{small:.3g} below n = 4, at most {large:.3g} from n = 4 on"
    further = decided(small > large, measured, {"sinkhorn vs gumbel_matching, n < 4": small})
    return [_judge_distance(study, "gumbel_matching"), _judge_distance(study, "gibbs"), further]


def _judge_distance(study: Study, other: str) -> Part:
    """Judges at temperature 1, and reports every temperature: the worst over sizes, and the mean."""
    ratios: dict[float, list[float]] = {}
    for r in sorted(study["rows"], key=lambda r: r["sd"]):
        if r["n"] >= 4:
            found, scale = finite([r[f"sinkhorn_vs_{other}"], r[f"unbalanced_vs_{other}"]])
            ratios.setdefault(r["sd"], []).append(found / max(scale, 1e-12))
    measured = "; ".join(
        f"{statistics.fmean(found):.0%} of it at temperature {1 / sd:g} (at worst {max(found):.0%})"
        for sd, found in ratios.items()
    )
    figures = {f"sinkhorn vs {other}, of unbalanced, temperature {1 / sd:g}": max(r) for sd, r in ratios.items()}
    return decided(max(ratios[_AT_ONE]) <= _CLOSE, measured, figures)


def draw(study: Study) -> Figure:
    """Draws Sinkhorn's entries against those of Gumbel-Matching and Gibbs, then the error against n."""
    figure = new_figure(7.6, 5.6)
    above, below = stack(figure, 1.0, 1.05)
    scatters = row(above, len(study["points"]), sharey=True)
    for axes, size in zip(scatters, study["points"], strict=True):
        axes.plot([0.0, 1.0], [0.0, 1.0], color=GREY, linewidth=0.8, zorder=1)
        x, matching, gibbs = zip(*size["entries"], strict=True)
        axes.plot(x, gibbs, **_GIBBS.points(), label="Gibbs")
        axes.plot(x, matching, **_MATCHING.points(), label="Gumbel-Matching")
        axes.set(aspect="equal", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
        axes.set(xlabel="Sinkhorn's expectation", title=f"n = {size['n']}, k = {size['k']}")
        add_grid(axes)
    scatters[0].set_ylabel("marginal probability")
    scatters[0].legend(loc="upper left", fontsize=8, handletextpad=0.2)
    experts = sorted({size["k"] for size in study["sizes"]})
    panels = row(below, len(experts), sharey=True)
    for axes, k in zip(panels, experts, strict=True):
        sizes = [size for size in study["sizes"] if size["k"] == k]
        n = [size["n"] for size in sizes]
        for key, name, mark in _LINES:
            error = [size[f"{key}_se"] for size in sizes]
            axes.errorbar(n, [size[key] for size in sizes], yerr=error, label=name, **mark.line, elinewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(n, [str(size) for size in n])
        axes.set(yscale="log", xlim=(min(n) / 1.5, max(n) * 1.5), title=f"k = {k} experts")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        add_grid(axes)
    panels[0].set_ylabel("mean absolute difference")
    panels[-1].legend(loc="lower left", fontsize=7.5)
    spread = ", ".join(f"{sd:g}" for sd in study["sds"])
    below.supxlabel(
        f"datapoints n; logits of standard deviation {spread}; bars: standard error over matrices", fontsize=8.5
    )
    return figure
