# SPDX-License-Identifier: Apache-2.0
"""The paper's claims, each judged by a rule over the results, and `claims.json`, which holds the verdicts."""

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from equipoise_lab._ledger import write_whole
from equipoise_lab.paper._results import BASELINES, Baseline, Result
from equipoise_lab.paper._rules import NOT_RUN, Outcomes, Part, Study, Verdict, all_hold, judge_statement
from equipoise_lab.paper._solved import SolvedTable
from equipoise_lab.paper._studies import JUDGES

RULES: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "templates" / "claims.toml").read_text(encoding="utf-8")
)["claim"]
"""The paper's claims, and how each is judged."""

VERDICT_RULE = (
    "a claim holds if every main statement holds; it does not hold if a main statement does not; it is undecided if "
    "the 95% interval of a figure that it needs contains the limit; it is not judged if a result that it needs was not "
    "run"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim of the paper with what was found."""

    number: int  # 1 to 16
    title: str  # the paper's sentence, in our words
    rule: str  # how it is judged, with all limits
    measured: str  # what was found, in words and figures
    verdict: Verdict  # see `VERDICT_RULE`; with the paper's moving average, where REINFORCE is trained
    verdict_without: Verdict | None = None  # for REINFORCE without a baseline; None where that was not asked
    seeds: int | None = None  # where a verdict is undecided, about how many seeds would decide it
    figures: dict[str, float]  # what was measured, by name
    parts: tuple[Part, ...] = ()  # the statements that the rule consists of, each with its verdict


def judge(results: Iterable[Result], studies: Mapping[str, Study]) -> list[Claim]:
    """Judges the sixteen claims by the training runs and the studies; one whose results are missing is "not judged".

    Example:
        >>> {claim.verdict for claim in judge([], {})}
        {'not judged'}
    """
    runs = list(results)
    outcomes: dict[Baseline, Outcomes] = {baseline: Outcomes(runs, baseline) for baseline in BASELINES}
    return [_judge_claim(rule, outcomes, studies) for rule in RULES]


def _judge_claim(rule: Mapping[str, Any], outcomes: Mapping[Baseline, Outcomes], studies: Mapping[str, Study]) -> Claim:
    statements, both = rule["statements"], rule.get("both", False)
    parts: list[Part] = []
    for baseline in BASELINES if both else BASELINES[:1]:
        found = [NOT_RUN] * len(statements)
        if (study := rule.get("study")) is None:
            found = [judge_statement(outcomes[baseline], *statement[:-1]) for statement in statements]
        elif study in studies:
            with suppress(LookupError):  # it lacks what a statement needs
                found = JUDGES[study](studies[study])
        for part, (kind, *_, words) in zip(found, statements, strict=True):
            core, of = not kind.startswith("secondary"), baseline if both else None
            parts.append(replace(part, rule=words, core=core, baseline=of))
    return _put_together(rule, parts)


def _put_together(rule: Mapping[str, Any], parts: Sequence[Part]) -> Claim:
    """Makes a claim of its statements; those without the baseline repeat the rules of those with it."""
    main = [part for part in parts if part.baseline != "none"]
    without = [part for part in parts if part.baseline == "none"]
    rules, measured, rest = (
        " ".join(f"({letter}) {text}." for letter, text in zip("abcdefghij", texts, strict=False))
        for texts in (
            [part.rule if part.core else f"(secondary) {part.rule}" for part in main],
            [part.measured for part in main],
            [part.measured for part in without],
        )
    )
    undecided = [part.seeds for part in parts if part.verdict == "undecided" and part.core and part.seeds is not None]
    return Claim(
        number=rule["number"],
        title=rule["title"],
        rule=rules,
        measured=f"With the moving average: {measured} Without a baseline: {rest}" if without else measured,
        verdict=decide(main),
        verdict_without=decide(without) if without else None,
        seeds=max(undecided, default=None),
        figures={
            f"{name}{', no baseline' if part.baseline == 'none' else ''}": value
            for part in parts
            for name, value in part.figures.items()
            if math.isfinite(value)
        },
        parts=tuple(parts),
    )


def decide(parts: Sequence[Part]) -> Verdict:
    """Turns the verdicts on a claim's statements into one: see `VERDICT_RULE`.

    Example:
        >>> decide([Part(measured="", verdict="holds"), Part(measured="", verdict="undecided")])
        'undecided'
    """
    if any(part.verdict == "not judged" for part in parts):
        return "not judged"
    return all_hold(part.verdict for part in parts if part.core)


_COUNTS = "No One Two Three Four Five Six Seven Eight Nine Ten Eleven Twelve Thirteen Fourteen Fifteen Sixteen"
# What the paragraph says of one claim, and of several: "One holds", "Two hold".
_SUMMARY = {
    "holds": ("holds", "hold", ""),
    "differs": ("depends", "depend", " on whether REINFORCE subtracts a moving average"),
    "undecided": ("is", "are", " undecided with these seeds"),
    "does not hold": ("does", "do", " not hold as stated"),
}


def summarise(claims: Sequence[Claim], *, named: bool = True) -> str:
    """Writes the paragraph that a reader can quote: which claims hold, which do not, which depend on the baseline.

    Claims that are not `named` are counted: how many there are of each kind, in one sentence.

    Example:
        >>> summarise(judge([], {}))
        'No claim was judged.'
    """
    groups, short = dict[str, list[str]](), {rule["number"]: rule["short"] for rule in RULES}
    for claim in claims:
        differs = claim.verdict_without not in (None, claim.verdict)
        words = f"{short[claim.number]} ({claim.number})"
        groups.setdefault("differs" if differs else claim.verdict, []).append(words)
    kinds = {
        f"{_COUNTS.split()[len(found)]} {one if len(found) == 1 else several}{rest}": found
        for kind, (one, several, rest) in _SUMMARY.items()
        if (found := groups.get(kind))
    }
    if not kinds:
        return "No claim was judged."
    if named:
        text = " ".join(f"{kind}: {'; '.join(found)}." for kind, found in kinds.items())
    else:
        text = f"{', '.join(kind.lower().replace('reinforce', 'REINFORCE') for kind in kinds)}."
    return f"Of the {len(claims)} empirical claims of the paper, {text[0].lower()}{text[1:]}"


def write_claims(path: Path, claims: Sequence[Claim], solved: Sequence[SolvedTable] = ()) -> None:
    """Writes `claims.json`, with the seeds solved in each panel, which the claims rest on."""
    content = {
        "summary": summarise(claims),
        "verdicts": VERDICT_RULE,
        "solved": [asdict(table) for table in solved],
        "claims": [asdict(claim) for claim in claims],
    }
    write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_claims(path: Path) -> list[Claim]:
    """Reads what `write_claims` wrote."""
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["claims"]
    parts = [tuple(Part(**part) for part in entry.pop("parts")) for entry in entries]
    return [Claim(**entry, parts=each) for entry, each in zip(entries, parts, strict=True)]


_STYLES = {"holds": "green", "undecided": "yellow", "does not hold": "red", "not judged": "dim"}


def claims_table(claims: Sequence[Claim]) -> Table:
    """Lists the claims with their verdicts."""
    verdicts = (Column(heading, no_wrap=True) for heading in ("verdict", "without baseline"))
    table = Table(Column(justify="right"), "claim", *verdicts, title="The paper's claims", title_justify="left")
    for claim in claims:
        found = (claim.verdict, claim.verdict_without)
        shown = ("" if verdict is None else f"[{_STYLES[verdict]}]{verdict}[/]" for verdict in found)
        table.add_row(str(claim.number), claim.title, *shown)
    return table
