# SPDX-License-Identifier: Apache-2.0
"""Rules for the claims that the smaller studies decide: weights, marginals, maximum entropy, solver, ELBO.

A study is a plain mapping, as its JSON file has it. What a rule needs and does not find makes it "not judged".
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab.paper._rules import Grade, Part, claim, grade

Record = Mapping[str, Any]


def _values(records: Iterable[Record], key: str) -> list[float] | None:
    """The finite numbers under a key, or None where one is missing or there is no record."""
    found = [record.get(key) for record in records]
    numbers = [float(v) for v in found if isinstance(v, int | float) and math.isfinite(v)]
    return numbers if found and len(numbers) == len(found) else None


def _missing(rule: str, *, core: bool = True) -> Part:
    return Part(rule=rule, measured="not run", grade=None, core=core)


@claim(
    4,
    "The reason why Gumbel-Matching falls short is the variance that large importance weights bring; a higher "
    "temperature avoids them.",
    study="traces",
)
def judge_variance(study: Record) -> list[Part]:
    """Claim 4: at the same routers, Gumbel-Matching IW has larger weights and more variance than Sample Skip IW.

    Args:
        study: `common`, records by method and temperature with `largest_weight`, `gradient_variance` and `ess` along
            the training of Sample at temperature 1.
    """
    one, skip, hot = (
        _trace(study, method, temperature)
        for method, temperature in (("gm-iw", 1.0), ("skip-iw", 1.0), ("gm-iw", 10.0))
    )
    weight = "the largest weight along training of Gumbel-Matching IW at temperature 1"
    variance = "the variance of the router's gradient (mean along training) of Gumbel-Matching IW at temperature 1"
    return [
        _compare(
            f"{weight} is at least 10, and twice that of Sample Skip IW (in part: larger)",
            (one["largest_weight"], skip["largest_weight"]),
            lambda a, b: grade(a >= 10.0 and a >= 2.0 * b, a > b),
            ("gm-iw largest weight", "skip-iw largest weight"),
        ),
        _compare(
            f"{variance} is at least twice that of Sample Skip IW (in part: larger)",
            (one["gradient_variance"], skip["gradient_variance"]),
            lambda a, b: grade(a >= 2.0 * b, a > b),
            ("gm-iw variance", "skip-iw variance"),
        ),
        _compare(
            f"{weight} is at least twice that at temperature 10 (in part: larger)",
            (one["largest_weight"], hot["largest_weight"]),
            lambda a, b: grade(a >= 2.0 * b, a > b),
            ("gm-iw largest weight at 1", "gm-iw largest weight at 10"),
        ),
        _compare(
            f"{variance} is larger than at temperature 10 (in part: as large, within a tenth)",
            (one["gradient_variance"], hot["gradient_variance"]),
            lambda a, b: grade(a > b, a >= 0.9 * b),
            ("gm-iw variance at 1", "gm-iw variance at 10"),
        ),
        _compare(
            "the effective sample size (mean along training) at temperature 1 is lower with Gumbel-Matching IW than "
            "with Sample Skip IW, although that drops data (in part: higher by at most a tenth)",
            (one["ess"], skip["ess"]),
            lambda a, b: grade(a < b, a <= 1.1 * b),
            ("gm-iw effective sample size", "skip-iw effective sample size"),
            core=False,
        ),
    ]


def _trace(study: Record, method: str, temperature: float) -> dict[str, float | None]:
    """Summarises a trace: the largest weight of all checkpoints, and means of the rest."""
    found = [
        record
        for record in study.get("common", ())
        if record.get("method") == method and math.isclose(record.get("temperature", math.nan), temperature)
    ]
    summary: dict[str, float | None] = {}
    for key, over in (("largest_weight", max), ("gradient_variance", statistics.fmean), ("ess", statistics.fmean)):
        numbers = [v for v in (found[0].get(key) or ()) if v is not None] if found else []
        summary[key] = float(over(numbers)) if numbers and all(map(math.isfinite, numbers)) else None
    return summary


def _compare(
    rule: str,
    pair: tuple[float | None, float | None],
    graded: Callable[[float, float], float],
    names: tuple[str, str],
    *,
    core: bool = True,
) -> Part:
    """Makes a part from two numbers and a rule over them."""
    a, b = pair
    if a is None or b is None:
        return _missing(rule, core=core)
    measured = f"{_spell_out(names[0])} {a:.3g}, {_spell_out(names[1])} {b:.3g}"
    return Part(rule=rule, measured=measured, grade=graded(a, b), core=core, figures={names[0]: a, names[1]: b})


def _spell_out(name: str) -> str:
    """Puts a strategy's label in place of its name, which comes first.

    Example:
        >>> _spell_out("gm-iw largest weight")
        'Gumbel-Matching IW: largest weight'
    """
    method, _, rest = name.partition(" ")
    return f"{PAPER_STRATEGIES[method].label}: {rest}"


@claim(
    11,
    "Sinkhorn closely approximates the marginals of Gumbel-Matching for n >= 4, and those of the Gibbs distribution.",
    study="marginals",
)
def judge_marginals(study: Record) -> list[Part]:
    """Claim 11: Sinkhorn is close to the marginals of Gumbel-Matching for n >= 4, and to those of Gibbs.

    Args:
        study: `sizes`, records by n and k with mean absolute differences of marginals.
    """
    sizes: list[Record] = [size for size in study.get("sizes", ()) if "n" in size]
    large = [size for size in sizes if size["n"] >= 4]
    parts: list[Part] = []
    for other, name in (("gumbel_matching", "Gumbel-Matching"), ("gibbs", "the Gibbs distribution")):
        rule = (
            f"at every size with n >= 4, Sinkhorn differs from the marginals of {name} by at most 0.02 in the mean "
            "over entries (in part: on average over the sizes)"
        )
        found, scale = _values(large, f"sinkhorn_vs_{other}"), _values(large, f"unbalanced_vs_{other}")
        parts.append(_limit_part(rule, found, 0.02, f"sinkhorn vs {other}"))
        rule = f"that is at most a quarter of the difference of the router's own p from {name} (in part: on average)"
        ratios = (
            None if found is None or scale is None else [f / max(s, 1e-12) for f, s in zip(found, scale, strict=True)]
        )
        parts.append(_limit_part(rule, ratios, 0.25, f"sinkhorn vs {other}, of unbalanced", core=False))
    rule = (
        "below n = 4 Sinkhorn differs more from Gumbel-Matching than at any size with n >= 4 (in part: than on average)"
    )
    small = _values([size for size in sizes if size["n"] < 4], "sinkhorn_vs_gumbel_matching")
    found = _values(large, "sinkhorn_vs_gumbel_matching")
    if small is None or found is None:
        return [*parts, _missing(rule, core=False)]
    worst = max(small)
    given = grade(worst > max(found), worst > statistics.fmean(found))
    measured = f"{worst:.3g} below n = 4, at most {max(found):.3g} from n = 4 on"
    figures = {"sinkhorn vs gumbel_matching, n < 4": worst}
    return [*parts, Part(rule=rule, measured=measured, grade=given, core=False, figures=figures)]


def _limit_part(rule: str, found: list[float] | None, limit: float, name: str, *, core: bool = True) -> Part:
    """Makes a part that holds when all numbers stay within a limit, and in part when their mean does."""
    if found is None:
        return _missing(rule, core=core)
    mean, worst = statistics.fmean(found), max(found)
    measured = f"{mean:.3g} on average, {worst:.3g} at worst"
    figures = {f"{name}, mean": mean, f"{name}, worst": worst}
    return Part(rule=rule, measured=measured, grade=grade(worst <= limit, mean <= limit), core=core, figures=figures)


@claim(
    12,
    "In the maximum-entropy distribution with marginals p, u_ij is about p_ij^(1/tau) for some tau.",
    study="maximum_entropy",
)
def judge_maximum_entropy(study: Record) -> list[Part]:
    """Claim 12: log u is linear in log p, up to factors for rows and columns.

    Args:
        study: `problems`, records with `r_squared`, `tau`, and `total_variation` where it was computed.
    """
    problems: Sequence[Record] = study.get("problems", ())
    rule = "the median R^2 of log u against log p, row and column factors removed, is at least 0.95 (in part: 0.8)"
    also = "the worst is at least 0.8 (in part: 0.5)"
    near = (
        "the median total variation between the maximum-entropy distribution and the one proportional to "
        "(prod p)^(1/tau) is at most 0.05 (in part: 0.1)"
    )
    found, taus = _values(problems, "r_squared"), _values(problems, "tau")
    if found is None or taus is None:
        return [_missing(rule), _missing(also, core=False), _missing(near, core=False)]
    median, worst = statistics.median(found), min(found)
    low, high = min(taus), max(taus)
    parts = [
        Part(
            rule=rule,
            measured=f"median {median:.4g} over {len(found)} matrices, tau {low:.3g} to {high:.3g}",
            grade=grade(median >= 0.95, median >= 0.8),
            figures={"median r_squared": median, "least tau": low, "largest tau": high},
        ),
        Part(
            rule=also,
            measured=f"worst {worst:.4g}",
            grade=grade(worst >= 0.8, worst >= 0.5),
            core=False,
            figures={"worst r_squared": worst},
        ),
    ]
    distances = _values([p for p in problems if p.get("total_variation") is not None], "total_variation")
    if distances is None:
        return [*parts, _missing(near, core=False)]
    distance = statistics.median(distances)
    given = grade(distance <= 0.05, distance <= 0.1)
    figures = {"median total variation": distance, "largest total variation": max(distances)}
    measured = f"median {distance:.3g}, largest {max(distances):.3g}"
    return [*parts, Part(rule=near, measured=measured, grade=given, core=False, figures=figures)]


@claim(
    13,
    "For k << n, cycle cancelling is much faster than the Hungarian algorithm and needs few improvements.",
    study="solver_time",
)
def judge_solver_time(study: Record) -> list[Part]:
    """Claim 13: where n >= 16 k and n >= 256, cycle cancelling beats the Hungarian algorithm, with few improvements.

    Args:
        study: `sizes`, records by n and k with `cycle_cancelling_ms`, `hungarian_ms`, `improvements`.
    """
    sizes: list[Record] = [s for s in study.get("sizes", ()) if s.get("n", 0) >= max(16 * s.get("k", 0), 256)]
    timed = [size for size in sizes if size.get("hungarian_ms") is not None]
    rule = "wherever n >= 256 and n >= 16 k, the Hungarian algorithm takes at least 5 times as long (in part: longer)"
    ours, theirs = _values(timed, "cycle_cancelling_ms"), _values(timed, "hungarian_ms")
    if ours is None or theirs is None:
        parts = [_missing(rule)]
    else:
        ratios = [h / c for h, c in zip(theirs, ours, strict=True)]
        below = [f"{s['n']:,} x {s['k']}" for s, ratio in zip(timed, ratios, strict=True) if ratio < 5.0]
        measured = f"{min(ratios):.3g} to {max(ratios):.3g} times as long, {len(ratios)} sizes"
        measured += f"; less than 5 times at {', '.join(below)}" if below else ""
        figures = {f"hungarian / cycle-cancelling {s['n']} x {s['k']}": r for s, r in zip(timed, ratios, strict=True)}
        given = grade(min(ratios) >= 5.0, min(ratios) > 1.0)
        parts = [Part(rule=rule, measured=measured, grade=given, figures=figures)]
    rule = (
        "there, the mean number of improvements is at most 10 or n/100, whichever is more (in part: 10 or n/20), at "
        "every size"
    )
    counts = _values(sizes, "improvements")
    if counts is None:
        return [*parts, _missing(rule)]
    given: Grade = min(_grade_few(size["n"], count) for size, count in zip(sizes, counts, strict=True))
    measured = f"{min(counts):.3g} to {max(counts):.3g} improvements"
    figures = {f"improvements {s['n']} x {s['k']}": c for s, c in zip(sizes, counts, strict=True)}
    return [*parts, Part(rule=rule, measured=measured, grade=given, figures=figures)]


def _grade_few(n: int, count: float) -> float:
    return grade(count <= max(10.0, n / 100), count <= max(10.0, n / 20))


@claim(
    15,
    "Training the ELBO, and not the marginal likelihood, keeps the router's choices deterministic at the end.",
    study="elbo",
)
def judge_elbo(study: Record) -> list[Part]:
    """Claim 15: the router ends deterministic under the ELBO and stochastic under the marginal likelihood.

    Args:
        study: `runs`, each with `objective`, `sd`, `seed`, `router_entropy`.
    """
    runs: list[Record] = [r for r in study.get("runs", ()) if {"objective", "sd"} <= r.keys()]
    medians: dict[tuple[str, float], float] = {}
    for objective, sd in {(str(r["objective"]), float(r["sd"])) for r in runs}:
        found = _values([r for r in runs if r["objective"] == objective and r["sd"] == sd], "router_entropy")
        if found is not None:
            medians[objective, sd] = statistics.median(found)
    pairs = {
        sd: (entropy, medians["marginal", sd])
        for (objective, sd), entropy in sorted(medians.items())
        if objective == "elbo" and ("marginal", sd) in medians
    }
    rule = (
        "trained on the ELBO, the router's mean entropy at the end (median over seeds) is at most 0.05 nats for every "
        "sd of p(y|x,z) (in part: for some)"
    )
    more = "trained on the marginal likelihood it is at least 0.05 and twice that, for every sd (in part: for some)"
    if not pairs:
        return [_missing(rule), _missing(more)]
    sharp = [elbo <= 0.05 for elbo, _ in pairs.values()]
    vague = [marginal >= 0.05 and marginal >= 2.0 * elbo for elbo, marginal in pairs.values()]
    one = ", ".join(f"{elbo:.3g} at sd {sd:g}" for sd, (elbo, _) in pairs.items())
    two = ", ".join(f"{marginal:.3g} at sd {sd:g}" for sd, (_, marginal) in pairs.items())
    figures_one = {f"entropy elbo sd {sd:g}": elbo for sd, (elbo, _) in pairs.items()}
    figures_two = {f"entropy marginal sd {sd:g}": marginal for sd, (_, marginal) in pairs.items()}
    return [
        Part(rule=rule, measured=one, grade=grade(all(sharp), any(sharp)), figures=figures_one),
        Part(rule=more, measured=two, grade=grade(all(vague), any(vague)), figures=figures_two),
    ]
