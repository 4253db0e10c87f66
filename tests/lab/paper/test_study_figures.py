# SPDX-License-Identifier: Apache-2.0
"""The figures of the studies: drawn from small results, the same bytes every time, and from incomplete ones too."""

import copy
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab import _style
from equipoise_lab._style import LOOKS, look, style
from equipoise_lab.paper._recipe import Paper
from equipoise_lab.paper._studies import (
    FIGURES,
    ON_RECIPE,
    STUDIES,
    _elbo,
    _marginals,
    _maximum_entropy,
    _noise,
    _overview,
    _solver_time,
    save_study_figures,
)
from equipoise_lab.paper._studies._traces import draw_training, draw_weights

SMALL = Paper(seeds=2, steps=3, num_points=10)


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pictures that take less time, in the style of all."""
    monkeypatch.setattr(_style, "DPI", 40)
    with style():
        yield


@pytest.fixture(scope="module")
def studies() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_marginals, "QUICK_SIZES", ((2, 2), (4, 2), (16, 2)))
        patch.setattr(_maximum_entropy, "QUICK_SIZES", ((4, 4), (8, 2)))
        patch.setattr(_maximum_entropy, "SHARPNESS", (0.5, 2.0))
        patch.setattr(_solver_time, "QUICK_ROWS", (8, 16))
        patch.setattr(_solver_time, "SQUARE", (4,))
        yield {
            "overview": _overview.run(quick=True),
            "marginals": _marginals.run(quick=True),
            "maximum_entropy": _maximum_entropy.run(quick=True),
            "solver_time": _solver_time.run(quick=True),
            "elbo": _elbo.run(SMALL, quick=True),
            "noise": _noise.run(SMALL, quick=True),
            "traces": traces(),
        }


def traces() -> dict[str, Any]:
    """A made-up study in the shape of the real one, which would have to be trained."""
    steps = [0, 1, 10, 100]
    keys = ("log_likelihood_argmax", "elbo", "marginal_log_likelihood", "router_entropy", "ess", "largest_weight")
    keys += ("gradient_variance", "gradient_norm", "possible_weight", "row_variance")
    records = [
        {"method": method, "temperature": temperature, "steps": steps} | dict.fromkeys(keys, [0.5, 0.4, None, 0.2])
        for method in PAPER_STRATEGIES
        for temperature in (1.0, 10.0)
    ]
    common = [record | {"gradient_norm": [0.1] * 4} for record in records]
    return {"seeds": 2, "draws": 8, "training": records, "common": common}


def test_every_study_has_a_figure(studies: dict[str, Any], tmp_path: Path) -> None:
    assert set(STUDIES) == set(studies) == {name for name, _, _ in FIGURES}
    assert set(ON_RECIPE) < set(STUDIES)
    paths = save_study_figures(studies, tmp_path / "figures")
    assert len(paths) == 2 * len(FIGURES)
    for path in paths:
        assert path.stat().st_size > 1000
        if path.suffix == ".svg":
            ElementTree.fromstring(path.read_text())
    again = save_study_figures({"overview": studies["overview"]}, tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths[: len(again)]]


def test_what_is_missing_is_not_drawn(studies: dict[str, Any], tmp_path: Path) -> None:
    assert save_study_figures({}, tmp_path) == []
    solvers = copy.deepcopy(studies["solver_time"])
    for size in solvers["sizes"]:
        size["hungarian_ms"] = None  # no scipy
    lines = _solver_time.draw(solvers).axes[0].get_legend().get_texts()
    assert [line.get_text() for line in lines] == ["cycle cancelling", "primal-dual"]
    few = traces()
    for view in ("training", "common"):
        few[view] = [record for record in few[view] if record["method"] in ("sample", "gm-iw")]
    shown = [axes for axes in draw_training(few).axes if axes.axison]
    assert [axes.get_title(loc="left") for axes in shown[:2]] == ["Sample", "Gumbel-Matching IW"]
    assert len(shown) == 4  # those two, and the entropy at both temperatures
    assert draw_weights(few).axes


def test_methods_differ_in_more_than_colour() -> None:
    assert list(LOOKS) == list(PAPER_STRATEGIES)
    assert len({each.marker for each in LOOKS.values()}) == len(LOOKS)
    assert len({each.colour for each in LOOKS.values()}) == len(LOOKS)
    assert look("a strategy of one's own").marker not in {each.marker for each in LOOKS.values()}
