# SPDX-License-Identifier: Apache-2.0
"""The four parts of the tour. Each does something real with the library, and returns what it found."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

import equipoise as eq
from equipoise_lab._style import GREY, add_grid, look, new_figure, row, style
from equipoise_lab._tables import format_seconds

_BUSY = "#8c2d04"
_CALM = "#0b4f94"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one part found.

    Attributes:
        title: what was done.
        code: the lines of Python that do it, for the reader to copy.
        found: what came out, a sentence each.
        figure: the picture.
        caption: what the picture shows.
    """

    title: str
    code: str
    found: tuple[str, ...]
    figure: Figure
    caption: str


def show_assignment() -> Part:
    """Balances a batch of 16,384 rows over 64 experts of unequal popularity."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16_384, 64, generator=generator) + torch.randn(64, generator=generator)
    a = eq.assign(logits)  # the first call may compile
    begin = time.perf_counter()
    a = eq.assign(logits)
    seconds = time.perf_counter() - begin
    wanted = logits.argmax(-1).bincount(minlength=64)
    with style():
        figure = new_figure(7.0, 2.6)
        (axes,) = row(figure, 1)
        axes.bar(
            range(64), wanted.sort(descending=True).values.tolist(), color=GREY, width=0.8, label="favourite expert"
        )
        axes.plot([-0.5, 63.5], [256, 256], color=_CALM, linewidth=2.4, label="balanced: 256 each")
        axes.set(xlabel="expert, by popularity", ylabel="rows", xlim=(-1, 64))
        axes.legend()
    return Part(
        title="Balanced assignment",
        code="a = eq.assign(logits)  # logits [16384, 64]\na.z, a.counts, a.prices, a.gap",
        found=(
            f"16,384 rows found their best experts in {format_seconds(seconds)}, 256 rows for each of 64 experts.",
            f"Without a limit the busiest expert would have {wanted.max():,} rows and the least busy {wanted.min()}.",
            f"Provably left to gain: {a.gap.item():.1g} of a total score of {a.value.item():,.0f}.",
        ),
        figure=figure,
        caption="Rows that each expert would have without a limit, and what the exact assignment gives it.",
    )


def show_sampling() -> Part:
    """Draws a balanced sample, and compares its probabilities with the router's."""
    generator = torch.Generator().manual_seed(1)
    logits = 1.5 * torch.randn(512, 8, generator=generator) + torch.linspace(1.5, -1.5, 8)
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
        axes.set(xlabel="q: how likely the balanced draw was", ylabel="p: how likely the router wanted it")
        add_grid(axes)
    return Part(
        title="A random choice that is exactly balanced",
        code="s = eq.sample_gumbel_matching(log_p, eq.draw_gumbel(log_p.shape))\n"
        "w = eq.importance_weight(log_p, s)  # p / q",
        found=(
            f"Rows of each expert: {', '.join(map(str, s.z.bincount(minlength=8).tolist()))}.",
            f"Weights between {weight.min():.2g} and {weight.max():.2g} correct for the balancing.",
            f"The gradient rests on {effective:.0%} of the batch (effective sample size).",
        ),
        figure=figure,
        caption="Each mark is a row. Above the line the router wanted its expert more than the balanced draw gave it.",
    )


def show_audit() -> Part:
    """Audits the balanced estimator, with its weights and without."""
    conditions = eq.audit.Conditions(n=4, draws=60_000, row_effect=0.0)
    results = [eq.audit.audit(name, conditions) for name in ("gm-iw-mix", "gm")]
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
        code='eq.audit.audit("gm-iw-mix").verdict',
        found=tuple(
            f"{result.name}: {result.verdict}, {result.judgement.z:.1f} standard errors off at the worst component "
            f"(limit {result.judgement.z_limit:.1f})."
            for result in results
        ),
        figure=figure,
        caption="Mean of 60,000 estimates against the exact gradient: Gumbel-Matching with its weights, and without.",
    )


def show_training(steps: int = 150) -> Part:
    """Trains a mixture of eight experts on a function of eight pieces, exactly balanced."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pieces = torch.randn(8, 16, 16) / 4
        moe = eq.nn.MoE(16, 8, hidden_dim=32, router="gm-iw-mix", capacity_factor=1.0)
        surrogate = eq.nn.Surrogate()
        optimizer = torch.optim.AdamW(eq.nn.parameter_groups(moe, lr=1e-2))
        losses_by_step: list[float] = []
        loads: list[list[int]] = []
        for _ in range(steps):
            x = torch.randn(512, 16)
            kind = x[:, :3].gt(0).long() @ torch.tensor([1, 2, 4])
            wanted = torch.einsum("nd,nde->ne", x, pieces[kind])
            with eq.nn.capture(moe, optimizer) as routings:
                losses = (moe(x) - wanted).square().mean(-1)
            loss = surrogate(losses, routings)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses_by_step.append(losses.mean().item())
            loads.append(routings[0].stats.load.tolist())
    with style():
        figure = new_figure(7.0, 2.6)
        (axes,) = row(figure, 1)
        axes.plot(range(1, steps + 1), losses_by_step, color=_BUSY)
        axes.set(xlabel="step", ylabel="mean squared error", ylim=(0, None))
        add_grid(axes, "y")
    return Part(
        title="Train a mixture of experts",
        code='moe = eq.nn.MoE(16, 8, router="gm-iw-mix", capacity_factor=1.0)\n'
        "with eq.nn.capture(moe) as routings:\n    losses = (moe(x) - y).square().mean(-1)\n"
        "surrogate(losses, routings).backward()",
        found=(
            f"The error fell from {losses_by_step[0]:.2f} to {losses_by_step[-1]:.2f} in {steps} steps.",
            f"Every expert had {loads[0][0]} rows in every step: "
            + ("nothing was dropped." if all(load == loads[0] for load in loads) else "but for rounding."),
        ),
        figure=figure,
        caption="The error of a batch while router and experts learn together.",
    )


PARTS: tuple[Callable[[], Part], ...] = (show_assignment, show_sampling, show_audit, show_training)
"""The tour, in order."""
