# SPDX-License-Identifier: Apache-2.0
"""The paper's claims, each judged by a rule over the results, and `claims.json`, which holds the verdicts."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise_lab._ledger import write_whole
from equipoise_lab.paper import _claims_gating, _claims_reinforce, _claims_studies
from equipoise_lab.paper._results import BASELINES, Baseline, Result
from equipoise_lab.paper._rules import Outcomes, Part, Rule, Study, Verdict, all_hold, with_baseline
from equipoise_lab.paper._solved import SolvedTable

if TYPE_CHECKING:
    from rich.table import Table

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

VERDICT_RULE = (
    "a claim holds if every main statement holds; it does not hold if a main statement does not; it is undecided if "
    "the 95% interval of a figure that it needs contains the limit; it is not judged if a result that it needs was not "
    "run"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim of the paper with what was found.

    Attributes:
        number: 1 to 16.
        title: the paper's sentence, in our words.
        rule: how it is judged, with all limits.
        measured: what was found, in words and figures.
        verdict: see `VERDICT_RULE`; with the paper's moving average, where REINFORCE is trained.
        verdict_without: the same for REINFORCE without a baseline; None where that was not asked.
        seeds: where a verdict is undecided, about how many seeds would decide it.
        figures: what was measured, by name.
        parts: the statements that the rule consists of, each with its verdict.
    """

    number: int
    title: str
    rule: str
    measured: str
    verdict: Verdict
    verdict_without: Verdict | None = None
    seeds: int | None = None
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
    runs = list(results)
    by_baseline: dict[Baseline, Outcomes] = {baseline: Outcomes(runs, baseline) for baseline in BASELINES}
    claims: list[Claim] = []
    for rule in RULES:
        if rule.study is not None:
            parts = rule.judge(studies.get(rule.study, {}))
        elif rule.both:
            parts = [with_baseline(part, b) for b, outcomes in by_baseline.items() for part in rule.judge(outcomes)]
        else:
            parts = rule.judge(by_baseline["ema"])
        claims.append(make_claim(rule.number, rule.title, parts))
    return claims


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


# Each claim in few words, for the paragraph that sums them up.
_SHORT = {
    1: "Sample and Sample Skip IW solve the task from temperature 1 on",
    2: "within capacity, only Sample Skip IW matches Sample",
    3: "Gumbel-Matching is worse, and good at high temperature if its weights correct for the balancing",
    4: "Gumbel-Matching falls short because of large weights",
    5: "with Sinkhorn first, REINFORCE needs a high temperature",
    6: "gating needs a balance loss, balanced sampling, weights and a low temperature",
    7: "gating works better with Sinkhorn first",
    8: "gating fails without importance weights",
    9: "without importance weights, REINFORCE needs a low temperature",
    10: "REINFORCE works with and without a balance loss",
    11: "Sinkhorn approximates the marginals of Gumbel-Matching",
    12: "maximum-entropy distributions are powers of p",
    13: "cycle cancelling is much faster than the Hungarian algorithm",
    14: "0.1 is the best learning rate",
    15: "training the ELBO keeps choices deterministic",
    16: "Gumbel noise does as well as Gaussian noise or input jitter",
}
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

    Args:
        claims: what was judged.
        named: whether each claim is named; False for how many there are of each kind, in one sentence.

    Example:
        >>> summarise(judge([], {}))
        'No claim was judged.'
    """
    groups: dict[str, list[str]] = {}
    for claim in claims:
        differs = claim.verdict_without not in (None, claim.verdict)
        words = f"{_SHORT[claim.number]} ({claim.number})"
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
    """Writes `claims.json`.

    Args:
        path: the file; its folder is made if it is missing.
        claims: what was judged.
        solved: the seeds solved in each panel, which the claims rest on.
    """
    tables = [asdict(table) for table in solved]
    content = {
        "summary": summarise(claims),
        "verdicts": VERDICT_RULE,
        "solved": tables,
        "claims": [asdict(claim) for claim in claims],
    }
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


_STYLES = {"holds": "green", "undecided": "yellow", "does not hold": "red", "not judged": "dim"}


def claims_table(claims: Sequence[Claim]) -> "Table":
    """Lists the claims with their verdicts.

    Args:
        claims: what was judged.

    Returns:
        The table.
    """
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
