# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from equipoise.estimators import PAPER_STRATEGIES
from equipoise_lab._style import new_figure
from equipoise_lab.paper._result_figures import _draw_panel, _drawn, draw_result_figures, solved_by_share
from equipoise_lab.paper._solved import panel_tables, sweep_tables
from equipoise_lab.paper._task import draw_data

MODEL = {
    "x": [-0.5, 0.0, 0.9],
    "y": [-0.6, -0.2, 0.2],
    "experts": [[0.8, -0.2], [-2.0, 2.0]],
    "router": [-60.0, 30.0],
    "label": "Sample Skip IW, temperature 1, seed 0",
    "mse": 0.0098,
}


def words(path: Path) -> str:
    """All text of an SVG."""
    return "\n".join(element.text or "" for element in ElementTree.parse(path).iter() if element.tag.endswith("text"))


def few(results: Any) -> list[Any]:
    """Enough to draw everything, quickly."""
    return [r for r in results if r.temperature in (0.3, 1.0) and r.seed < 2 and r.balance_weight in (0.0, 0.01)]


@pytest.fixture
def _vectors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the PNG files, which take half of the time and say the same."""

    def save(figure: Any, folder: Path, name: str) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"{name}.svg")
        return [folder / f"{name}.svg"]

    monkeypatch.setattr("equipoise_lab.paper._result_figures.save", save)


@pytest.mark.usefixtures("_vectors_only")
def test_figures_name_the_strategies_and_say_that_a_run_was_quick(make_results: Any, tmp_path: Path) -> None:
    results = [r for r in few(make_results(drop=lambda s: not s.main or s.variant == "no-iw")) if r.temperature == 1.0]
    recipe = {"quick": True, "steps": 500, "dataset": "per-seed", "num_points": 100, "noise_sd": 0.1}
    paths = draw_result_figures(tmp_path, results, recipe, model=MODEL)
    assert [path.stem for path in paths] == ["main", "appendix", "solved", "minority"]
    for path in paths:
        text = words(path)
        assert "quick run (500 steps): not the experiment in full" in text
        assert all(strategy.label in text for strategy in PAPER_STRATEGIES.values())
    main = words(paths[0])
    assert "Data and learned model" in main
    assert "MSE 0.0098" in main
    assert "REINFORCE, moving average" in main
    assert "REINFORCE, no baseline" in main
    assert {"moving average", "no baseline"} <= set(words(paths[3]).splitlines())
    assert words(paths[1]).count("Gumbel-Matching IW") == 1, "one legend for all panels"


def test_without_results_nothing_is_drawn(tmp_path: Path) -> None:
    assert draw_result_figures(tmp_path, [], {}, model=MODEL) == []


def draw(runs: list[Any]) -> Any:
    axes = new_figure(3.0, 3.0).subplots()
    _draw_panel(axes, runs, "panel")
    return axes


def test_diverged_runs_are_at_the_top_edge_and_said_so(make_results: Any) -> None:
    runs = [r for r in few(make_results()) if r.loss == "reinforce" and r.variant == "plain" and r.method == "gm"]
    ill = [dataclasses.replace(r, mse=mse) for r, mse in zip(runs, (math.nan, math.inf, 7.0, 0.05), strict=False)]
    axes = draw(ill)
    (said,) = [text.get_text() for text in axes.texts]
    assert said == "at the top edge: 2 diverged, 1 above 2"
    top = axes.get_ylim()[1]
    heights = [y for line in axes.lines if line.get_linestyle() == "None" for y in line.get_ydata()]
    assert sorted(heights) == sorted([top, top, top, 0.05][: len(heights)])
    assert not draw(runs).texts


@pytest.mark.parametrize(("mse", "drawn"), [(0.05, 0.05), (math.nan, 2.0), (math.inf, 2.0), (3.0, 2.0), (1e-4, 0.006)])
def test_every_run_is_drawn_inside_the_frame(mse: float, drawn: float) -> None:
    assert _drawn(mse) == drawn


def test_the_line_goes_through_the_medians(make_results: Any) -> None:
    runs = [r for r in make_results() if r.loss == "reinforce" and r.variant == "plain" and r.method == "skip"]
    runs = [dataclasses.replace(r, mse=0.01 * (1 + r.seed)) for r in runs if r.temperature == 1.0]
    runs = [r for r in runs if r.balance_weight == 0.0 and r.learning_rate == 0.1 and r.seed < 5]
    lines = [line for line in draw(runs).lines if line.get_marker() == "D"]
    assert [list(line.get_ydata()) for line in lines] == [[0.03]]


def test_tables_count_what_is_solved(make_results: Any) -> None:
    results = make_results(lambda s: 0.7 if s.method == "gm" else None, drop=lambda s: s.method == "skip" and s.main)
    tables = panel_tables(results)
    titles = ["REINFORCE", "REINFORCE, no baseline", "REINFORCE, Sinkhorn first", "REINFORCE, no importance weights"]
    assert [table.title for table in tables[:4]] == titles
    assert len(tables) == 7
    plain = dict(zip(PAPER_STRATEGIES, tables[0].rows, strict=True))
    assert plain["gm"] == ((14, 20),) * 12
    assert plain["sample"] == ((2, 20),) * 5 + ((20, 20),) * 7
    assert plain["skip"] == (None,) * 12


def test_the_share_of_the_minority_is_that_of_each_seed_s_data(make_results: Any) -> None:
    points = solved_by_share(make_results(), 100, 0.1)
    assert set(points) == {(baseline, method) for baseline in ("ema", "none") for method in PAPER_STRATEGIES}
    pairs = points["none", "skip"]
    assert len(pairs) == 20
    assert [share for share, _ in pairs] == sorted(
        float((draw_data(seed, 100, 0.1)[0] >= 0.5).sum()) / 100 for seed in range(20)
    )
    # In the made-up world the first ten seeds are solved at every temperature from 1 on, the others at none.
    assert [solved for _, solved in pairs].count(1.0) == 10


def test_sweeps_hold_the_runs_of_the_panels_too(make_results: Any) -> None:
    tables = sweep_tables(make_results())
    assert [table.varies for table in tables] == ["weight of the balance loss"] * 8 + ["learning rate"] * 2
    assert tables[0].columns == (0.0, 0.003, 0.01, 0.03, 0.1)
    assert tables[-1].columns == (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    assert all(cell == (0, 20) for table in tables[:8] for cell in [row[-1] for row in table.rows])
