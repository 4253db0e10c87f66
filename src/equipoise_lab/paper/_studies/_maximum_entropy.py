# SPDX-License-Identifier: Apache-2.0
"""Whether the maximum-entropy distribution with marginals p has u_ij ~ p_ij^(1/tau), as the paper found (App. D.5).

A factor for a row or a column of u cancels from the distribution, so u is compared with p^(1/tau) up to such factors:
log u_ij = log p_ij / tau + r_i + c_j is fitted by least squares.

What tau to expect? Take logits log u so small that all responses are linear, with rows and columns that sum to 0. Under
the uniform distribution over balanced assignments P(z_l = m | z_i = j) = (c - 1[j = m]) / (n - 1) for another row l, so
p_ij moves from 1/k by (1/k) n / (n - 1) log u_ij; the rows that make room are the factor. Hence log u = (n - 1)/n log p
in that limit: tau = n / (n - 1), for every k.

Legend: n rows (datapoints), k columns (experts).
"""

import statistics
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from equipoise import reference
from equipoise.balancing import sinkhorn
from equipoise_lab._style import GREY, INK, Look, add_grid, name_ticks, new_figure, row, stack
from equipoise_lab.paper._rules import Part, Study, decided, finite

# Not n = k = 2, whose single degree of freedom any tau fits.
SIZES = ((3, 3), (4, 2), (4, 4), (6, 2), (6, 3), (6, 6), (8, 2), (8, 4), (12, 2), (16, 2))
QUICK_SIZES = ((4, 2), (4, 4), (6, 3), (8, 2))
SHARPNESS = (0.5, 1.0, 2.0, 4.0)
# One matrix of each of these is kept entry by entry, for a picture.
SHOWN = ((4, 4), (8, 2), (8, 4))


def run(*, quick: bool = False, seed: int = 0) -> dict[str, Any]:
    """Finds the maximum-entropy distribution for random balanced matrices, and fits tau.

    Returns:
        `problems`, a record for each matrix: `n`, `k`, `sharpness` (the standard deviation of the logits that Sinkhorn
        balanced into p), `r_squared`, `tau` and `max_residual` of the fit, `total_variation` between the
        maximum-entropy distribution and the one proportional to (prod_i p_{i, z_i})^(1/tau), `total_variation_tau_1`
        (the same with tau = 1), `error` of the marginals that the search attained and whether it `converged`. `median`
        holds the medians over matrices by size and sharpness, with `expected_tau` = n / (n - 1), the limit for flat
        matrices. `points`, for the figure, holds [p^(1/tau), u] entry by entry, u scaled as the fit says.
    """
    generator = torch.Generator().manual_seed(seed)
    problems: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    for n, k in QUICK_SIZES if quick else SIZES:
        for sharpness in SHARPNESS:
            for number in range(2 if quick else 4):
                logits = sharpness * torch.randn(n, k, dtype=torch.float64, generator=generator)
                log_p = sinkhorn(logits, tolerance=1e-13).log_p
                record, entries = fit(log_p)
                problems.append({"n": n, "k": k, "sharpness": sharpness} | record)
                if (n, k) in SHOWN and number == 0:
                    points.append({"n": n, "k": k, "sharpness": sharpness, "entries": entries.tolist()} | record)
    return {"quick": quick, "seed": seed, "problems": problems, "median": _medians(problems), "points": points}


def fit(log_p: Float[Tensor, "n k"]) -> tuple[dict[str, Any], Float[Tensor, "entries 2"]]:
    """Fits tau for one balanced matrix.

    Returns:
        The record that `run` documents, and [p^(1/tau), u] for every entry, u scaled as the fit says.

    Example:
        >>> p = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
        >>> round(fit(p.log())[0]["tau"], 6)
        2.0
    """
    result = reference.maximum_entropy(log_p.exp(), tolerance=1e-9)
    found = reference.fit_temperature(result.log_u, log_p)
    exact, power, plain = (
        reference.gibbs_distribution(log, temperature=tau).probability
        for log, tau in ((result.log_u, 1.0), (log_p, found.temperature), (log_p, 1.0))
    )
    record = {
        "tau": found.temperature,
        "r_squared": found.r_squared,
        "max_residual": found.max_residual,
        "total_variation": 0.5 * float((exact - power).abs().sum()),
        "total_variation_tau_1": 0.5 * float((exact - plain).abs().sum()),
        "error": result.error,
        "converged": result.converged,
    }
    # The best r_i + c_j taken out of what is left of log u.
    log_power = log_p / found.temperature
    rest = result.log_u - log_power
    scaled = log_power + (rest - rest.mean(1, keepdim=True) - rest.mean(0, keepdim=True) + rest.mean())
    return record, torch.stack([log_power.exp(), scaled.exp()], -1).flatten(0, 1)


