# SPDX-License-Identifier: Apache-2.0
"""The paper's claims, each judged by a rule over the results, and `claims.json`, which holds the verdicts."""

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab._ledger import write_whole
from equipoise_lab.paper._claims_studies import STUDY_JUDGES
from equipoise_lab.paper._recipe import LEARNING_RATES, METHODS, RATE_TEMPERATURES
from equipoise_lab.paper._results import BASELINES, Baseline, Result
from equipoise_lab.paper._rules import Outcomes, Part, Study, Verdict, all_hold, difference_part, solved_part
from equipoise_lab.paper._solved import SolvedTable

if TYPE_CHECKING:
    from rich.table import Table

RULES: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "templates" / "claims.toml").read_text(encoding="utf-8")
)["claim"]
"""The paper's claims, and how each is judged."""

VERDICT_RULE = (
    "a claim holds if every main statement holds; it does not hold if a main statement does not; it is undecided if "
    "the 95% interval of a figure that it needs contains the limit; it is not judged if a result that it needs was not "
    "run"
)
_VARIANTS = {"plain": "without Sinkhorn", "sinkhorn": "with Sinkhorn first"}


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
    by_baseline: dict[Baseline, Outcomes] = {baseline: Outcomes(runs, baseline) for baseline in BASELINES}
    return [make_claim(rule["number"], rule["title"], _judge(rule, by_baseline, studies)) for rule in RULES]


def _judge(
    rule: Mapping[str, Any], by_baseline: Mapping[Baseline, Outcomes], studies: Mapping[str, Study]
) -> list[Part]:
    if study := rule.get("study"):
        return STUDY_JUDGES[study](studies.get(study, {}))
    if rule.get("judge") == "rates":
        return judge_rates(by_baseline["ema"])
    if rule.get("both"):
        judged = {b: judge_statements(outcomes, rule["statements"]) for b, outcomes in by_baseline.items()}
        return [replace(part, baseline=b) for b, parts in judged.items() for part in parts]
    return judge_statements(by_baseline["ema"], rule["statements"])


def judge_statements(outcomes: Outcomes, statements: Iterable[Sequence[str]]) -> list[Part]:
    """Judges statements: each its kind, one or two places where `Outcomes.at` finds settings, and its words."""
    parts: list[Part] = []
    for kind, *places, rule in statements:
        core, how = not kind.startswith("secondary, "), kind.removeprefix("secondary, ")
        found = [outcomes.at(place) for place in places]
        if len(found) == 1:
            parts.append(solved_part(rule, found[0], how, core=core))
        else:
            limit, at_most = float(how.split()[2]), how.startswith("at most")
            names = _names(*places)
            parts.append(difference_part(rule, found[0], found[1], names, at_most=at_most, limit=limit, core=core))
    return parts


def _names(one: str, other: str) -> tuple[str, str]:
    """Names what two places differ in: the strategy, or whether Sinkhorn comes first."""
    (_, variant, method, *_), (_, second, rival, *_) = one.split(), other.split()
    if method == rival:
        return _VARIANTS[variant], _VARIANTS[second]
    return PAPER_STRATEGIES[method].label, PAPER_STRATEGIES[rival].label


def judge_rates(outcomes: Outcomes) -> list[Part]:
    """Claim 14: over all strategies at temperatures 1 and 10, no learning rate solves more runs than 0.1."""
    rule = (
        "over the six strategies with REINFORCE at temperatures 1 and 10, the learning rate 0.1 solves more runs than "
        "each of 0.001, 0.003, 0.01, 0.03, 0.3 and 1"
    )
    swept = {
        rate: outcomes.settings("reinforce", "plain", METHODS, RATE_TEMPERATURES, learning_rate=rate)
        for rate in LEARNING_RATES
    }
    others = [
        difference_part(rule, swept[0.1], settings, ("0.1", f"{rate:g}"), limit=0.0)
        for rate, settings in swept.items()
        if rate != 0.1
    ]
    verdict = all_hold(part.verdict for part in others)
    if verdict == "not judged":
        return [Part(rule=rule, measured="not all learning rates run", verdict=verdict)]
    closest = min(others, key=lambda part: next(iter(part.figures.values())))
    figures = {f"rate {rate:g}": sum(s.fraction for s in settings) / len(settings) for rate, settings in swept.items()}
    solved = ", ".join(f"{figures[f'rate {rate:g}']:.0%} at {rate:g}" for rate in LEARNING_RATES)
    measured = f"solved: {solved}; nearest: {closest.measured}"
    seeds = max(part.seeds or 0 for part in others) if verdict == "undecided" else None
    return [Part(rule=rule, measured=measured, verdict=verdict, figures=figures, seeds=seeds)]


