# SPDX-License-Identifier: Apache-2.0
"""Judges the claims that the smaller studies decide: weights, marginals, maximum entropy, solver, ELBO, noise.

A study is a plain mapping, as its JSON file has it. What a rule needs and does not find makes it "not judged".
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab.paper._results import THRESHOLD
from equipoise_lab.paper._rules import (
    HALF,
    MARGIN,
    Part,
    Setting,
    Verdict,
    above,
    all_hold,
    difference_part,
    mean_interval,
)

Record = Mapping[str, Any]
# "Much faster" is this many times, and k << n is this many rows for each expert. Below the least number of rows, what
# is compared is the fixed cost of a call.
_MUCH, _ROWS_EACH, _LEAST_ROWS = 5.0, 64, 1024
# "Closely": this part of the distance of the router's own p.
_CLOSE = 0.25
# The standard deviation of the logits at temperature 1: see `_studies/_marginals.py`.
_AT_ONE = 1.0


def _values(records: Iterable[Record], key: str) -> list[float] | None:
    """The finite numbers under a key, or None where one is missing or there is no record."""
    found = [record.get(key) for record in records]
    numbers = [float(v) for v in found if isinstance(v, int | float) and math.isfinite(v)]
    return numbers if found and len(numbers) == len(found) else None


def _missing(rule: str, *, core: bool = True) -> Part:
    return Part(rule=rule, measured="not run", verdict="not judged", core=core)


def _yes(holds: bool) -> Verdict:
    return "holds" if holds else "does not hold"


def judge_variance(study: Record) -> list[Part]:
    """Claim 4: at the same routers, Gumbel-Matching IW has larger weights and more variance than Sample Skip IW.

    Args:
        study: `common`, records by method and temperature with `largest_weight`, `gradient_variance` and `ess` along
            the training of Sample at temperature 1.
    """
    one, skip, hot = (_trace(study, *where) for where in (("gm-iw", 1.0), ("skip-iw", 1.0), ("gm-iw", 10.0)))
    weight = "the largest weight along training of Gumbel-Matching IW at temperature 1"
    variance = "the variance of the router's gradient (mean along training) of Gumbel-Matching IW at temperature 1"
    size = (
        "the effective sample size (mean along training) at temperature 1 is lower with Gumbel-Matching IW than with "
        "Sample Skip IW, although that drops data"
    )
    tenfold = f"{weight} is at least 10, and twice that of Sample Skip IW"
    return [
        _compare(tenfold, one, skip, "largest_weight", 2.0, also=(one["largest_weight"] or math.inf) >= 10.0),
        _compare(f"{variance} is at least twice that of Sample Skip IW", one, skip, "gradient_variance", 2.0),
        _compare(f"{weight} is at least twice that at temperature 10", one, hot, "largest_weight", 2.0),
        _compare(f"{variance} is larger than at temperature 10", one, hot, "gradient_variance", 1.0),
        _compare(size, skip, one, "ess", 1.0, core=False),
    ]


def _trace(study: Record, method: str, temperature: float) -> dict[str, Any]:
    """Summarises a trace: the largest weight of all checkpoints, and means of the rest."""
    found = [
        record
        for record in study.get("common", ())
        if record.get("method") == method and math.isclose(record.get("temperature", math.nan), temperature)
    ]
    summary: dict[str, Any] = {"name": f"{PAPER_STRATEGIES[method].label} at temperature {temperature:g}"}
    for key, over in (("largest_weight", max), ("gradient_variance", statistics.fmean), ("ess", statistics.fmean)):
        numbers = [v for v in (found[0].get(key) or ()) if v is not None] if found else []
        summary[key] = float(over(numbers)) if numbers and all(map(math.isfinite, numbers)) else None
    return summary


def _compare(
    rule: str, larger: Record, smaller: Record, key: str, times: float, *, also: bool = True, core: bool = True
) -> Part:
    """Makes a part that says that a number is larger than another, or at least so many times as large."""
    a, b = larger[key], smaller[key]
    if a is None or b is None:
        return _missing(rule, core=core)
    word = {"largest_weight": "largest weight", "gradient_variance": "variance", "ess": "effective sample size"}[key]
    holds = also and (a > b if times == 1.0 else a >= times * b)
    measured = f"{word}: {larger['name']} {a:.3g}, {smaller['name']} {b:.3g}"
    figures = {f"{larger['name']} {word}": a, f"{smaller['name']} {word}": b}
    return Part(rule=rule, measured=measured, verdict=_yes(holds), core=core, figures=figures)


def judge_marginals(study: Record) -> list[Part]:
    """Claim 11: Sinkhorn is close to the marginals of Gumbel-Matching for n >= 4, and to those of Gibbs, at tau = 1.

    How close is relative: the mean absolute difference of Sinkhorn, divided by that of the router's own p.

    Args:
        study: `rows`, records by n, k and sd (the inverse of the temperature) with mean absolute differences.
    """
    rows: list[Record] = [row for row in study.get("rows", ()) if {"n", "sd"} <= row.keys()]
    parts: list[Part] = []
    for other, name in (("gumbel_matching", "Gumbel-Matching"), ("gibbs", "the Gibbs distribution")):
        rule = (
            f"at temperature 1 and every size with n >= 4, Sinkhorn differs from the marginals of {name} by at most a "
            "quarter of what the router's own p differs by (means over entries)"
        )
        # That Sinkhorn approximates Gibbs too is what the paper cites, without a word on how closely.
        parts.append(_relative_part(rule, rows, other, core=other == "gumbel_matching"))
    rule = "at temperature 1, Sinkhorn is further from Gumbel-Matching below n = 4 than at any size with n >= 4"
    at_one = [row for row in rows if row["sd"] == _AT_ONE]
    small, large = (
        _values([row for row in at_one if (row["n"] >= 4) == big], "sinkhorn_vs_gumbel_matching")
        for big in (False, True)
    )
    if small is None or large is None:
        return [*parts, _missing(rule, core=False)]
    measured = f"{max(small):.3g} below n = 4, at most {max(large):.3g} from n = 4 on"
    figures = {"sinkhorn vs gumbel_matching, n < 4": max(small)}
    verdict = _yes(max(small) > max(large))
    return [*parts, Part(rule=rule, measured=measured, verdict=verdict, core=False, figures=figures)]


def _relative_part(rule: str, rows: Sequence[Record], other: str, *, core: bool) -> Part:
    """Judges at temperature 1, and reports every temperature: the worst over sizes with n >= 4, and its mean."""
    large = [row for row in rows if row["n"] >= 4]
    ratios: dict[float, list[float]] = {}
    for sd in sorted({row["sd"] for row in large}):
        at = [row for row in large if row["sd"] == sd]
        found, scale = _values(at, f"sinkhorn_vs_{other}"), _values(at, f"unbalanced_vs_{other}")
        if found is not None and scale is not None:
            ratios[sd] = [f / max(s, 1e-12) for f, s in zip(found, scale, strict=True)]
    if _AT_ONE not in ratios:
        return _missing(rule, core=core)
    shown = [
        f"{statistics.fmean(found):.0%} of it at temperature {1 / sd:g} (at worst {max(found):.0%})"
        for sd, found in ratios.items()
    ]
    figures = {f"sinkhorn vs {other}, of unbalanced, temperature {1 / sd:g}": max(r) for sd, r in ratios.items()}
    verdict = _yes(max(ratios[_AT_ONE]) <= _CLOSE)
    return Part(rule=rule, measured="; ".join(shown), verdict=verdict, core=core, figures=figures)


def judge_maximum_entropy(study: Record) -> list[Part]:
    """Claim 12: log u is linear in log p, up to factors for rows and columns.

    Args:
        study: `problems`, records with `r_squared`, `tau`, and `total_variation` where it was computed.
    """
    problems: Sequence[Record] = study.get("problems", ())
    rule = "the median R^2 of log u against log p, row and column factors removed, is at least 0.95"
    also = "the worst is at least 0.8"
    near = (
        "the median total variation between the maximum-entropy distribution and the one proportional to "
        "(prod p)^(1/tau) is at most 0.05"
    )
    found, taus = _values(problems, "r_squared"), _values(problems, "tau")
    distances = _values([p for p in problems if p.get("total_variation") is not None], "total_variation")
    if found is None or taus is None:
        return [_missing(rule), _missing(also, core=False), _missing(near, core=False)]
    median, worst, low, high = statistics.median(found), min(found), min(taus), max(taus)
    figures = {"median r_squared": median, "least tau": low, "largest tau": high}
    measured = f"median {median:.4g} over {len(found)} matrices, tau {low:.3g} to {high:.3g}"
    worst_figures = {"worst r_squared": worst}
    parts = [
        Part(rule=rule, measured=measured, verdict=_yes(median >= 0.95), figures=figures),
        Part(rule=also, measured=f"worst {worst:.4g}", verdict=_yes(worst >= 0.8), core=False, figures=worst_figures),
    ]
    if distances is None:
        return [*parts, _missing(near, core=False)]
    distance = statistics.median(distances)
    figures = {"median total variation": distance, "largest total variation": max(distances)}
    measured = f"median {distance:.3g}, largest {max(distances):.3g}"
    return [*parts, Part(rule=near, measured=measured, verdict=_yes(distance <= 0.05), core=False, figures=figures)]


def judge_solver_time(study: Record) -> list[Part]:
    """Claim 13: where n >= 1,024 and n >= 64 k, cycle cancelling beats the Hungarian algorithm, in few improvements.

    Args:
        study: `sizes`, records by n and k with `cycle_cancelling_ms`, `hungarian_ms`, `improvements`.
    """
    sizes: list[Record] = [
        s for s in study.get("sizes", ()) if s.get("n", 0) >= max(_ROWS_EACH * s.get("k", 0), _LEAST_ROWS)
    ]
    timed = [size for size in sizes if size.get("hungarian_ms") is not None]
    rule = "wherever n >= 1,024 and n >= 64 k, the Hungarian algorithm takes at least 5 times as long"
    ours, theirs = _values(timed, "cycle_cancelling_ms"), _values(timed, "hungarian_ms")
    if ours is None or theirs is None:
        parts = [_missing(rule)]
    else:
        ratios = {f"{s['n']:,} x {s['k']}": h / c for s, h, c in zip(timed, theirs, ours, strict=True)}
        measured = ", ".join(f"{ratio:.3g} times at {size}" for size, ratio in ratios.items())
        figures = {f"hungarian / cycle-cancelling {size}": ratio for size, ratio in ratios.items()}
        parts = [Part(rule=rule, measured=measured, verdict=_yes(min(ratios.values()) >= _MUCH), figures=figures)]
    rule = "there, the mean number of improvements is at most 10 or n/100, whichever is more, at every size"
    counts = _values(sizes, "improvements")
    if counts is None:
        return [*parts, _missing(rule)]
    few = all(count <= max(10.0, size["n"] / 100) for size, count in zip(sizes, counts, strict=True))
    measured = f"{min(counts):.3g} to {max(counts):.3g} improvements"
    figures = {f"improvements {s['n']} x {s['k']}": c for s, c in zip(sizes, counts, strict=True)}
    return [*parts, Part(rule=rule, measured=measured, verdict=_yes(few), figures=figures)]


def judge_elbo(study: Record) -> list[Part]:
    """Claim 15: the router ends deterministic under the ELBO, and less so under the marginal likelihood.

    Args:
        study: `runs`, each with `objective`, `sd`, `seed`, `router_entropy`.
    """
    runs: list[Record] = [r for r in study.get("runs", ()) if {"objective", "sd", "seed"} <= r.keys()]
    rule = (
        "trained on the ELBO, the router's mean entropy at the end (median over seeds) is at most 0.05 nats for every "
        "sd of p(y|x,z)"
    )
    more = "trained on the marginal likelihood it is larger, for every sd (mean difference on the same seeds)"
    sds = sorted({float(r["sd"]) for r in runs})
    medians: dict[float, float] = {}
    gaps: dict[float, tuple[float, tuple[float, float]]] = {}
    for sd in sds:
        ends = [
            {r["seed"]: r["router_entropy"] for r in runs if r["objective"] == objective and r["sd"] == sd}
            for objective in ("elbo", "marginal")
        ]
        seeds = sorted(ends[0].keys() & ends[1].keys())
        if len(seeds) > 1:
            medians[sd] = statistics.median(ends[0].values())
            gaps[sd] = mean_interval([ends[1][seed] - ends[0][seed] for seed in seeds])
    if not gaps:
        return [_missing(rule), _missing(more)]
    one = ", ".join(f"{median:.3g} at sd {sd:.3g}" for sd, median in medians.items())
    two = ", ".join(f"{m:+.3g} ({low:+.3g} to {high:+.3g}) at sd {sd:.3g}" for sd, (m, (low, high)) in gaps.items())
    verdict = all_hold(above(interval, 0.0) for _, interval in gaps.values())
    figures_one = {f"entropy elbo sd {sd:.3g}": median for sd, median in medians.items()}
    figures_two = {f"entropy marginal - elbo sd {sd:.3g}": mean for sd, (mean, _) in gaps.items()}
    return [
        Part(rule=rule, measured=one, verdict=_yes(max(medians.values()) <= 0.05), figures=figures_one),
        Part(rule=more, measured=two, verdict=verdict, figures=figures_two),
    ]


def judge_noise(study: Record) -> list[Part]:
    """Claim 16: Gumbel noise does as well as Gaussian noise and jitter, each at the scale that suits it best.

    Args:
        study: `runs`, each with kind, scale, method, importance, and the mse of each seed.
    """
    best: dict[str, dict[str, Setting]] = {}
    for r in study.get("runs", ()):
        if {"kind", "method", "importance", "mse"} <= r.keys() and r["method"] in PAPER_STRATEGIES:
            name = PAPER_STRATEGIES[r["method"]].label + ("" if r["importance"] else " without importance weights")
            solved = {seed: mse is not None and mse < THRESHOLD for seed, mse in enumerate(r["mse"])}
            found, kinds = Setting(f"{name} {r['kind']}", solved), best.setdefault(name, {})
            kinds[r["kind"]] = max(kinds.get(r["kind"], found), found, key=lambda setting: setting.fraction)
    return [_compare_noise(best, other) for other in ("gaussian", "jitter")]


def _compare_noise(best: Mapping[str, Mapping[str, Setting]], other: str) -> Part:
    """Compares Gumbel noise with one other kind, wherever either of the two solves the task for most seeds."""
    name = {"gaussian": "Gaussian noise", "jitter": "input jitter"}[other]
    rule = (
        f"wherever Gumbel noise or {name} solves the task for most seeds, Gumbel noise at its best scale solves at "
        f"most {MARGIN} fewer of the seeds than {name} at its best"
    )
    pairs = {s: (kinds[other], kinds["gumbel"]) for s, kinds in best.items() if {"gumbel", other} <= kinds.keys()}
    trained = {s: pair for s, pair in pairs.items() if max(setting.fraction for setting in pair) > HALF}
    if not trained:
        measured = f"neither trains the model with {', '.join(pairs)}" if pairs else "not run"
        return Part(rule=rule, measured=measured, verdict="undecided" if pairs else "not judged")
    parts = [
        difference_part(rule, [theirs], [ours], (f"{setting}: {name}", "Gumbel noise"), at_most=True)
        for setting, (theirs, ours) in trained.items()
    ]
    return Part(
        rule=rule,
        measured="; ".join(part.measured for part in parts),
        verdict=all_hold(part.verdict for part in parts),
        figures={setting.name: setting.fraction for pair in pairs.values() for setting in pair},
        seeds=max((part.seeds for part in parts if part.seeds is not None), default=None),
    )


STUDY_JUDGES: dict[str, Callable[[Record], list[Part]]] = {
    "traces": judge_variance,
    "marginals": judge_marginals,
    "maximum_entropy": judge_maximum_entropy,
    "solver_time": judge_solver_time,
    "elbo": judge_elbo,
    "noise": judge_noise,
}
"""What judges the claim of each study."""
