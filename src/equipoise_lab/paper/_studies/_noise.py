# SPDX-License-Identifier: Apache-2.0
"""Gating with other noise than Gumbel's: additive Gaussian noise, and jitter that multiplies the router's input.

With two experts the expert depends on one number a row, d = score of expert 1 less score of expert 0. Without noise it
is the router's logit a = w x + b. The kinds of noise, each with a scale:

    gumbel     d = a + scale (g_1 - g_0): the paper's, temperature = scale (section 3.1)
    gaussian   d = a + scale (e_1 - e_0), e standard normal (Shazeer et al., 2017)
    jitter     d = w x u + b, u uniform in [1 - scale, 1 + scale] (Fedus et al., 2021)

In each d = a + width v, where v is symmetric about 0 with a known distribution F. Row i takes expert 1 when d_i exceeds
a threshold t_i. For a row on its own that is 0. In a balanced assignment it is what the other rows leave, which the
conditional of a row with logits of 0 tells (App. D.3). So the probability of expert 1 given the other rows is
F((a - t) / width) for every kind, and importance weights are exact.

Legend: m runs of one setting and kind (scales, then seeds), n rows (datapoints), 2 experts.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from equipoise.estimators import PAPER_STRATEGIES, gate, gated_loss, load_balance_loss, probability_ratio
from equipoise.sampling import Sample, sample_gumbel_matching
from equipoise_lab._style import Look, add_grid, legend_lines, name_ticks, new_figure, row
from equipoise_lab.paper._recipe import Paper
from equipoise_lab.paper._results import THRESHOLD
from equipoise_lab.paper._rules import HALF, NOT_RUN, Part, Setting, Study, all_hold, difference_part
from equipoise_lab.paper._task import draw_datasets, draw_parameters, errors, lines, router

KINDS = {
    "gumbel": ("Gumbel", Look(colour="#08306b", marker="o")),
    "gaussian": ("Gaussian", Look(colour="#5b9bd0", marker="s", dashes="--", filled=False)),
    "jitter": ("input jitter", Look(colour="#cc6a1b", marker="^", dashes=":")),
}
_JITTER = 2  # its place among them
SCALES = (0.01, 0.03, 0.1, 0.3)
# What the paper needs for gating to work, balanced sampling with weights, and the usual practice, noise and argmax.
# The balanced one comes first: the code below assigns a slice.
SETTINGS = {
    ("gm-iw", True): "balanced assignment, importance weights",
    ("sample", False): "argmax of each row, no weights",
}
_NOISE = 4 << 20
# Steps whose noise is drawn at once.
_CHUNK = 100
# A probability that rounding may take for 0.
_LEAST = 1e-6


def run(recipe: Paper, *, quick: bool = False, seed: int = 0) -> dict[str, Any]:
    """Trains gating with the balance loss of the experiment under each kind of noise, over scales.

    The seed is that of the noise; starts are those of the experiment's seeds.

    Returns:
        `runs`, a record for each `kind`, `scale`, `method` ("gm-iw": balanced assignment; "sample": each row on its
        own) and `importance` (whether p/q is part of the weights): `solved` of `seeds`, `median_mse`, and `mse` of each
        seed (None where it diverged).
    """
    runs = list(itertools.product(SETTINGS, KINDS, SCALES))
    mse = _train(recipe, seed).reshape(len(runs), recipe.seeds)
    return {
        "quick": quick,
        "seed": seed,
        "steps": recipe.steps,
        "balance_weight": recipe.balance_weight,
        "runs": [
            {
                "kind": kind,
                "scale": scale,
                "method": method,
                "importance": importance,
                "seeds": recipe.seeds,
                "solved": int((row < recipe.threshold).sum()),
                "median_mse": float(row.median()) if row.median().isfinite() else None,
                "mse": [value if math.isfinite(value) else None for value in row.tolist()],
            }
            for ((method, importance), kind, scale), row in zip(runs, mse, strict=True)
        ],
    }


def _train(recipe: Paper, seed: int) -> Float[Tensor, "settings kinds m"]:
    """Trains all runs at once; returns their errors."""
    seeds = recipe.seed_range
    scale = torch.tensor(SCALES).repeat_interleave(len(seeds))
    starts = torch.stack([draw_parameters(number, recipe.initialisation) for number in seeds])
    data = draw_datasets(recipe.data_seeds(seeds), recipe.num_points, recipe.noise_sd)
    starts, x, y = (of_seed.repeat(len(SCALES), 1) for of_seed in (starts, *data))
    theta = starts.expand(len(SETTINGS), len(KINDS), -1, -1).clone().requires_grad_()
    optimiser = torch.optim.Adam([theta], lr=recipe.learning_rate)
    generators = [torch.Generator().manual_seed(_NOISE + 1000 * seed + number) for number in seeds]
    diverged = torch.zeros(theta.shape[:-1], dtype=torch.bool)
    for start in range(0, recipe.steps, _CHUNK):
        for noise in draw_noise(generators, _CHUNK, recipe.num_points)[: recipe.steps - start]:
            # The same for all settings and scales.
            v = noise.repeat(1, len(SCALES), 1).expand(len(SETTINGS), -1, -1, -1)
            loss = _loss(theta, x, y, v, scale, recipe.balance_weight)
            (gradient,) = torch.autograd.grad(loss.sum(), theta)
            diverged |= ~gradient.isfinite().all(-1)
            theta.grad = gradient.masked_fill(diverged[..., None], 0.0)
            optimiser.step()
    mse, _ = errors(theta.detach(), x, y, torch.ones_like(diverged))
    return mse.masked_fill(diverged, torch.inf)


def _loss(
    theta: Float[Tensor, "settings kinds m 6"],
    x: Float[Tensor, "m n"],
    y: Float[Tensor, "m n"],
    v: Float[Tensor, "settings kinds m n"],
    scale: Float[Tensor, " m"],
    balance_weight: float,
) -> Float[Tensor, "settings kinds m"]:
    """Samples under the noise and computes what gating minimises, with the library's own functions."""
    a, first, second = lines(theta, x)
    log_p = router(a)
    with torch.no_grad():
        s = draw_sample(theta, x, v, scale, balanced=1)
        importance = torch.tensor([weighted for _, weighted in SETTINGS])[:, None, None, None]
        weight = torch.where(importance, probability_ratio(log_p, s), 1.0)
    prediction = s.at_z(torch.stack([first, second], -2).mT)
    losses = (y - gate(log_p, s) * prediction).square()
    return gated_loss(log_p, s, losses, weight=weight) + balance_weight * load_balance_loss(log_p)


