# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise_lab.paper._claims import Claim, decide, judge, read_claims, write_claims
from equipoise_lab.paper._rules import Part

FROM_RESULTS = (1, 2, 3, 5, 6, 7, 8, 9, 10, 14)
INDEPENDENT = ("sample", "skip-iw", "skip")


def verdict(claims: list[Claim], number: int) -> str:
    return next(claim.verdict for claim in claims if claim.number == number)


def main(s: Any, loss: str, variant: str) -> bool:
    return s.main and s.loss == loss and s.variant == variant


def test_every_claim_holds_in_the_world_of_the_paper(make_results: Any, studies: dict[str, Any]) -> None:
    claims = judge(make_results(), studies)
    assert [claim.number for claim in claims] == list(range(1, 17))
    assert {claim.number: claim.measured for claim in claims if claim.verdict != "reproduced"} == {}


def test_nothing_is_judged_without_results() -> None:
    claims = judge([], {})
    assert len(claims) == 16
    assert {claim.verdict for claim in claims} == {"not judged"}
    assert all(claim.rule and claim.title for claim in claims)


# Each line: the claim, what is made of the settings for which the condition holds, and the verdict then.
CHANGES: list[tuple[int, str, Callable[[Any], bool], float, str]] = [
    (
        1,
        "Sample Skip IW fails",
        lambda s: main(s, "reinforce", "plain") and s.method == "skip-iw",
        0.2,
        "not reproduced",
    ),
    (1, "Sample fails", lambda s: main(s, "reinforce", "plain") and s.method == "sample", 0.4, "not reproduced"),
    (
        1,
        "one temperature just misses",
        lambda s: main(s, "reinforce", "plain") and s.method == "sample" and s.temperature == 3.0,
        0.7,
        "partly",
    ),
    (
        2,
        "Sample Skip matches too",
        lambda s: main(s, "reinforce", "plain") and s.method == "skip",
        1.0,
        "not reproduced",
    ),
    (
        2,
        "Gumbel-Matching matches",
        lambda s: main(s, "reinforce", "plain") and s.method == "gm-sh",
        0.9,
        "not reproduced",
    ),
    (
        2,
        "Sample Skip IW falls short",
        lambda s: main(s, "reinforce", "plain") and s.method == "skip-iw",
        0.8,
        "not reproduced",
    ),
    (
        2,
        "Sample Skip nearly matches",
        lambda s: main(s, "reinforce", "plain") and s.method == "skip" and s.temperature >= 2,
        0.9,
        "partly",
    ),
    (2, "nothing to match", lambda s: main(s, "reinforce", "plain"), 0.1, "not reproduced"),
    (3, "not less effective", lambda s: main(s, "reinforce", "plain") and s.method == "gm-iw", 1.0, "not reproduced"),
    (
        3,
        "not good at large temperature",
        lambda s: main(s, "reinforce", "plain") and s.method == "gm-sh" and s.temperature >= 10,
        0.3,
        "not reproduced",
    ),
    (
        3,
        "the biased one is good too",
        lambda s: main(s, "reinforce", "plain") and s.method == "gm" and s.temperature >= 10,
        0.9,
        "not reproduced",
    ),
    (
        3,
        "better at low temperature",
        lambda s: main(s, "reinforce", "plain") and s.method == "gm-iw" and s.temperature < 1,
        0.9,
        "partly",
    ),
    (5, "works at low temperature", lambda s: main(s, "reinforce", "sinkhorn"), 1.0, "not reproduced"),
    (5, "works nowhere", lambda s: main(s, "reinforce", "sinkhorn"), 0.0, "not reproduced"),
    (
        5,
        "one setting at low temperature",
        lambda s: main(s, "reinforce", "sinkhorn") and s.method == "gm-iw" and s.temperature == 0.5,
        0.9,
        "partly",
    ),
    (6, "no balance loss needed", lambda s: s.loss == "gating" and s.weight == 0.0, 0.9, "not reproduced"),
    (
        6,
        "no balanced sampling needed",
        lambda s: main(s, "gating", "plain") and s.method in INDEPENDENT,
        0.9,
        "not reproduced",
    ),
    (6, "no weights needed", lambda s: main(s, "gating", "no-iw"), 0.9, "not reproduced"),
    (6, "high temperature works", lambda s: main(s, "gating", "plain") and s.temperature >= 10, 0.9, "not reproduced"),
    (6, "works nowhere", lambda s: s.loss == "gating", 0.0, "not reproduced"),
    (6, "0.03 works less", lambda s: s.loss == "gating" and s.weight == 0.03, 0.5, "partly"),
    (7, "Sinkhorn makes it worse", lambda s: main(s, "gating", "sinkhorn"), 0.0, "not reproduced"),
    (7, "works at any temperature", lambda s: main(s, "gating", "sinkhorn"), 1.0, "not reproduced"),
    (
        7,
        "works less at very low temperature",
        lambda s: main(s, "gating", "sinkhorn") and s.temperature <= 0.1,
        0.6,
        "partly",
    ),
    (8, "works at low temperature", lambda s: main(s, "gating", "no-iw") and s.temperature < 1, 0.9, "not reproduced"),
    (
        8,
        "works at one setting",
        lambda s: main(s, "gating", "no-iw") and s.method == "sample" and s.temperature == 1.0,
        0.9,
        "partly",
    ),
    (9, "fails at low temperature", lambda s: main(s, "reinforce", "no-iw"), 0.0, "not reproduced"),
    (9, "Gumbel-Matching works", lambda s: main(s, "reinforce", "no-iw") and s.method == "gm", 0.9, "not reproduced"),
    (
        9,
        "high temperature works",
        lambda s: main(s, "reinforce", "no-iw") and s.temperature >= 10,
        0.9,
        "not reproduced",
    ),
    (9, "Sample Skip fails", lambda s: main(s, "reinforce", "no-iw") and s.method == "skip", 0.0, "partly"),
    (10, "fails without", lambda s: s.loss == "reinforce" and s.weight == 0.0, 0.0, "not reproduced"),
    (10, "fails with", lambda s: s.loss == "reinforce" and s.weight > 0.0, 0.0, "not reproduced"),
    (10, "0.1 works", lambda s: s.weight == 0.1, 0.9, "not reproduced"),
    (10, "0.1 half works", lambda s: s.weight == 0.1, 0.4, "partly"),
    (14, "0.3 is better", lambda s: s.rate == 0.3, 0.9, "not reproduced"),
    (14, "nothing works", lambda s: s.loss == "reinforce", 0.0, "not reproduced"),
]


