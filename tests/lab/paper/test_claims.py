# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise_lab.paper._claims import Claim, decide, judge, read_claims, summarise, write_claims
from equipoise_lab.paper._rules import Part, Setting, difference_part, wilson

FROM_RESULTS = (1, 2, 3, 5, 6, 7, 8, 9, 10, 14)
INDEPENDENT = ("sample", "skip-iw", "skip")


def verdict(claims: list[Claim], number: int) -> str:
    return next(claim.verdict for claim in claims if claim.number == number)


def main(s: Any, loss: str, variant: str) -> bool:
    return s.main and s.loss == loss and s.variant == variant


def test_every_claim_holds_in_the_world_of_the_paper(make_results: Any, studies: dict[str, Any]) -> None:
    claims = judge(make_results(), studies)
    assert [claim.number for claim in claims] == list(range(1, 17))
    assert {claim.number: claim.measured for claim in claims if claim.verdict != "holds"} == {}


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
        "does not hold",
    ),
    (1, "Sample fails", lambda s: main(s, "reinforce", "plain") and s.method == "sample", 0.2, "does not hold"),
    (
        1,
        "one temperature just misses",
        lambda s: main(s, "reinforce", "plain") and s.method == "sample" and s.temperature == 3.0,
        0.7,
        "undecided",
    ),
    (
        2,
        "Sample Skip matches too",
        lambda s: main(s, "reinforce", "plain") and s.method == "skip",
        1.0,
        "does not hold",
    ),
    (
        2,
        "Gumbel-Matching matches",
        lambda s: main(s, "reinforce", "plain") and s.method == "gm-sh",
        1.0,
        "does not hold",
    ),
    (
        2,
        "Sample Skip IW falls short",
        lambda s: main(s, "reinforce", "plain") and s.method == "skip-iw",
        0.5,
        "does not hold",
    ),
    (
        2,
        "Sample Skip nearly matches",
        lambda s: main(s, "reinforce", "plain") and s.method == "skip" and s.temperature >= 2,
        0.9,
        "undecided",
    ),
    (2, "nothing to match", lambda s: main(s, "reinforce", "plain"), 0.1, "does not hold"),
    (3, "not less effective", lambda s: main(s, "reinforce", "plain") and s.method == "gm-iw", 1.0, "does not hold"),
    (
        3,
        "not good at large temperature",
        lambda s: main(s, "reinforce", "plain") and s.method == "gm-sh" and s.temperature >= 10,
        0.2,
        "does not hold",
    ),
    (
        3,
        "the biased one is good too",
        lambda s: main(s, "reinforce", "plain") and s.method == "gm" and s.temperature >= 10,
        0.9,
        "does not hold",
    ),
    (
        3,
        "better at low temperature",
        lambda s: main(s, "reinforce", "plain") and s.method == "gm-iw" and s.temperature < 1,
        0.9,
        "holds",
    ),
    (5, "works at low temperature", lambda s: main(s, "reinforce", "sinkhorn"), 1.0, "does not hold"),
    (5, "works nowhere", lambda s: main(s, "reinforce", "sinkhorn"), 0.0, "does not hold"),
    (
        5,
        "one setting at low temperature",
        lambda s: main(s, "reinforce", "sinkhorn") and s.method == "gm-iw" and s.temperature == 0.5,
        0.9,
        "does not hold",
    ),
    (6, "no balance loss needed", lambda s: s.loss == "gating" and s.weight == 0.0, 0.9, "does not hold"),
    (
        6,
        "no balanced sampling needed",
        lambda s: main(s, "gating", "plain") and s.method in INDEPENDENT,
        0.9,
        "does not hold",
    ),
    (6, "no weights needed", lambda s: main(s, "gating", "no-iw"), 0.9, "does not hold"),
    (6, "high temperature works", lambda s: main(s, "gating", "plain") and s.temperature >= 10, 0.9, "does not hold"),
    (6, "works nowhere", lambda s: s.loss == "gating", 0.0, "does not hold"),
    (6, "0.03 works less", lambda s: s.loss == "gating" and s.weight == 0.03, 0.5, "undecided"),
    (7, "Sinkhorn makes it worse", lambda s: main(s, "gating", "sinkhorn"), 0.0, "does not hold"),
    (7, "works at any temperature", lambda s: main(s, "gating", "sinkhorn"), 1.0, "does not hold"),
    (
        7,
        "works less at very low temperature",
        lambda s: main(s, "gating", "sinkhorn") and s.temperature <= 0.1,
        0.6,
        "undecided",
    ),
    (8, "works at low temperature", lambda s: main(s, "gating", "no-iw") and s.temperature < 1, 0.9, "does not hold"),
    (
        8,
        "works at one setting",
        lambda s: main(s, "gating", "no-iw") and s.method == "sample" and s.temperature == 1.0,
        0.9,
        "does not hold",
    ),
    (9, "fails at low temperature", lambda s: main(s, "reinforce", "no-iw"), 0.0, "does not hold"),
    (9, "Gumbel-Matching works", lambda s: main(s, "reinforce", "no-iw") and s.method == "gm", 0.9, "does not hold"),
    (
        9,
        "high temperature works",
        lambda s: main(s, "reinforce", "no-iw") and s.temperature >= 10,
        0.9,
        "does not hold",
    ),
    (9, "Sample Skip fails", lambda s: main(s, "reinforce", "no-iw") and s.method == "skip", 0.0, "holds"),
    (10, "fails without", lambda s: s.loss == "reinforce" and s.weight == 0.0, 0.0, "does not hold"),
    (10, "fails with", lambda s: s.loss == "reinforce" and s.weight > 0.0, 0.0, "does not hold"),
    (10, "0.1 works", lambda s: s.weight == 0.1, 0.9, "does not hold"),
    (10, "0.1 half works", lambda s: s.weight == 0.1, 0.4, "undecided"),
    (14, "0.3 is better", lambda s: s.rate == 0.3, 0.9, "does not hold"),
    (14, "nothing works", lambda s: s.loss == "reinforce", 0.0, "undecided"),
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
    assert {claim.verdict for claim in judge(rounded, studies)} == {"holds"}


