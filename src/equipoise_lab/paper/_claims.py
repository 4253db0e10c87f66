# SPDX-License-Identifier: Apache-2.0
"""The paper's claims, each judged by a rule over the results, and `claims.json`, which holds the verdicts."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from equipoise_lab._ledger import write_whole
from equipoise_lab.paper import _claims_gating, _claims_reinforce, _claims_studies
from equipoise_lab.paper._results import Result
from equipoise_lab.paper._rules import Outcomes, Part, Rule, Study

RULES = sorted(
    (
        value
        for module in (_claims_gating, _claims_reinforce, _claims_studies)
        for value in vars(module).values()
        if isinstance(value, Rule)
    ),
    key=lambda rule: rule.number,
)
"""How each of the paper's claims is judged."""

Verdict = Literal["reproduced", "partly", "not reproduced", "not judged"]

VERDICT_RULE = (
    "reproduced, if every statement holds; not reproduced, if a main statement does not hold even in part; partly, "
    "in between; not judged, if a result that the rule needs was not run"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim of the paper with what was found.

    Attributes:
        number: 1 to 16.
        title: the paper's sentence, in our words.
        rule: how it is judged, with all limits.
        measured: what was found, in words and figures.
        verdict: see `VERDICT_RULE`.
        figures: what was measured, by name.
        parts: the statements that the rule consists of, each with its grade.
    """

    number: int
    title: str
    rule: str
    measured: str
    verdict: Verdict
    figures: dict[str, float]
    parts: tuple[Part, ...] = ()


def judge(results: Iterable[Result], studies: Mapping[str, Study]) -> list[Claim]:
    """Judges all claims; one whose results are missing is "not judged".

    Args:
        results: the training runs.
        studies: the other experiments by name.

    Returns:
        The sixteen claims in order.

    Example:
        >>> {claim.verdict for claim in judge([], {})}
        {'not judged'}
    """
    outcomes = Outcomes(results)
    return [
        make_claim(rule.number, rule.title, rule.judge(studies.get(rule.study, {}) if rule.study else outcomes))
        for rule in RULES
    ]


def decide(parts: Sequence[Part]) -> Verdict:
    """Turns the grades of a claim's statements into a verdict: see `VERDICT_RULE`.

    Example:
        >>> decide([Part(rule="", measured="", grade=1.0), Part(rule="", measured="", grade=0.0, core=False)])
        'partly'
    """
    if not parts or any(part.grade is None for part in parts):
        return "not judged"
    if all(part.grade == 1.0 for part in parts):
        return "reproduced"
    if any(part.grade == 0.0 for part in parts if part.core):
        return "not reproduced"
    return "partly"


def make_claim(number: int, title: str, parts: Sequence[Part]) -> Claim:
    """Puts a claim together from its statements."""
    names = [f"({'abcdefghij'[i]})" for i in range(len(parts))]
    kinds = ["" if part.core else "(secondary) " for part in parts]
    return Claim(
        number=number,
        title=title,
        rule=" ".join(f"{n} {kind}{p.rule}." for n, kind, p in zip(names, kinds, parts, strict=True)),
        measured=" ".join(f"{n} {p.measured}." for n, p in zip(names, parts, strict=True)),
        verdict=decide(parts),
        figures={name: value for part in parts for name, value in part.figures.items() if math.isfinite(value)},
        parts=tuple(parts),
    )


def write_claims(path: Path, claims: Sequence[Claim]) -> None:
    """Writes `claims.json`.

    Args:
        path: the file; its folder is made if it is missing.
        claims: what was judged.
    """
    content = {"verdicts": VERDICT_RULE, "claims": [asdict(claim) for claim in claims]}
    write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_claims(path: Path) -> list[Claim]:
    """Reads what `write_claims` wrote.

    Args:
        path: the file.

    Returns:
        The claims.
    """
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["claims"]
    parts = [tuple(Part(**part) for part in entry.pop("parts")) for entry in entries]
    return [Claim(**entry, parts=each) for entry, each in zip(entries, parts, strict=True)]