@pytest.mark.parametrize(
    ("number", "what", "where", "fraction", "expected"), CHANGES, ids=[f"{c[0]}-{c[1]}" for c in CHANGES]
)
def test_a_changed_world_changes_the_verdict(
    number: int,
    what: str,
    where: Callable[[Any], bool],
    fraction: float,
    expected: str,
    make_results: Any,
    studies: dict[str, Any],
) -> None:
    claims = judge(make_results(lambda s: fraction if where(s) else None), studies)
    assert verdict(claims, number) == expected, what


@pytest.mark.parametrize("number", FROM_RESULTS)
def test_a_missing_temperature_or_rate_is_not_judged(number: int, make_results: Any, studies: dict[str, Any]) -> None:
    claims = judge(make_results(drop=lambda s: s.temperature == 10.0), studies)
    assert verdict(claims, number) == "not judged"


def test_sweeps_that_were_not_run_leave_the_panels_judged(make_results: Any, studies: dict[str, Any]) -> None:
    claims = judge(make_results(drop=lambda s: not s.main), studies)
    assert {c.number for c in claims if c.verdict == "not judged"} == {6, 10, 14}


def test_temperatures_that_went_through_float32_are_found(make_results: Any, studies: dict[str, Any]) -> None:
    rounded = [
        dataclasses.replace(r, temperature=float(torch.tensor(r.temperature, dtype=torch.float32)))
        for r in make_results()
    ]
    assert {claim.verdict for claim in judge(rounded, studies)} == {"reproduced"}


def test_ten_seeds_are_not_required(make_results: Any, studies: dict[str, Any]) -> None:
    few = [r for r in make_results() if r.seed % 2 == 0]
    assert verdict(judge(few, studies), 1) == "reproduced"


@pytest.mark.parametrize(
    ("grades", "core", "expected"),
    [
        ([], [], "not judged"),
        ([1.0, None], [True, True], "not judged"),
        ([0.0, None], [True, True], "not judged"),
        ([1.0, 1.0], [True, False], "reproduced"),
        ([1.0, 0.5], [True, True], "partly"),
        ([1.0, 0.0], [True, False], "partly"),
        ([1.0, 0.0], [True, True], "not reproduced"),
    ],
)
def test_the_verdict_follows_from_the_grades(grades: list[float | None], core: list[bool], expected: str) -> None:
    parts = [Part(rule="r", measured="m", grade=g, core=c) for g, c in zip(grades, core, strict=True)]
    assert decide(parts) == expected


def test_claims_survive_the_file(make_results: Any, studies: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "new" / "claims.json"
    claims = judge(make_results(lambda s: 0.0 if s.method == "sample" else None), studies)
    write_claims(path, claims)
    assert read_claims(path) == claims
    assert [p.name for p in path.parent.iterdir()] == ["claims.json"]
    stored = json.loads(path.read_text())["claims"]
    assert stored[0].keys() >= {"number", "title", "rule", "measured", "verdict", "figures"}
    assert stored[0]["figures"]["reinforce plain sample 1"] == 0.0