def draw_noise(generators: Sequence[torch.Generator], steps: int, n: int) -> Float[Tensor, "{steps} 3 seeds {n}"]:
    """Draws v of each of `KINDS` for each seed: logistic, normal of variance 2, uniform in [-1, 1]."""
    uniform = torch.stack([torch.rand([2, steps, n], generator=generator) for generator in generators], 2)
    normal = torch.stack([torch.randn([steps, n], generator=generator) for generator in generators], 1)
    # The logistic distribution is that of the difference of two Gumbel variables.
    logistic = uniform[0].clamp(1e-7, 1.0 - 1e-7).logit()
    return torch.stack([logistic, math.sqrt(2.0) * normal, 2.0 * uniform[1] - 1.0], 1)


def draw_sample(
    theta: Float[Tensor, "settings kinds m 6"],
    x: Float[Tensor, "m n"],
    v: Float[Tensor, "settings kinds m n"],
    scale: Float[Tensor, " m"],
    balanced: int,
) -> Sample:
    """Samples experts: d = a + width v, assigned within capacity n/2 in the first settings, each row alone in others.

    `log_q` is exact, given the other rows' noise where they were assigned.
    """
    slope = theta[..., 0:1] * x
    a = slope + theta[..., 1:2]
    width = scale[:, None].expand(a.shape).clone()
    width[:, _JITTER] *= slope[:, _JITTER]
    d = torch.addcmul(a, width, v)
    z, threshold = (d > 0).long(), torch.zeros_like(d)
    if balanced:
        # With logits of 0 the log-odds of the conditional are what the other rows leave, and nothing else.
        scores = torch.stack([torch.zeros_like(d[:balanced]), d[:balanced]], -2).mT
        found = sample_gumbel_matching(torch.zeros_like(scores), scores)
        z[:balanced] = found.z
        threshold[:balanced] = found.log_q[..., 0] - found.log_q[..., 1]
    u = (a - threshold) / width.abs().clamp_min(1e-12)
    log_q = torch.stack([_log_cdf(-u), _log_cdf(u)], -1)
    return Sample(z, log_q, torch.ones_like(z, dtype=torch.bool), torch.ones_like(z, dtype=log_q.dtype))