def test_few_seeds_leave_it_undecided_and_say_how_many_would_do(make_results: Any) -> None:
    world = make_results(lambda s: 0.7 if s.method == "sample" and s.main and s.temperature == 1.0 else None)
    claim = judge(world, {})[0]
    assert (claim.verdict, claim.verdict_without) == ("undecided", "undecided")
    assert claim.seeds == 21  # 1.96^2 0.7 0.3 / 0.2^2
    assert claim.parts[0].seeds == 21
    assert claim.parts[1].seeds is None


def test_the_baselines_are_judged_apart(make_results: Any, studies: dict[str, Any]) -> None:
    """The paper's picture without a baseline, and Sample Skip as good as Sample with one."""
    world = make_results(
        lambda s: 1.0 if s.method == "skip" and s.baseline == "ema" and main(s, "reinforce", "plain") else None
    )
    claims = judge(world, studies)
    assert (claims[1].verdict, claims[1].verdict_without) == ("does not hold", "holds")
    assert claims[4].verdict_without is None
    assert {part.baseline for part in claims[1].parts} == {"ema", "none"}
    summary = summarise(claims)
    assert "One depends on whether REINFORCE subtracts a moving average: within capacity, only Sample Skip" in summary
    assert all(f"({number})" in summary for number in range(1, 17))


@pytest.mark.parametrize(
    ("verdicts", "core", "expected"),
    [
        ([], [], "not judged"),
        (["holds", "not judged"], [True, True], "not judged"),
        (["does not hold", "not judged"], [True, True], "not judged"),
        (["holds", "holds"], [True, False], "holds"),
        (["holds", "undecided"], [True, True], "undecided"),
        (["holds", "does not hold"], [True, False], "holds"),
        (["undecided", "does not hold"], [True, True], "does not hold"),
    ],
)
def test_the_verdict_follows_from_the_statements(verdicts: list[Any], core: list[bool], expected: str) -> None:
    parts = [Part(rule="r", measured="m", verdict=v, core=c) for v, c in zip(verdicts, core, strict=True)]
    assert decide(parts) == expected


def test_intervals_of_fractions_are_wilsons() -> None:
    """The ends solve (p - k/n)^2 = z^2 p (1 - p) / n, which is how the interval is defined."""
    for solved, runs in ((0, 20), (1, 20), (13, 40), (40, 40)):
        for end in wilson(solved, runs):
            assert abs((end - solved / runs) ** 2 - 1.96**2 * end * (1 - end) / runs) < 1e-12


def test_a_difference_is_taken_seed_by_seed() -> None:
    """The same seeds solved in both: no difference, whatever the fraction; that of unpaired fractions is wide."""
    half = {seed: seed % 2 == 0 for seed in range(10)}
    one, other = Setting("a", half), Setting("b", dict(half))
    part = difference_part([one], [other], ("a", "b"), at_most=True)
    assert part.verdict == "holds"
    flipped = Setting("c", {seed: not value for seed, value in half.items()})
    part = difference_part([one], [flipped], ("a", "b"), at_most=True)
    assert part.verdict == "undecided"
    assert part.seeds is not None
    assert part.seeds > 10


def test_claims_survive_the_file(make_results: Any, studies: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "new" / "claims.json"
    claims = judge(make_results(lambda s: 0.0 if s.method == "sample" else None), studies)
    write_claims(path, claims)
    assert read_claims(path) == claims
    assert [p.name for p in path.parent.iterdir()] == ["claims.json"]
    stored = json.loads(path.read_text())["claims"]
    assert stored[0].keys() >= {"number", "title", "rule", "measured", "verdict", "figures"}
    assert stored[0]["figures"]["reinforce plain sample 1"] == 0.0