def decide(parts: Sequence[Part]) -> Verdict:
    """Turns the verdicts on a claim's statements into one: see `VERDICT_RULE`.

    Example:
        >>> decide([Part(rule="", measured="", verdict="holds"), Part(rule="", measured="", verdict="undecided")])
        'undecided'
    """
    if any(part.verdict == "not judged" for part in parts):
        return "not judged"
    return all_hold(part.verdict for part in parts if part.core)


def make_claim(number: int, title: str, parts: Sequence[Part]) -> Claim:
    """Puts a claim together from its statements; those without the baseline repeat the rules of those with it."""
    main = [part for part in parts if part.baseline != "none"]
    without = [part for part in parts if part.baseline == "none"]
    names = [f"({'abcdefghij'[i]})" for i in range(len(main))]
    kinds = ["" if part.core else "(secondary) " for part in main]
    undecided = [part.seeds for part in parts if part.verdict == "undecided" and part.core and part.seeds is not None]
    measured = " ".join(f"{n} {p.measured}." for n, p in zip(names, main, strict=True))
    if without:
        rest = " ".join(f"{n} {p.measured}." for n, p in zip(names, without, strict=True))
        measured = f"With the moving average: {measured} Without a baseline: {rest}"
    return Claim(
        number=number,
        title=title,
        rule=" ".join(f"{n} {kind}{p.rule}." for n, kind, p in zip(names, kinds, main, strict=True)),
        measured=measured,
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


_COUNTS = (
    *("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight"),
    *("Nine", "Ten", "Eleven", "Twelve", "Thirteen", "Fourteen", "Fifteen", "Sixteen"),
)
# What the paragraph says of one claim, and of several.
_SUMMARY = {
    "holds": ("One holds", "{} hold"),
    "differs": (
        "One depends on whether REINFORCE subtracts a moving average",
        "{} depend on whether REINFORCE subtracts a moving average",
    ),
    "undecided": ("One is undecided with these seeds", "{} are undecided with these seeds"),
    "does not hold": ("One does not hold as stated", "{} do not hold as stated"),
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
        one if len(found) == 1 else several.format(_COUNTS[len(found)]): found
        for kind, (one, several) in _SUMMARY.items()
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
    tables = [asdict(table) for table in solved]
    content = {
        "summary": summarise(claims),
        "verdicts": VERDICT_RULE,
        "solved": tables,
        "claims": [asdict(claim) for claim in claims],
    }
    write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_claims(path: Path) -> list[Claim]:
    """Reads what `write_claims` wrote."""
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["claims"]
    parts = [tuple(Part(**part) for part in entry.pop("parts")) for entry in entries]
    return [Claim(**entry, parts=each) for entry, each in zip(entries, parts, strict=True)]


_STYLES = {"holds": "green", "undecided": "yellow", "does not hold": "red", "not judged": "dim"}


def claims_table(claims: Sequence[Claim]) -> "Table":
    """Lists the claims with their verdicts."""
    from rich.table import Table  # not above: only the command prints

    table = Table(title="The paper's claims", title_justify="left", show_lines=False)
    table.add_column("", justify="right")
    table.add_column("claim")
    table.add_column("verdict", no_wrap=True)
    table.add_column("without baseline", no_wrap=True)
    for claim in claims:
        verdicts = (claim.verdict, claim.verdict_without)
        shown = ("" if verdict is None else f"[{_STYLES[verdict]}]{verdict}[/]" for verdict in verdicts)
        table.add_row(str(claim.number), claim.title, *shown)
    return table
