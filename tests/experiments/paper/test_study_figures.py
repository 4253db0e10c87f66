# SPDX-License-Identifier: Apache-2.0
"""The figures of the studies: drawn from small results, the same bytes every time, and from incomplete ones too."""

import copy
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from equipoise.estimators import STRATEGIES
from equipoise.experiments.paper._recipe import Paper
from equipoise.experiments.paper._studies import (
    ON_RECIPE,
    STUDIES,
    _elbo,
    _marginals,
    _maximum_entropy,
    _noise,
    _overview,
    _solver_time,
)
from equipoise.experiments.paper._study_figures import FIGURES, save_study_figures
from equipoise.experiments.paper._style import LOOKS, look

SMALL = Paper(seeds=2, steps=3, num_points=10)


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
        for method in STRATEGIES
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
    again = save_study_figures(studies, tmp_path / "again")
    for one, other in zip(paths, again, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_what_is_missing_is_not_drawn(studies: dict[str, Any], tmp_path: Path) -> None:
    assert save_study_figures({}, tmp_path) == []
    few = {name: copy.deepcopy(studies[name]) for name in ("solver_time", "traces")}
    for size in few["solver_time"]["sizes"]:
        size["hungarian_ms"] = None  # no scipy
    for view in ("training", "common"):
        few["traces"][view] = [record for record in few["traces"][view] if record["method"] in ("sample", "gm-iw")]
    names = [path.name for path in save_study_figures(few, tmp_path) if path.suffix == ".svg"]
    assert names == ["study-solver-time.svg", "study-training.svg", "study-weights.svg"]


def test_methods_differ_in_more_than_colour() -> None:
    assert list(LOOKS) == list(STRATEGIES)
    assert len({each.marker for each in LOOKS.values()}) == len(LOOKS)
    assert len({each.colour for each in LOOKS.values()}) == len(LOOKS)
    assert look("a strategy of one's own").marker not in {each.marker for each in LOOKS.values()}
