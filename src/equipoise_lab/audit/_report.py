# SPDX-License-Identifier: Apache-2.0
"""What an audit found: figures for a file, a table and two drawings for the eye.

Biases and standard deviations are given in units of the norm of the exact gradient, router and experts each for itself.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, NullFormatter
from rich.table import Table
from rich.text import Text

from equipoise.audit import CONFIDENCE, DRAWS, FALSE_ALARM, GROUPS, POWER, TOLERANCE, AuditResult, Verdict
from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab._environment import environment
from equipoise_lab._ledger import write_whole
from equipoise_lab._style import Label, Look, add_grid, label_column, look, new_figure, row, save, style
from equipoise_lab._tables import format_seconds, new_table
from equipoise_lab.audit._recipe import Audit

NAME = "audit"
_STYLES = {"unbiased": "green", "biased": "bold red", "undecided": "yellow"}
# Colour, marker and fill: any one of the three tells the verdicts apart, so grey print does too.
_LOOKS: dict[Verdict, Look] = {
    "biased": Look(colour="#8c2d04", marker="s"),
    "undecided": Look(colour="#777777", marker="D", filled=False),
    "unbiased": Look(colour="#0b5cad", marker="o", filled=False),
}
_TICKS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
# The figure of cost has the paper's strategies in grey, and what came after them in the colour of how they sample,
# which the marker shows too; baselines have that of the strategy they are used with.
_DARK_GREY = "#555555"
_WAYS = {"gm": "gm-iw", "skip": "skip-iw", "sample": "sample"}
# The height of a name, as a fraction of that of the axes: a figure with few names and one with many.
_LABEL_HEIGHT, _SMALL_LABEL_HEIGHT = 0.062, 0.034


def write_figures(audit: Audit, outcomes: Sequence[AuditResult], folder: Path) -> Path:
    """Writes audit.json: options, machine, the test's error rates, the exact gradient and all that was found."""
    exact = dict(zip(GROUPS, outcomes[0].evidence.exact.view(2, audit.n, audit.k), strict=True))
    test = {"false_alarm": FALSE_ALARM, "power": POWER, "tolerance": TOLERANCE, "confidence": CONFIDENCE}
    figures = {
        "options": asdict(audit),
        "environment": environment(),
        "test": {"components": 2 * audit.n * audit.k, **test},
        "exact": {group: gradient.tolist() for group, gradient in exact.items()},
        "exact_norm": {group: float(gradient.norm()) for group, gradient in exact.items()},
        "strategies": [_strategy_figures(audit, outcome) for outcome in outcomes],
    }
    path = folder / f"{NAME}.json"
    write_whole(path, json.dumps(figures, indent=2) + "\n")
    return path


