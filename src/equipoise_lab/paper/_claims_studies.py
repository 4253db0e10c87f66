# SPDX-License-Identifier: Apache-2.0
"""Judges the claims that the smaller studies decide: weights, marginals, maximum entropy, solver, ELBO, noise.

A study is a plain mapping, as its JSON file has it. The statements, in the order of the parts that a function returns,
are those of `claims.toml`. What one needs and does not find makes it "not judged".
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab.paper._results import THRESHOLD
from equipoise_lab.paper._rules import HALF, Part, Setting, Verdict, above, all_hold, difference_part, mean_interval

Record = Mapping[str, Any]
# "Much faster" is this many times, and k << n is this many rows for each expert. Below the least number of rows, what
# is compared is the fixed cost of a call.
_MUCH, _ROWS_EACH, _LEAST_ROWS = 5.0, 64, 1024
# "Closely": this part of the distance of the router's own p.
_CLOSE = 0.25
# The standard deviation of the logits at temperature 1: see `_studies/_marginals.py`.
_AT_ONE = 1.0


_NOT_RUN = Part(measured="not run", verdict="not judged")


def _values(records: Iterable[Record], key: str) -> list[float]:
    """The numbers under a key; none where one is missing or not finite."""
    found = [record.get(key) for record in records]
    numbers = [float(v) for v in found if isinstance(v, int | float) and math.isfinite(v)]
    return numbers if len(numbers) == len(found) else []


def _part(holds: bool, measured: str, figures: dict[str, float]) -> Part:
    verdict: Verdict = "holds" if holds else "does not hold"
    return Part(measured=measured, verdict=verdict, figures=figures)


def judge_variance(study: Record) -> list[Part]:
    """Claim 4: at the same routers, Gumbel-Matching IW has larger weights and more variance than Sample Skip IW.

    Args:
        study: `common`, records by method and temperature with `largest_weight`, `gradient_variance` and `ess` along
            the training of Sample at temperature 1.
    """
    one, skip, hot = (_trace(study, *where) for where in (("gm-iw", 1.0), ("skip-iw", 1.0), ("gm-iw", 10.0)))
    return [
        _compare(one, skip, "largest weight", 2.0, least=10.0),
        _compare(one, skip, "variance", 2.0),
        _compare(one, hot, "largest weight", 2.0),
        _compare(one, hot, "variance", 1.0),
        _compare(skip, one, "effective sample size", 1.0),
    ]


def _trace(study: Record, method: str, temperature: float) -> dict[str, Any]:
    """Summarises a trace: the largest weight of all checkpoints, and means of the rest; None where there are none."""
    records = [
        record
        for record in study.get("common", ())
        if record.get("method") == method and math.isclose(record.get("temperature", math.nan), temperature)
    ]
    summary: dict[str, Any] = {"name": f"{PAPER_STRATEGIES[method].label} at temperature {temperature:g}"}
    for word, key, over in (
        ("largest weight", "largest_weight", max),
        ("variance", "gradient_variance", statistics.fmean),
        ("effective sample size", "ess", statistics.fmean),
    ):
        numbers = [v for record in records[:1] for v in record.get(key, ()) if v is not None]
        summary[word] = float(over(numbers)) if numbers and all(map(math.isfinite, numbers)) else None
    return summary


def _compare(larger: Record, smaller: Record, word: str, times: float, *, least: float = 0.0) -> Part:
    """Judges a number to be larger than another, or at least so many times as large, and not below the least."""
    a, b = larger[word], smaller[word]
    if a is None or b is None:
        return _NOT_RUN
    holds = a >= least and (a > b if times == 1.0 else a >= times * b)
    figures = {f"{larger['name']} {word}": a, f"{smaller['name']} {word}": b}
    return _part(holds, f"{word}: {larger['name']} {a:.3g}, {smaller['name']} {b:.3g}", figures)


def judge_marginals(study: Record) -> list[Part]:
    """Claim 11: Sinkhorn is close to the marginals of Gumbel-Matching for n >= 4, and to those of Gibbs, at tau = 1.

    How close is relative: the mean absolute difference of Sinkhorn, divided by that of the router's own p.

    Args:
        study: `rows`, records by n, k and sd (the inverse of the temperature) with mean absolute differences.
    """
    rows: list[Record] = [row for row in study.get("rows", ()) if {"n", "sd"} <= row.keys()]
    parts = [_relative_part([row for row in rows if row["n"] >= 4], other) for other in ("gumbel_matching", "gibbs")]
    small, large = (
        _values([r for r in rows if r["sd"] == _AT_ONE and (r["n"] >= 4) == big], "sinkhorn_vs_gumbel_matching")
        for big in (False, True)
    )
    if not small or not large:
        return [*parts, _NOT_RUN]
    measured = f"{max(small):.3g} below n = 4, at most {max(large):.3g} from n = 4 on"
    figures = {"sinkhorn vs gumbel_matching, n < 4": max(small)}
    return [*parts, _part(max(small) > max(large), measured, figures)]


def _relative_part(rows: Sequence[Record], other: str) -> Part:
    """Judges at temperature 1, and reports every temperature: the worst over sizes, and the mean."""
    ratios: dict[float, list[float]] = {}
    for sd in sorted({row["sd"] for row in rows}):
        at = [row for row in rows if row["sd"] == sd]
        found, scale = _values(at, f"sinkhorn_vs_{other}"), _values(at, f"unbalanced_vs_{other}")
        if found and scale:
            ratios[sd] = [f / max(s, 1e-12) for f, s in zip(found, scale, strict=True)]
    if _AT_ONE not in ratios:
        return _NOT_RUN
    measured = "; ".join(
        f"{statistics.fmean(found):.0%} of it at temperature {1 / sd:g} (at worst {max(found):.0%})"
        for sd, found in ratios.items()
    )
    figures = {f"sinkhorn vs {other}, of unbalanced, temperature {1 / sd:g}": max(r) for sd, r in ratios.items()}
    return _part(max(ratios[_AT_ONE]) <= _CLOSE, measured, figures)


def judge_maximum_entropy(study: Record) -> list[Part]:
    """Claim 12: log u is linear in log p, up to factors for rows and columns.

    Args:
        study: `problems`, records with `r_squared`, `tau`, and `total_variation` where it was computed.
    """
    problems: Sequence[Record] = study.get("problems", ())
    found, taus = _values(problems, "r_squared"), _values(problems, "tau")
    distances = _values([p for p in problems if p.get("total_variation") is not None], "total_variation")
    if not found or not taus:
        return [_NOT_RUN] * 3
    median, worst, low, high = statistics.median(found), min(found), min(taus), max(taus)
    measured = f"median {median:.4g} over {len(found)} matrices, tau {low:.3g} to {high:.3g}"
    figures = {"median r_squared": median, "least tau": low, "largest tau": high}
    parts = [
        _part(median >= 0.95, measured, figures),
        _part(worst >= 0.8, f"worst {worst:.4g}", {"worst r_squared": worst}),
    ]
    if not distances:
        return [*parts, _NOT_RUN]
    distance, largest = statistics.median(distances), max(distances)
    figures = {"median total variation": distance, "largest total variation": largest}
    return [*parts, _part(distance <= 0.05, f"median {distance:.3g}, largest {largest:.3g}", figures)]


def judge_solver_time(study: Record) -> list[Part]:
    """Claim 13: where n >= 1,024 and n >= 64 k, cycle cancelling beats the Hungarian algorithm, in few improvements.

    Args:
        study: `sizes`, records by n and k with `cycle_cancelling_ms`, `hungarian_ms`, `improvements`.
    """
    sizes: list[Record] = [
        s for s in study.get("sizes", ()) if s.get("n", 0) >= max(_ROWS_EACH * s.get("k", 0), _LEAST_ROWS)
    ]
    timed = [size for size in sizes if size.get("hungarian_ms") is not None]
    ours, theirs, counts = (
        _values(timed, "cycle_cancelling_ms"),
        _values(timed, "hungarian_ms"),
        _values(sizes, "improvements"),
    )
    faster, few = _NOT_RUN, _NOT_RUN
    if ours and theirs:
        ratios = {f"{s['n']:,} x {s['k']}": h / c for s, h, c in zip(timed, theirs, ours, strict=True)}
        measured = ", ".join(f"{ratio:.3g} times at {size}" for size, ratio in ratios.items())
        figures = {f"hungarian / cycle-cancelling {size}": ratio for size, ratio in ratios.items()}
        faster = _part(min(ratios.values()) >= _MUCH, measured, figures)
    if counts:
        holds = all(count <= max(10.0, size["n"] / 100) for size, count in zip(sizes, counts, strict=True))
        figures = {f"improvements {s['n']} x {s['k']}": c for s, c in zip(sizes, counts, strict=True)}
        few = _part(holds, f"{min(counts):.3g} to {max(counts):.3g} improvements", figures)
    return [faster, few]


def judge_elbo(study: Record) -> list[Part]:
    """Claim 15: the router ends deterministic under the ELBO, and less so under the marginal likelihood.

    Args:
        study: `runs`, each with `objective`, `sd`, `seed`, `router_entropy`.
    """
    runs: list[Record] = [r for r in study.get("runs", ()) if {"objective", "sd", "seed"} <= r.keys()]
    medians: dict[float, float] = {}
    gaps: dict[float, tuple[float, tuple[float, float]]] = {}
    for sd in sorted({float(r["sd"]) for r in runs}):
        elbo, marginal = (
            {r["seed"]: r["router_entropy"] for r in runs if r["objective"] == objective and r["sd"] == sd}
            for objective in ("elbo", "marginal")
        )
        seeds = sorted(elbo.keys() & marginal.keys())
        if len(seeds) > 1:
            medians[sd] = statistics.median(elbo.values())
            gaps[sd] = mean_interval([marginal[seed] - elbo[seed] for seed in seeds])
    if not gaps:
        return [_NOT_RUN] * 2
    one = ", ".join(f"{median:.3g} at sd {sd:.3g}" for sd, median in medians.items())
    two = ", ".join(f"{m:+.3g} ({low:+.3g} to {high:+.3g}) at sd {sd:.3g}" for sd, (m, (low, high)) in gaps.items())
    figures = {f"entropy elbo sd {sd:.3g}": median for sd, median in medians.items()}
    further = {f"entropy marginal - elbo sd {sd:.3g}": mean for sd, (mean, _) in gaps.items()}
    verdict = all_hold(above(interval, 0.0) for _, interval in gaps.values())
    return [
        _part(max(medians.values()) <= 0.05, one, figures),
        Part(measured=two, verdict=verdict, figures=further),
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
    return [_compare_noise(best, *other) for other in (("gaussian", "Gaussian noise"), ("jitter", "input jitter"))]


def _compare_noise(best: Mapping[str, Mapping[str, Setting]], kind: str, name: str) -> Part:
    """Compares Gumbel noise with one other kind, wherever either of the two solves the task for most seeds."""
    pairs = {s: (kinds[kind], kinds["gumbel"]) for s, kinds in best.items() if {"gumbel", kind} <= kinds.keys()}
    if not pairs:
        return _NOT_RUN
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


STUDY_JUDGES: dict[str, Callable[[Record], list[Part]]] = {
    "traces": judge_variance,
    "marginals": judge_marginals,
    "maximum_entropy": judge_maximum_entropy,
    "solver_time": judge_solver_time,
    "elbo": judge_elbo,
    "noise": judge_noise,
}
"""What judges the claim of each study."""
