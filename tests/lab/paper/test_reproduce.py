# SPDX-License-Identifier: Apache-2.0
"""The command as a whole, in the smallest form that has every part."""

import json
from pathlib import Path

import pytest

from equipoise_lab.paper import Paper, _reproduce, read_claims, read_results, reproduce, total_steps
from equipoise_lab.paper._beyond import beyond_recipe
from equipoise_lab.paper._reproduce import begin_anew_if_complete, run_studies
from equipoise_lab.paper._runner import run_units

TINY = Paper(methods=("sample", "gm-iw"), temperatures=(1.0, 10.0), seeds=1, panel_seeds=1, steps=4, sweeps=())


@pytest.fixture
def small_studies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Leaves out the studies that take their time; says which ones were run."""
    ran: list[str] = []
    studies = {name: _reproduce.STUDIES[name] for name in ("overview", "maximum_entropy", "traces")}

    def watch(name: str):
        def run(*arguments, **how):
            ran.append(name)
            return studies[name](*arguments, **how)

        return run

    monkeypatch.setattr(_reproduce, "STUDIES", {name: watch(name) for name in studies})
    monkeypatch.setattr(_reproduce, "_ALONE", "maximum_entropy")
    return ran


def test_writes_everything_it_names(tmp_path: Path, small_studies: list[str]) -> None:
    said: list[str] = []
    steps: list[int] = []
    found = reproduce(
        TINY, tmp_path, command="equipoise reproduce", quick=True, workers=0, say=said.append, advance=steps.append
    )
    assert read_results(tmp_path / "results.csv") == found.results
    assert len(found.results) == len(TINY.runs())
    assert [claim.number for claim in read_claims(tmp_path / "claims.json")] == list(range(1, 17))
    assert all(path.exists() for path in found.paths)
    assert {"report.html", "main.svg", "main.png", "appendix.png", "overview.png"} <= {p.name for p in found.paths}
    assert sum(steps) == len(TINY.units()) * TINY.steps
    assert said[0] == f"training {len(TINY.runs())} runs of 4 steps"
    assert sorted(small_studies) == ["maximum_entropy", "overview", "traces"]


def test_studies_that_are_done_are_not_run_again(tmp_path: Path, small_studies: list[str]) -> None:
    first = run_studies(TINY, tmp_path, quick=True, workers=0)
    (tmp_path / "studies" / "overview.json").unlink()
    del small_studies[:]
    again = run_studies(TINY, tmp_path, quick=True, workers=0)
    assert small_studies == ["overview"]
    assert again == first


@pytest.mark.parametrize(
    ("complete", "wider", "sensitivity", "kept"),
    [(False, False, False, True), (True, False, False, False), (True, False, True, True), (True, True, True, False)],
)
def test_a_command_that_ended_begins_anew(
    tmp_path: Path, complete: bool, wider: bool, sensitivity: bool, kept: bool
) -> None:
    unit = tmp_path / "units" / "direct-gm.json"
    unit.parent.mkdir()
    unit.write_text("{}")
    if complete:
        (tmp_path / "report.html").write_text("")
    if wider:
        (tmp_path / "sensitivity").mkdir()
    begin_anew_if_complete(tmp_path, ["sensitivity"] if sensitivity else [])
    assert unit.exists() == kept
    assert not (tmp_path / "report.html").exists()


def test_beyond_the_paper_is_part_of_the_page(tmp_path: Path, small_studies: list[str]) -> None:
    del small_studies
    run_units(TINY, tmp_path, workers=0)
    steps: list[int] = []
    found = reproduce(
        TINY, tmp_path, command="x", quick=True, beyond=True, workers=0, say=lambda _: None, advance=steps.append
    )
    assert sum(steps) == total_steps(TINY, beyond=True)
    page = (tmp_path / "report.html").read_text()
    assert "Beyond the paper" in page
    assert "after parts that were there before" in page
    assert {"beyond.png", "beyond-solved.svg"} <= {path.name for path in found.paths}
    study = json.loads((tmp_path / "beyond" / "beyond.json").read_text())
    assert [row["method"] for row in study["rows"]] == list(beyond_recipe(TINY).methods)