def _strategy_figures(audit: Audit, outcome: AuditResult) -> dict[str, Any]:
    evidence, judgement = outcome.evidence, outcome.judgement
    vectors = {"mean": evidence.mean, "half_width": evidence.threshold(1.0 - CONFIDENCE), "variance": evidence.variance}
    by_group = {
        group: {
            **asdict(finding),
            "total_variance": float(evidence.variance.view(2, -1)[i].sum()),
            **{name: vector.view(2, audit.n, audit.k)[i].tolist() for name, vector in vectors.items()},
        }
        for i, (group, finding) in enumerate(outcome.findings.items())
    }
    group, entry = divmod(judgement.component, audit.n * audit.k)
    return {
        "name": outcome.strategy.name,
        "baseline": outcome.baseline,
        "draws": outcome.draws,
        "estimates": evidence.estimates,
        "label": outcome.strategy.label,
        "claimed_unbiased": outcome.claimed,
        **asdict(judgement),
        "component": {"of": GROUPS[group], "row": entry // audit.k, "expert": entry % audit.k},
        **by_group,
        "effective_sample_size": outcome.effective * outcome.draws * audit.n,
        "effective_fraction": outcome.effective,
        "largest_weight": outcome.largest_weight,
        "possible_weight": outcome.possible_weight,
        "fraction_dropped": outcome.dropped,
        "seconds_per_draw": outcome.seconds,
        "seconds_per_estimate": outcome.step_seconds,
    }


def describe(audit: Audit) -> str:
    """The run in one line, for titles."""
    parts = [f"n = {audit.n}, k = {audit.k}, capacity {audit.slots}, temperature {audit.temperature:g}"]
    parts += [f"logits of sd {audit.sharpness:g}, {audit.draws:,} draws, seed {audit.seed}"]
    parts += [f"row effect {audit.row_effect:g}"]
    parts += [] if audit.eps is None else [f"eps {audit.eps:g}"]
    parts += [] if audit.solves is None else [f"{audit.solves} solves"]
    parts += ["Sinkhorn first"] if audit.sinkhorn_first else []
    return ", ".join(parts + ([] if audit.importance else ["no importance weights"]))


def audit_table(audit: Audit, outcomes: Sequence[AuditResult]) -> Table:
    """The strategies side by side."""
    caption = (
        "bias, sd: of the mean and of one estimate, in units of the norm of the exact gradient.\n"
        f"z: of the component that comes closest to its limit; false-alarm rate {FALSE_ALARM:g} over all components.\n"
        f"found from: a bias this large would have been found with probability {POWER:g}; "
        f"unbiased needs {TOLERANCE:g} or less, and a claim.\n"
        "more draws: to resolve that, or, without a claim, to find a bias as large as it now looks.\n"
        "ESS: effective sample size, as a fraction of the rows. weight: the largest, and the largest p/q possible.\n"
        "time: of the processor, for one estimate, backward included and the experts' own work left out.\n"
        f"+ draws: an estimate is the mean of {DRAWS} draws of the batch."
    )
    how = {"caption": caption, "caption_justify": "left", "collapse_padding": True}
    headings = list(_cells(outcomes[0]))
    table = new_table(f"Audit: {describe(audit)}", ("strategy", "verdict"), headings, no_wrap=True, **how)
    # A rule where the baselines begin, and where the next strategy's do.
    parts = ["" if outcome.baseline == "none" else outcome.strategy.name for outcome in outcomes]
    for outcome, part, following in zip(outcomes, parts, [*parts[1:], parts[-1]], strict=True):
        verdict = Text(outcome.verdict, style=_STYLES[outcome.verdict])
        cells = map(Text, _cells(outcome).values())
        table.add_row(Text(outcome.name), verdict, *cells, end_section=following != part)
    return table


def _cells(outcome: AuditResult) -> dict[str, str]:
    judgement, router, experts = outcome.judgement, outcome.findings["router"], outcome.findings["experts"]
    return {
        "more\ndraws": _more_draws(outcome) or "-",
        "z\n(limit)": f"{judgement.z:.1f} ({judgement.z_limit:.1f})",
        "bias\nrouter": f"{router.bias:.4f}",
        "bias\nexperts": f"{experts.bias:.4f}",
        "found\nfrom": f"{judgement.detectable:.2g}",
        "sd\nrouter": f"{router.deviation:.2f}",
        "sd\nexperts": f"{experts.deviation:.2f}",
        "ESS": f"{outcome.effective:.2f}",
        "weight\nseen": f"{outcome.largest_weight:.3g}",
        "weight\npossible": "-" if outcome.possible_weight is None else f"{outcome.possible_weight:.3g}",
        "dropped": f"{outcome.dropped:.1%}",
        "time": format_seconds(outcome.step_seconds),
    }


def verdict_text(outcome: AuditResult) -> str:
    """The verdict, with what it would take where there is none."""
    if outcome.verdict != "undecided":
        return outcome.verdict
    more = _more_draws(outcome)
    return f"undecided: needs {more} more draws" if more else "undecided: no trace of bias"


def _more_draws(outcome: AuditResult) -> str:
    """The draws that would decide, to two digits and rounded up, because the number is an estimate; empty: unknown."""
    more = outcome.judgement.more_estimates
    return round_up(more * (outcome.draws // outcome.evidence.estimates)) if more else ""


def round_up(count: int) -> str:
    """Rounds up to two digits.

    Example:
        >>> round_up(659_100)
        '660,000'
    """
    unit = 10 ** max(len(str(count)) - 2, 0)
    return f"{-(-count // unit) * unit:,}"


def save_figures(audit: Audit, outcomes: Sequence[AuditResult], folder: Path) -> list[Path]:
    """Draws two figures on logarithmic axes, with a panel for the gradient of the router and one for the experts'.

    The first is bias against standard deviation of one estimate. A strategy whose bias was found is a filled square at
    the bias, with its confidence interval. One whose bias was not found is an open mark at the bias that would have
    been, with an arrow down: the bias is below that, or zero. The second is the variance of one estimate against the
    time it takes.
    """
    bias = (
        f"{describe(audit)}\n"
        "square: biased   circle: unbiased   diamond: undecided\n"
        f"filled: bias found, with {CONFIDENCE:.0%} interval   "
        f"arrow down: none found; one at the mark would have been, with probability {POWER:g}"
    )
    bias_axes = ("standard deviation of one estimate / norm of the exact gradient", "bias / norm of the exact gradient")
    cost = (
        f"Variance against cost: {describe(audit)}\n"
        "grey: the paper's strategies   colour: mixtures, averages, baselines and critics   "
        "triangle: Gumbel-Matching   square: skipping   circle: independent\n"
        "filled: unbiased   open: biased or undecided   "
        "dotted: equal variance in equal time, by averaging   "
        "baselines do not change the experts' gradient"
    )
    cost_axes = (
        "time of one estimate without the experts' own, microseconds",
        "variance of one estimate / squared norm of the exact gradient",
    )
    # The figure of bias has no baselines, unless there is nothing else.
    plain = [outcome for outcome in outcomes if outcome.baseline == "none"] or outcomes
    paths: list[Path] = []
    for name, inches, title, labels, shown, draw in (
        (NAME, (9.6, 4.6), bias, bias_axes, plain, _draw_bias),
        (f"{NAME}-cost", (10.6, 7.0), cost, cost_axes, outcomes, _draw_cost),
    ):
        with style():
            figure = new_figure(*inches)
            panels = row(figure, len(GROUPS))
            for axes, group in zip(panels, GROUPS, strict=True):
                axes.set(xscale="log", yscale="log")
                draw(axes, shown, group)
                axes.set(title=f"gradient of the {group}", xlabel=labels[0])
            panels[0].set_ylabel(labels[1])
            figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=9)
            paths += save(figure, folder, name)
    return paths


def _draw_bias(axes: Axes, outcomes: Sequence[AuditResult], group: str) -> None:
    marks: list[Label] = []
    for outcome in outcomes:
        finding, mark = outcome.findings[group], _LOOKS[outcome.verdict]
        x, (lower, upper) = finding.deviation, finding.bias_interval
        # The verdict is about router and experts together; either alone may show no bias.
        shown = outcome.verdict == "biased" and lower > 0.0
        y = min(max(finding.bias, lower), upper) if shown else finding.detectable
        if shown:
            axes.plot([x, x], [lower, upper], color=mark.colour, linewidth=1.4)
        else:
            arrow = {"arrowstyle": "-|>", "color": mark.colour, "linewidth": 1.2}
            axes.annotate("", xy=(x, y / 2.2), xytext=(x, y), arrowprops=arrow)
        how: dict[str, Any] = {"markersize": 7.5, "markeredgewidth": 1.6, "zorder": 3}
        how["markerfacecolor"] = mark.colour if mark.filled and shown else "white"
        axes.plot([x], [y], mark.marker, color=mark.colour, **how)
        marks.append(Label(x=x, y=y, text=outcome.name, colour=mark.colour, bold=outcome.verdict == "unbiased"))
    # Room for the arrows below and the names at the right.
    xs, ys = [mark.x for mark in marks], [mark.y for mark in marks]
    span = max(max(xs) / min(xs), 2.0)
    axes.set(xlim=(min(xs) / span**0.12, max(xs) * span**0.8), ylim=(min(ys) / 4.0, max(ys) * 2.5))
    _set_ticks(axes.xaxis, [digit * 10.0**power for power in range(-4, 5) for digit in _TICKS])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value >= 1e-4 else f"{value:.0e}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    add_grid(axes)
    left, right = axes.get_xlim()
    label_column(axes, sorted(marks, key=lambda mark: mark.y), right / (right / left) ** 0.28, _LABEL_HEIGHT)


def _draw_cost(axes: Axes, outcomes: Sequence[AuditResult], group: str) -> None:
    # The experts' gradient differs only where draws are averaged.
    shown = [o for o in outcomes if group == "router" or o.baseline in ("none", "draws")] or outcomes
    marks: list[Label] = []
    for outcome in sorted(shown, key=lambda o: o.findings[group].deviation):
        x, y = 1e6 * outcome.step_seconds, max(outcome.findings[group].deviation ** 2, 1e-12)
        name = outcome.strategy.name
        way = look(next((looked for start, looked in _WAYS.items() if name.startswith(start)), "other"))
        colour = _DARK_GREY if outcome.baseline == "none" and name in PAPER_STRATEGIES else way.colour
        face = colour if outcome.verdict == "unbiased" else "white"
        axes.plot([x], [y], way.marker, markersize=7, color=colour, markerfacecolor=face, markeredgewidth=1.5, zorder=3)
        marks.append(Label(x=x, y=y, text=outcome.name, colour=colour, size=7.5))
    xs, ys = [mark.x for mark in marks], [mark.y for mark in marks]
    span, height = max(max(xs) / min(xs), 3.0), max(max(ys) / min(ys), 3.0)
    left, column = min(xs) / span**0.1, max(xs) * span**0.15
    axes.set(xlim=(left, column * (column / left) ** 0.75), ylim=(min(ys) / height**0.08, max(ys) * height**0.08))
    ticks = [digit * 10.0**power for power in range(-6, 7) for digit in (1.0, 2.0, 5.0)]
    for axis, most in ((axes.xaxis, column), (axes.yaxis, math.inf)):
        _set_ticks(axis, [tick for tick in ticks if tick < most])
    for power in range(-12, 13):  # variance times time is what averaging estimates keeps
        product = 4.0**power * xs[0] * ys[0]
        axes.plot([left, column], [product / left, product / column], ":", color="#c8c8c8", linewidth=0.8, zorder=0)
    add_grid(axes)
    label_column(axes, marks, column, _SMALL_LABEL_HEIGHT)


def _set_ticks(axis: Axis, ticks: Sequence[float]) -> None:
    """Writes plain numbers at some places, and nothing between them."""
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(FixedLocator([]))
    axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(lambda value, _: f"{value:g}")
