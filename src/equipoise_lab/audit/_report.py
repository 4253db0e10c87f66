# SPDX-License-Identifier: Apache-2.0
"""What an audit found: figures for a file, a table for the eye.

Biases and standard deviations are given in units of the norm of the exact gradient, router and experts each for itself.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from equipoise.audit import CONFIDENCE, DRAWS, FALSE_ALARM, GROUPS, POWER, TOLERANCE, AuditResult
from equipoise_lab._environment import environment
from equipoise_lab._ledger import write_whole
from equipoise_lab._tables import format_seconds, new_table
from equipoise_lab.audit._recipe import Audit

NAME = "audit"
_STYLES = {"unbiased": "green", "biased": "bold red", "undecided": "yellow"}


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
