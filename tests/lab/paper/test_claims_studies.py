# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

import pytest

from equipoise_lab.paper._claims import judge

NUMBERS = {"traces": 4, "marginals": 11, "maximum_entropy": 12, "solver_time": 13, "elbo": 15, "noise": 16}


def verdict(studies: dict[str, Any], name: str) -> str:
    return next(claim.verdict for claim in judge([], studies) if claim.number == NUMBERS[name])


def trace(study: Any, method: str, temperature: float, key: str, value: float) -> None:
    for record in study["common"]:
        if (record["method"], record["temperature"]) == (method, temperature):
            record[key] = [value, value]


def scale_weights(study: Any, factor: float) -> None:
    for record in study["common"]:
        record["largest_weight"] = [factor * weight for weight in record["largest_weight"]]


def change(study: Any, key: str, value: object, where: Callable[[Any], bool] = lambda record: True) -> None:
    """Changes a key in the records of a study's only list."""
    (records,) = [entry for entry in study.values() if isinstance(entry, list)]
    for record in records:
        if where(record):
            record[key] = value


CHANGES: list[tuple[str, str, Callable[[Any], None], str]] = [
    ("traces", "small weights", lambda s: trace(s, "gm-iw", 1.0, "largest_weight", 1.5), "does not hold"),
    ("traces", "little variance", lambda s: trace(s, "gm-iw", 1.0, "gradient_variance", 0.1), "does not hold"),
    ("traces", "no help from heat", lambda s: trace(s, "gm-iw", 10.0, "largest_weight", 90.0), "does not hold"),
    ("traces", "heat adds variance", lambda s: trace(s, "gm-iw", 10.0, "gradient_variance", 2.0), "does not hold"),
    ("traces", "weights of 8", lambda s: scale_weights(s, 0.1), "does not hold"),
    ("traces", "more is used", lambda s: trace(s, "gm-iw", 1.0, "ess", 0.9), "holds"),
    ("traces", "no temperature 10", lambda s: s["common"].pop(), "not judged"),
    ("traces", "a trace without numbers", lambda s: trace(s, "gm-iw", 1.0, "ess", float("nan")), "not judged"),
    ("marginals", "far from matching", lambda s: change(s, "sinkhorn_vs_gumbel_matching", 0.04), "does not hold"),
    ("marginals", "far from Gibbs", lambda s: change(s, "sinkhorn_vs_gibbs", 0.03), "holds"),
    (
        "marginals",
        "far at one size",
        lambda s: change(s, "sinkhorn_vs_gumbel_matching", 0.03, lambda r: r["n"] == 4),
        "does not hold",
    ),
    (
        "marginals",
        "far at a low temperature",
        lambda s: change(s, "sinkhorn_vs_gumbel_matching", 0.03, lambda r: r["sd"] == 2.0),
        "holds",
    ),
    (
        "marginals",
        "as near for n = 2",
        lambda s: change(s, "sinkhorn_vs_gumbel_matching", 0.001, lambda r: r["n"] == 2),
        "holds",
    ),
    ("marginals", "no small size", lambda s: [s["rows"].pop(0), s["rows"].pop(0)], "not judged"),
    ("maximum_entropy", "no relation", lambda s: change(s, "r_squared", 0.5), "does not hold"),
    ("maximum_entropy", "a weaker relation", lambda s: change(s, "r_squared", 0.9), "does not hold"),
    ("maximum_entropy", "another distribution", lambda s: change(s, "total_variation", 0.3), "holds"),
    ("maximum_entropy", "not enumerated", lambda s: change(s, "total_variation", None), "not judged"),
    ("solver_time", "slower", lambda s: change(s, "cycle_cancelling_ms", 80.0), "does not hold"),
    ("solver_time", "many improvements", lambda s: change(s, "improvements", 5000.0), "does not hold"),
    ("solver_time", "twice as fast", lambda s: change(s, "cycle_cancelling_ms", 30.0), "does not hold"),
    ("solver_time", "some improvements", lambda s: change(s, "improvements", 40.0), "does not hold"),
    ("solver_time", "no k << n", lambda s: change(s, "n", 128), "not judged"),
    ("elbo", "stochastic too", lambda s: change(s, "router_entropy", 0.3), "does not hold"),
    ("elbo", "deterministic too", lambda s: change(s, "router_entropy", 0.01), "undecided"),
    (
        "elbo",
        "deterministic at one sd",
        lambda s: change(s, "router_entropy", 0.01, lambda r: r["objective"] == "marginal" and r["sd"] == 0.1),
        "holds",
    ),
    ("elbo", "one objective", lambda s: change(s, "objective", "elbo"), "not judged"),
    (
        "noise",
        "Gumbel noise fails",
        lambda s: change(s, "mse", [1.0] * 20, lambda r: r["kind"] == "gumbel"),
        "does not hold",
    ),
    (
        "noise",
        "a little worse",
        lambda s: change(s, "mse", [0.01] * 16 + [1.0] * 4, lambda r: r["kind"] == "gumbel"),
        "undecided",
    ),
    ("noise", "nothing trains", lambda s: change(s, "mse", [None] * 20), "undecided"),
    ("noise", "no jitter", lambda s: change(s, "kind", "gumbel", lambda r: r["kind"] == "jitter"), "not judged"),
]


@pytest.mark.parametrize(("name", "what", "how", "expected"), CHANGES, ids=[f"{c[0]}-{c[1]}" for c in CHANGES])
def test_a_changed_study_changes_the_verdict(
    name: str, what: str, how: Callable[[Any], None], expected: str, studies: dict[str, Any]
) -> None:
    how(studies[name])
    assert verdict(studies, name) == expected, what


@pytest.mark.parametrize("name", NUMBERS)
def test_a_study_that_holds_nothing_is_not_judged(name: str, studies: dict[str, Any]) -> None:
    (key,) = [key for key, entry in studies[name].items() if isinstance(entry, list)]
    for broken in ({}, {key: []}, {key: [{}]}, {key: [{"n": 1024}]}):
        assert verdict({name: broken}, name) == "not judged"


def test_sizes_without_the_hungarian_count_for_improvements_only(studies: dict[str, Any]) -> None:
    studies["solver_time"]["sizes"][2]["improvements"] = 60_000.0
    assert verdict(studies, "solver_time") == "does not hold"


def test_noise_is_compared_where_it_trains(studies: dict[str, Any]) -> None:
    claim = next(c for c in judge([], studies) if c.number == 16)
    assert claim.figures["Gumbel-Matching IW gumbel"] == 0.9
    assert claim.figures["Gumbel-Matching IW without importance weights gaussian"] == 0.05
    assert "without" not in claim.measured