def _medians(problems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[int, int, float], list[dict[str, Any]]] = {}
    for problem in problems:
        groups.setdefault((problem["n"], problem["k"], problem["sharpness"]), []).append(problem)
    return [
        {"n": n, "k": k, "sharpness": sharpness, "problems": len(group), "expected_tau": n / (n - 1)}
        | {
            name: statistics.median(problem[name] for problem in group)
            for name in ("tau", "r_squared", "max_residual", "total_variation", "total_variation_tau_1")
        }
        for (n, k, sharpness), group in groups.items()
    ]


def judge(study: Study) -> list[Part]:
    """Claim 12: log u is linear in log p, up to factors for rows and columns."""
    found, taus, distances = (
        finite(problem[key] for problem in study["problems"]) for key in ("r_squared", "tau", "total_variation")
    )
    median, worst, low, high = statistics.median(found), min(found), min(taus), max(taus)
    measured = f"median {median:.4g} over {len(found)} matrices, tau {low:.3g} to {high:.3g}"
    figures = {"median r_squared": median, "least tau": low, "largest tau": high}
    distance, largest = statistics.median(distances), max(distances)
    distance_figures = {"median total variation": distance, "largest total variation": largest}
    return [
        decided(median >= 0.95, measured, figures),
        decided(worst >= 0.8, f"worst {worst:.4g}", {"worst r_squared": worst}),
        decided(distance <= 0.05, f"median {distance:.3g}, largest {largest:.3g}", distance_figures),
    ]


def ordered_looks(ordered: Iterable[float | int]) -> dict[float | int, Look]:
    """A look for each of up to four values in order: light to dark, so that the order can be seen in grey."""
    shades = zip(("#b5b5b5", "#7fb8da", "#2b7bba", "#08306b"), ("o", "s", "^", "D"), strict=True)
    return {value: Look(colour=colour, marker=marker) for value, (colour, marker) in zip(ordered, shades, strict=False)}


def draw(study: Study) -> Figure:
    """Draws u against p^(1/tau) entry by entry, then tau and the quality of the fit against n."""
    figure = new_figure(7.6, 5.4)
    above, below = stack(figure, 1.05, 1.0)
    looks = ordered_looks(sorted({problem["sharpness"] for problem in study["problems"]}))
    shapes = sorted({(point["n"], point["k"]) for point in study["points"]})
    panels = row(above, len(shapes))
    for axes, shape in zip(panels, shapes, strict=True):
        points = [point for point in study["points"] if (point["n"], point["k"]) == shape]
        every = [value for point in points for entry in point["entries"] for value in entry]
        span = [min(every) / 1.5, max(every) * 1.5]
        axes.plot(span, span, color=GREY, linewidth=0.8, zorder=1)
        for point in points:
            x, y = zip(*point["entries"], strict=True)
            axes.plot(x, y, **looks[point["sharpness"]].points(3.6))
        axes.set(xscale="log", yscale="log", xlabel=r"$p_{ij}^{1/\tau}$", title=f"n = {shape[0]}, k = {shape[1]}")
        axes.minorticks_off()
        add_grid(axes)
    panels[0].set_ylabel(r"$u_{ij}$, in the fitted scale")
    left, right = row(below, 2)
    for sharpness, look in looks.items():
        median = sorted((m for m in study["median"] if m["sharpness"] == sharpness), key=lambda m: (m["n"], m["k"]))
        n = [m["n"] * (1.0 + 0.02 * (m["k"] - 4)) for m in median]
        mark = look.points(5.0)
        left.plot(n, [m["tau"] for m in median], **mark, label=f"{sharpness:g}")
        right.plot(n, [max(1.0 - m["r_squared"], 1e-6) for m in median], **mark)
    grid = [2.8 * 1.02**step for step in range(92)]
    left.plot(grid, [n / (n - 1.0) for n in grid], color=INK, linewidth=1.0, zorder=1, label="n / (n - 1)")
    left.set_ylabel(r"fitted $\tau$")
    left.legend(title="sd of the logits", fontsize=7.5, title_fontsize=7.5)
    right.set(yscale="log", ylabel=r"unexplained variation, $1 - R^2$")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        name_ticks(axes, sorted({m["n"] for m in study["median"]}))
        axes.set_xlabel("datapoints n (k = 2 to n, slightly apart)")
        add_grid(axes)
    return figure