def _log_cdf(u: Float[Tensor, "settings kinds m n"]) -> Float[Tensor, "settings kinds m n"]:
    """Computes log F(u) = log P(v > -u) of each kind."""
    gumbel, gaussian, jitter = u.unbind(1)
    return torch.stack(
        [
            torch.nn.functional.logsigmoid(gumbel),
            torch.special.ndtr(gaussian / math.sqrt(2.0)).clamp_min(1e-30).log(),
            (0.5 + 0.5 * jitter).clamp(_LEAST, 1.0).log(),
        ],
        1,
    )


def judge(study: Study) -> list[Part]:
    """Claim 16: Gumbel noise does as well as Gaussian noise and jitter, each at the scale that suits it best."""
    best: dict[str, dict[str, Setting]] = {}
    for r in study["runs"]:
        name = PAPER_STRATEGIES[r["method"]].label + ("" if r["importance"] else " without importance weights")
        solved = {seed: mse is not None and mse < THRESHOLD for seed, mse in enumerate(r["mse"])}
        found, kinds = Setting(f"{name} {r['kind']}", solved), best.setdefault(name, {})
        kinds[r["kind"]] = max(kinds.get(r["kind"], found), found, key=lambda setting: setting.fraction)
    return [_compare_noise(best, *other) for other in (("gaussian", "Gaussian noise"), ("jitter", "input jitter"))]


def _compare_noise(best: Mapping[str, Mapping[str, Setting]], kind: str, name: str) -> Part:
    """Compares Gumbel noise with one other kind, wherever either of the two solves the task for most seeds."""
    pairs = {s: (kinds[kind], kinds["gumbel"]) for s, kinds in best.items() if {"gumbel", kind} <= kinds.keys()}
    if not pairs:
        return NOT_RUN
    parts = [
        difference_part([theirs], [ours], (f"{setting}: {name}", "Gumbel noise"), at_most=True)
        for setting, (theirs, ours) in pairs.items()
        if max(theirs.fraction, ours.fraction) > HALF
    ]
    if not parts:
        return Part(measured=f"neither trains the model with {', '.join(pairs)}", verdict="undecided")
    return Part(
        measured="; ".join(part.measured for part in parts),
        verdict=all_hold(part.verdict for part in parts),
        figures={setting.name: setting.fraction for pair in pairs.values() for setting in pair},
        seeds=max((part.seeds for part in parts if part.seeds is not None), default=None),
    )


def draw(study: Study) -> Figure:
    """Draws how many seeds solve the task under each kind of noise, over its scale."""
    figure = new_figure(7.6, 2.9)
    panels = row(figure, len(SETTINGS), sharey=True)
    for axes, ((method, importance), title) in zip(panels, SETTINGS.items(), strict=True):
        for kind, (name, mark) in KINDS.items():
            where = (method, importance, kind)
            chosen = [run for run in study["runs"] if (run["method"], run["importance"], run["kind"]) == where]
            solved = [run["solved"] / run["seeds"] for run in chosen]
            axes.plot([run["scale"] for run in chosen], solved, **mark.line, label=name)
        axes.set(xscale="log", ylim=(-0.05, 1.05), title=title, xlabel="scale of the noise")
        name_ticks(axes, sorted({run["scale"] for run in study["runs"]}))
        add_grid(axes)
    panels[0].set_ylabel("seeds that solve the task")
    panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    handles, title = legend_lines(KINDS.values()), f"gating with balance loss {study['balance_weight']:g}"
    figure.legend(handles=handles, loc="outside upper left", ncols=3, title=title, alignment="left")
    return figure
