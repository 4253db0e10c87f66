# SPDX-License-Identifier: Apache-2.0
"""The parts of the tour. Each does something real with the library, and returns what it found."""

from collections.abc import Callable

import torch

import equipoise as eq
from equipoise_lab._style import GREY, add_grid, look, new_figure, row, style
from equipoise_lab._tables import format_seconds
from equipoise_lab._timing import best_of
from equipoise_lab.demo._page import Part
from equipoise_lab.demo._training import show_training

_CALM = "#0b4f94"
_DRAWS = 100_000


def show_assignment() -> Part:
    """Balances 128 rows over 8 experts of unequal popularity: few rows, so that there is little to compile."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(128, 8, generator=generator) + 0.5 * torch.randn(8, generator=generator)
    timing = best_of(lambda: eq.assign(logits), repeats=3, budget=0.1)
    a: eq.Assignment = timing.result
    wanted = logits.argmax(-1).bincount(minlength=8).sort(descending=True).values
    with style():
        figure = new_figure(7.0, 2.6)
        (axes,) = row(figure, 1)
        axes.bar(range(1, 9), wanted.tolist(), color=GREY, width=0.8, label="favourite expert")
        axes.plot([0.5, 8.5], [16, 16], color=_CALM, linewidth=2.4, label="balanced: 16 each")
        axes.set(xlabel="expert, by popularity", ylabel="rows", xlim=(0.4, 8.6), xticks=range(1, 9))
        axes.legend()
    return Part(
        title="Balanced assignment",
        code="a = eq.assign(logits)  # logits [128, 8]\na.z, a.counts, a.prices, a.gap",
        found=(
            f"128 rows were assigned in {format_seconds(timing.seconds)}: 16 rows for each of 8 experts.",
            f"Without a limit the busiest expert would have {wanted.max()} rows and the least busy {wanted.min()}.",
            f"Total score: {a.value.item():,.0f}. No balanced assignment is better by more than {a.gap.item():.1g}.",
        ),
        figure=figure,
        caption="Rows that each expert would have without a limit, and what the exact assignment gives it.",
    )


def show_sampling() -> Part:
    """Draws a balanced sample, and compares its probabilities with the router's."""
    generator = torch.Generator().manual_seed(1)
    logits = 1.5 * torch.randn(128, 8, generator=generator) + torch.linspace(1.5, -1.5, 8)
    log_p = torch.log_softmax(logits, -1)
    s = eq.sample_gumbel_matching(log_p, eq.draw_gumbel(log_p.shape, generator=generator))
    weight = eq.importance_weight(log_p, s)
    log_q_z = s.log_q.gather(-1, s.z.unsqueeze(-1)).squeeze(-1)
    log_p_z = log_p.gather(-1, s.z.unsqueeze(-1)).squeeze(-1)
    effective = float(weight.sum() ** 2 / (len(weight) * weight.square().sum()))
    with style():
        figure = new_figure(7.0, 3.4)
        (axes,) = row(figure, 1)
        axes.loglog(log_q_z.exp().tolist(), log_p_z.exp().tolist(), **look("gm-iw").points(3.2))
        axes.plot([1e-3, 1], [1e-3, 1], color=GREY, linewidth=0.8)
        axes.text(0.0013, 0.0019, "weight 1", color=GREY, rotation=23)
        axes.set(xlabel="q: probability of the balanced draw", ylabel="p: probability under the router")
        add_grid(axes)
    return Part(
        title="A random choice that is exactly balanced",
        code="s = eq.sample_gumbel_matching(log_p, eq.draw_gumbel(log_p.shape))\n"
        "w = eq.importance_weight(log_p, s)  # p / q",
        found=(
            f"Rows of each expert: {', '.join(map(str, s.z.bincount(minlength=8).tolist()))}.",
            f"Weights between {weight.min():.2g} and {weight.max():.2g} correct for the balancing.",
            f"The effective sample size of the weighted rows is {effective:.0%} of the batch.",
        ),
        figure=figure,
        caption="Each mark is a row at the expert that it drew. Above the line, p exceeds q, and the weight exceeds 1.",
    )


def show_audit() -> Part:
    """Audits an estimator that drops rows, with the weights that make up for it and without."""
    conditions = eq.audit.Conditions(n=4, draws=_DRAWS, row_effect=0.0)
    results = [eq.audit.audit(name, conditions) for name in ("skip-iw", "skip")]
    with style():
        figure = new_figure(7.0, 2.4)
        (axes,) = row(figure, 1)
        for place, result in enumerate(results):
            found = result.findings["router"]
            (low, high), mark = found.bias_interval, look(result.strategy.name)
            axes.plot([low, high], [place, place], color=mark.colour, linewidth=6, solid_capstyle="butt")
            axes.plot(found.bias, place, **mark.points(7))
        axes.axvline(0.0, color=GREY, linewidth=0.8)
        labels = [f"{result.name}: {result.verdict}" for result in results]
        axes.set(yticks=range(len(results)), yticklabels=labels, ylim=(-0.6, 1.6))
        axes.set_xlabel("bias of the router's gradient, as a fraction of its norm (95% interval)")
    return Part(
        title="Is the gradient right?",
        code='eq.audit.audit("skip-iw").verdict',
        found=tuple(
            f"{result.name}: {result.verdict}, {result.judgement.z:.1f} standard errors off at the worst component "
            f"(limit {result.judgement.z_limit:.1f})."
            for result in results
        ),
        figure=figure,
        caption=f"Mean of {_DRAWS:,} estimates against the exact gradient. Rows beyond the capacity are dropped. "
        "skip-iw weights the others by how likely they were to be kept, skip averages over what is left.",
    )


PARTS: tuple[Callable[[], Part], ...] = (show_assignment, show_sampling, show_audit, show_training)
"""The tour, in order."""
