# SPDX-License-Identifier: Apache-2.0
"""Rules and verdicts in Markdown, and their places in the documents that show them.

    python benchmarks/fill_documents.py

A document marks a place by two comments, `<!-- begin verdicts -->` and `<!-- end verdicts -->`. What is between them is
generated:

- `summary`, the paragraph that sums it up, and `summary-counts`, the same in one sentence;
- `verdicts`, a table of claims and verdicts, and `measured`, the same with what was measured;
- `solved`, the seeds solved with REINFORCE;
- `rules`, how each claim is judged;
- `sensitivity`, verdicts under other readings of the paper;
- `beyond-argmax` and `beyond-expected`, seeds solved beyond the paper; `beyond-goals`, what they say of the goals;
- `lm-losses`, `lm-differences` and `lm-goals`, what `equipoise compare lm` found;
- `lm-lengths`, its losses along the training, and `lm-vocabulary`, those with a larger vocabulary.

All but the rules come from stored results, and are empty as long as there are none. A test holds documents and sources
together.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise_lab.paper._claims import Claim, judge, read_claims, summarise


def verdict_table(claims: Sequence[Claim], *, measured: bool = False) -> str:
    """Renders the claims as a table of GitHub's Markdown.

    Returns:
        The table, without a line break at the end.

    Example:
        >>> claim = Claim(number=1, title="It works.", rule="", measured="", verdict="holds", figures={})
        >>> print(verdict_table([claim]))
        | | the paper's claim | verdict | without a baseline |
        |---|---|---|---|
        | 1 | It works. | holds | |
    """
    head = ["", "the paper's claim", "verdict", "without a baseline"] + (["measured"] if measured else [])
    lines = [_row(head), "|" + "---|" * len(head)]
    for claim in claims:
        cells = [str(claim.number), claim.title, claim.verdict, claim.verdict_without or ""]
        lines.append(_row(_escape(cell) for cell in (cells + ([claim.measured] if measured else []))))
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    """Joins cells; an empty one is one space wide, as people write them."""
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def panel_counts(stored: Mapping[str, Any]) -> str:
    """Renders the seeds solved with REINFORCE, with the moving average and without a baseline.

    Args:
        stored: what `claims.json` holds; its first two tables are shown, a row for each strategy and baseline.

    Returns:
        The table, without a line break at the end.
    """
    ema, none = stored["solved"][:2]
    lines = [_row(["", "baseline", *(f"{t:g}" for t in ema["columns"])]), "|" + "---|" * (2 + len(ema["columns"]))]
    for label, with_average, without in zip(ema["labels"], ema["rows"], none["rows"], strict=True):
        lines.append(_row([label, "yes", *(str(cell[0]) for cell in with_average)]))
        lines.append(_row(["", "no", *(str(cell[0]) for cell in without)]))
    return "\n".join(lines)


def rule_list() -> str:
    r"""Renders the rules of all claims as a list: one item a claim, one line a statement.

    Returns:
        The list, without a line break at the end.

    Example:
        >>> print("\n".join(rule_list().splitlines()[:2]))
        1. **With REINFORCE, Sample and Sample Skip IW solve the task at every temperature >= 1.**
            - Sample solves at every temperature >= 1
    """
    lines: list[str] = []
    # Rules do not depend on results; only their grades do.
    for claim in judge([], {}):
        lines.append(f"{claim.number}. **{_escape(claim.title)}**")
        for part in claim.parts:
            if part.baseline == "none":  # the same rules once more
                continue
            lines.append(f"    - {'' if part.core else 'secondary: '}{_escape(part.rule)}")
    return "\n".join(lines)


def solved_table(beyond: Mapping[str, Any], column: str = "solved") -> str:
    """Renders the seeds solved beyond the paper, by method and temperature.

    Args:
        beyond: from `judge_beyond`.
        column: "solved" or "solved_expected".

    Returns:
        The table, without a line break at the end.

    Example:
        >>> print(solved_table({"temperatures": [0.1, 1.0], "rows": [{"label": "Sample", "solved": [3, 40]}]}))
        | temperature | 0.1 | 1 |
        |---|---|---|
        | Sample | 3 | 40 |
    """
    rows = [["temperature", *(f"{t:g}" for t in beyond["temperatures"])]]
    rows += [[row["label"], *(str(count) for count in row[column])] for row in beyond["rows"]]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def goal_list(beyond: Mapping[str, Any]) -> str:
    """Renders the goals beyond the paper, whether they hold, and what was measured."""
    verdicts = ("does not hold", "holds")
    return "\n".join(f"- {g['goal']}: **{verdicts[g['holds']]}**, {g['measured']}." for g in beyond["goals"])


_SETTINGS = {"rate": "bias rate", "strength": "prior", "id_length": "tokens of an id"}


def loss_table(found: Mapping[str, Any]) -> str:
    """Renders the contenders of the language-model comparison, the least test loss first.

    Args:
        found: what `equipoise compare lm` stored.

    Returns:
        The table, without a line break at the end.
    """
    head = [
        "router",
        "test loss (sd), nats a byte",
        "within capacity 1.25",
        "MaxVio, training",
        "MaxVio, evaluation",
        "dropped",
        "ms a step",
    ]
    lines = [f"| {' | '.join([*head, 'chosen setting'])} |", "|" + "---|" * (len(head) + 1)]
    for row in sorted(found["outcomes"], key=lambda row: row["mean"]):
        loads = [sum(row[name]) / len(row[name]) for name in ("violation", "eval_violation", "dropped")]
        cells = [f"{loads[0]:.2f}", f"{loads[1]:.2f}", f"{loads[2]:.1%}"] if row["routed"] else ["-"] * 3
        setting = ", ".join(
            f"{_SETTINGS.get(name, name.replace('_', ' '))} {value:g}" for name, value in row["setting"].items()
        )
        first = [row["label"], f"{row['mean']:.3f} ({row['spread']:.3f})", f"{row['limited_mean']:.3f}"]
        step_time = f"{1e3 * row['step_time']:.1f}"
        lines.append(f"| {' | '.join([*first, *cells, step_time, setting])} |")
    return "\n".join(lines)


def difference_table(found: Mapping[str, Any]) -> str:
    """Renders the paired differences of the language-model comparison; bold: better beyond the spread of the seeds.

    Args:
        found: what `equipoise compare lm` stored.

    Returns:
        The table, without a line break at the end.
    """
    labels = {row["contender"]: row["label"] for row in found["outcomes"]}
    head = ["", "minus", "difference", "95% interval", "within capacity 1.25", "95% interval"]
    lines = [f"| {' | '.join(head)} |".replace("|  |", "| |"), "|" + "---|" * len(head)]
    within = {(d["ours"], d["other"]): d for d in found["differences"] if d["limited"]}
    for d in found["differences"]:
        if not d["limited"]:
            cells = [labels[d["ours"]], labels[d["other"]]]
            for each in (d, within[d["ours"], d["other"]]):
                mean = f"{each['mean']:+.3f}"
                cells += [f"**{mean}**" if each["better"] else mean, f"{each['low']:+.3f} to {each['high']:+.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def length_table(found: Mapping[str, Any]) -> str:
    """Renders the validation losses of a comparison along its training, and how far each is from the hash.

    Args:
        found: what `equipoise compare lm` stored.

    Returns:
        The table, without a line break at the end.
    """
    curves = {row["contender"]: dict(row["curve"]) for row in found["outcomes"]}
    every = sorted(curves["hash"])
    shown = [every[0], every[len(every) // 2], every[-1]]
    head = ["router", *(f"{step:,} steps" for step in shown), *(f"minus hash, {step:,}" for step in shown)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in sorted(found["outcomes"], key=lambda row: row["curve"][-1][1]):
        losses = [curves[row["contender"]][step] for step in shown]
        ahead = [f"{loss - curves['hash'][step]:+.3f}" for loss, step in zip(losses, shown, strict=True)]
        lines.append(f"| {' | '.join([row['label'], *(f'{loss:.3f}' for loss in losses), *ahead])} |")
    return "\n".join(lines)


def language_goals(found: Mapping[str, Any]) -> str:
    """Renders the goals of the language-model comparison, whether they hold, and the figures."""
    verdicts = ("does not hold", "holds")
    return "\n".join(f"- {g['text']}: **{verdicts[g['holds']]}**, {g['found']}." for g in found["goals"])


def sensitivity_table(found: Mapping[str, Any]) -> str:
    """Renders the verdicts under other readings of the paper, a row for each.

    Returns:
        The table, without a line break at the end.

    Example:
        >>> row = {"field": "dataset", "value": "shared", "solved": 0.437, "verdicts": {"1": "does not hold"}}
        >>> print(sensitivity_table({"rows": [row]}))
        | | solved | 1 |
        |---|---|---|
        | `dataset` = shared | 44% | no |
    """
    short = {"holds": "yes", "undecided": "open", "does not hold": "no", "not judged": "-"}
    # As the first edition stored them.
    short |= {"reproduced": "yes", "partly": "partly", "not reproduced": "no"}
    numbers = list(found["rows"][0]["verdicts"])
    lines = [f"| | {' | '.join(['solved', *numbers])} |", "|" + "---|" * (2 + len(numbers))]
    for row in found["rows"]:
        name = "the defaults" if row["field"] is None else f"`{row['field']}` = {row['value']}"
        cells = [name, f"{row['solved']:.0%}", *(short[row["verdicts"][number]] for number in numbers)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _escape(text: str) -> str:
    """Keeps signs from being read as Markdown or HTML: p(y|x) would end a cell."""
    return text.replace("|", r"\|").replace("<", "&lt;")


def fill_verdicts(
    document: str,
    claims: Sequence[Claim],
    beyond: Mapping[str, Any] | None = None,
    sensitivity: Mapping[str, Any] | None = None,
    stored: Mapping[str, Any] | None = None,
    language: Mapping[str, Any] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
) -> str:
    r"""Puts what is generated between the marks of a document; without claims, no verdicts.

    Args:
        document: its text.
        claims: what was judged, or nothing.
        beyond: what was measured beyond the paper, from `judge_beyond`, or nothing.
        sensitivity: verdicts under other readings, from `run_sensitivity`, or nothing.
        stored: all that `claims.json` holds, or nothing.
        language: what `equipoise compare lm` stored, or nothing.
        vocabulary: the same with a larger vocabulary.

    Returns:
        The new text. A document without marks is returned as it is.

    Example:
        >>> fill_verdicts("Before <!-- begin verdicts -->\nold\n<!-- end verdicts --> after", [])
        'Before <!-- begin verdicts -->\n<!-- end verdicts --> after'
    """
    contents = {
        "summary": summarise(claims) if claims else "",
        "summary-counts": summarise(claims, named=False) if claims else "",
        "solved": panel_counts(stored) if stored and len(stored.get("solved", ())) > 1 else "",
        "verdicts": verdict_table(claims) if claims else "",
        "measured": verdict_table(claims, measured=True) if claims else "",
        "rules": rule_list(),
        "sensitivity": sensitivity_table(sensitivity) if sensitivity else "",
        "beyond-argmax": solved_table(beyond) if beyond else "",
        "beyond-expected": solved_table(beyond, "solved_expected") if beyond else "",
        "beyond-goals": goal_list(beyond) if beyond else "",
        "lm-losses": loss_table(language) if language else "",
        "lm-differences": difference_table(language) if language else "",
        "lm-goals": language_goals(language) if language else "",
        "lm-lengths": length_table(language) if language else "",
        "lm-vocabulary": loss_table(vocabulary) if vocabulary else "",
    }
    for name, content in contents.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        text = f"{content}\n" if content else ""
        # A function, because a table may hold what a replacement string would read as a reference.
        document = pattern.sub(lambda found, text=text: f"{found[1]}{text}{found[2]}", document)
    return document


def find_stored(root: Path, what: str) -> Path | None:
    """Finds the stored results that the documents show: the latest `benchmarks/<date>-<what>.json`.

    Args:
        root: of the repository.
        what: such as "claims", "beyond" or "compare-lm".

    Returns:
        The file, or None.
    """
    stored = sorted((root / "benchmarks").glob(f"*-{what}.json"))
    return stored[-1] if stored else None


Stored = dict[str, Any] | None


_STORED = ("beyond", "sensitivity", "claims", "compare-lm", "compare-lm-vocabulary")


def read_stored(root: Path) -> tuple[list[Claim], *tuple[Stored, ...]]:
    """Reads the claims, and what is stored: beyond the paper, sensitivity, all of `claims.json`, language models."""
    paths = [find_stored(root, what) for what in _STORED]
    stored = [None if path is None else json.loads(path.read_text()) for path in paths]
    claims = paths[_STORED.index("claims")]
    return [] if claims is None else read_claims(claims), *stored


DOCUMENTS = ("README.md", "docs/reproduction.md", "docs/estimators.md", "docs/language-models.md")


def update_documents(root: Path) -> list[Path]:
    """Writes rules, and what the stored results say, into the documents that show them."""
    stored = read_stored(root)
    changed: list[Path] = []
    for path in (root / name for name in DOCUMENTS):
        before = path.read_text(encoding="utf-8")
        after = fill_verdicts(before, *stored)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed


if __name__ == "__main__":
    for changed in update_documents(Path(__file__).parents[1]):
        print(f"wrote {changed}")
