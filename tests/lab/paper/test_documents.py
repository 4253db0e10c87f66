# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from equipoise_lab.paper._claims import judge, write_claims
from equipoise_lab.paper._solved import panel_tables
from fill_documents import (
    DOCUMENTS,
    fill_verdicts,
    panel_counts,
    read_stored,
    solved_table,
    update_documents,
    verdict_table,
)
from store_reproduction import store

ROOT = Path(__file__).parents[3]
DOCUMENT = "Intro.\n\n<!-- begin verdicts -->\nold | table\n<!-- end verdicts -->\n\nThe end.\n"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_show_the_rules_and_what_is_stored_and_nothing_else(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert fill_verdicts(text, *read_stored(ROOT)) == text, "run benchmarks/fill_documents.py"


def test_the_documentation_has_a_place_for_the_verdicts() -> None:
    text = (ROOT / "docs/reproduction.md").read_text(encoding="utf-8")
    assert "<!-- begin measured -->" in text
    assert "<!-- begin rules -->" in text
    text = (ROOT / "docs/estimators.md").read_text(encoding="utf-8")
    assert all(f"<!-- begin beyond-{what} -->" in text for what in ("argmax", "expected", "goals"))


def test_every_row_of_the_table_has_the_same_cells(make_results: Any, studies: dict[str, Any]) -> None:
    claims = judge(make_results(), studies)
    for measured, cells in ((False, 4), (True, 5)):
        lines = verdict_table(claims, measured=measured).splitlines()
        assert len(lines) == 18
        assert {line.replace(r"\|", "").count("|") for line in lines} == {cells + 1}
    assert "&lt;&lt; n" in verdict_table(claims)


def test_a_bar_does_not_end_a_cell() -> None:
    (claim,) = [claim for claim in judge([], {}) if claim.number == 15]
    table = verdict_table([dataclasses.replace(claim, measured="sd of p(y|x)")], measured=True)
    assert table.endswith(r"| sd of p(y\|x) |")


def test_only_what_is_between_the_marks_changes() -> None:
    claims = judge([], {})
    filled = fill_verdicts(DOCUMENT, claims)
    assert filled.startswith(
        "Intro.\n\n<!-- begin verdicts -->\n| | the paper's claim | verdict | without a baseline |\n"
    )
    assert filled.endswith("| not judged | |\n<!-- end verdicts -->\n\nThe end.\n")
    assert "old" not in filled
    assert fill_verdicts(filled, claims) == filled
    assert fill_verdicts("no marks", claims) == "no marks"


def test_documents_are_updated_from_the_latest_file(tmp_path: Path, make_results: Any, studies: dict[str, Any]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(DOCUMENT)
    (tmp_path / "docs/reproduction.md").write_text(DOCUMENT.replace("verdicts", "measured"))
    for name in ("estimators", "language-models"):
        (tmp_path / f"docs/{name}.md").write_text("no marks")
    write_claims(tmp_path / "benchmarks/2026-01-02-claims.json", judge([], {}))
    write_claims(tmp_path / "benchmarks/2026-11-02-claims.json", judge(make_results(), studies))
    assert update_documents(tmp_path) == [tmp_path / "README.md", tmp_path / "docs/reproduction.md"]
    assert (tmp_path / "README.md").read_text().count(" holds ") == 19  # three of them twice
    assert "With the moving average: (a) 100% of runs solved" in (tmp_path / "docs/reproduction.md").read_text()
    assert update_documents(tmp_path) == []


def test_what_the_command_found_is_stored_under_a_date(
    tmp_path: Path, make_results: Any, studies: dict[str, Any]
) -> None:
    for folder in ("docs", "benchmarks", "found/figures"):
        (tmp_path / folder).mkdir(parents=True)
    for name in DOCUMENTS:
        (tmp_path / name).write_text(DOCUMENT + "![](benchmarks/2026-01-02-reproduce.png)\n")
    write_claims(tmp_path / "found/claims.json", judge(make_results(), studies))
    for name in ("main", "minority"):
        (tmp_path / f"found/figures/{name}.png").write_bytes(name.encode())
    written = store(tmp_path / "found", "2026-11-02", tmp_path)
    assert (tmp_path / "benchmarks/2026-11-02-reproduce.png").read_bytes() == b"main"
    assert tmp_path / "benchmarks/2026-11-02-claims.json" in written
    text = (tmp_path / "README.md").read_text()
    assert "![](benchmarks/2026-11-02-reproduce.png)" in text
    assert "| 1 | With REINFORCE" in text


def test_seeds_solved_with_and_without_the_baseline(make_results: Any, tmp_path: Path) -> None:
    results = make_results(lambda s: 0.25 if s.baseline == "none" else None)
    write_claims(tmp_path / "claims.json", judge(results, {}), panel_tables(results))
    lines = panel_counts(json.loads((tmp_path / "claims.json").read_text())).splitlines()
    assert len(lines) == 2 + 2 * 6
    assert lines[2] == f"| Sample | yes |{' 2 |' * 5}{' 20 |' * 7}"
    assert lines[3] == f"| | no |{' 5 |' * 12}"


def test_tables_beyond_the_paper() -> None:
    beyond = {
        "temperatures": [0.01, 100.0],
        "rows": [{"label": "Sample", "solved": [1, 2], "solved_expected": [3, 4]}],
        "goals": [{"goal": "All", "holds": False, "measured": "some"}],
    }
    assert solved_table(beyond, "solved_expected").splitlines()[-1] == "| Sample | 3 | 4 |"
    document = "<!-- begin beyond-goals -->\n<!-- end beyond-goals -->"
    assert "- All: **does not hold**, some." in fill_verdicts(document, [], beyond)


def test_tables_of_the_language_models() -> None:
    row = {
        "contender": "a",
        "label": "A",
        "mean": 1.5,
        "spread": 0.01,
        "routed": True,
        "setting": {"learning_rate": 0.003},
    }
    row |= {
        "violation": [0.1, 0.3],
        "eval_violation": [0.5],
        "dropped": [0.0, 0.1],
        "step_time": 0.02,
        "limited_mean": 1.6,
    }
    other = {**row, "contender": "b", "label": "B", "mean": 1.4, "routed": False}
    pair = {"ours": "a", "other": "b", "mean": 0.1, "low": -0.1, "high": 0.3, "better": False, "limited": False}
    within = {**pair, "mean": -0.2, "low": -0.3, "high": -0.1, "better": True, "limited": True}
    found = {"outcomes": [row, other], "differences": [pair, within]}
    found["goals"] = [{"text": "A is better", "holds": False, "found": "+0.100"}]
    marks = "".join(
        f"<!-- begin lm-{name} -->\n<!-- end lm-{name} -->\n" for name in ("losses", "differences", "goals", "lengths")
    )
    curves = {"A": 1.3, "B": 1.2, "hash": 1.25}
    found["outcomes"] = [
        {**each, "curve": [[step, curves[each["label"]] + extra] for step, extra in ((10, 1.0), (20, 0.5), (30, 0.0))]}
        for each in (row, other, {**row, "contender": "hash", "label": "hash"})
    ]
    filled = fill_verdicts(marks, [], language=found)
    assert "| router | 10 steps | 20 steps | 30 steps | minus hash, 10 | minus hash, 20 | minus hash, 30 |" in filled
    assert "| B | 2.200 | 1.700 | 1.200 | -0.050 | -0.050 | -0.050 |\n| hash " in filled
    assert "| B | 1.400 (0.010) | 1.600 | - | - | - | 20.0 | learning rate 0.003 |\n| A | 1.500 " in filled
    assert "| A | 1.500 (0.010) | 1.600 | 0.20 | 0.50 | 5.0% | 20.0 |" in filled
    assert "| A | B | +0.100 | -0.100 to +0.300 | **-0.200** | -0.300 to -0.100 |" in filled
    assert "- A is better: **does not hold**, +0.100." in filled
