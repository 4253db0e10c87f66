# SPDX-License-Identifier: Apache-2.0
"""Studies of single statements of the paper: what needs no grid of training runs, and what looks inside one.

Each is a module. Its `run` returns plain numbers, ready for JSON; those of `ON_RECIPE` take the recipe of the
experiment. Its `judge` takes these numbers and returns what it found for each statement of its claim in `claims.toml`,
in their order; LookupError says that something it needs is missing. Its `draw` makes the figure.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from equipoise_lab._style import save, style
from equipoise_lab.paper._rules import Part, Study
from equipoise_lab.paper._studies import _elbo, _marginals, _maximum_entropy, _noise, _overview, _solver_time, _traces

_MODULES = {
    "overview": _overview,
    "marginals": _marginals,
    "maximum_entropy": _maximum_entropy,
    "solver_time": _solver_time,
    "elbo": _elbo,
    "noise": _noise,
    "traces": _traces,
}
STUDIES: dict[str, Callable[..., dict[str, Any]]] = {name: study.run for name, study in _MODULES.items()}
ON_RECIPE = ("elbo", "noise", "traces")
JUDGES: dict[str, Callable[[Study], list[Part]]] = {
    name: study.judge for name, study in _MODULES.items() if name != "overview"
}
FIGURES: tuple[tuple[str, Callable[[Study], Figure], str], ...] = (
    ("overview", _overview.draw, "overview"),
    ("marginals", _marginals.draw, "study-marginals"),
    ("maximum_entropy", _maximum_entropy.draw, "study-maximum-entropy"),
    ("solver_time", _solver_time.draw, "study-solver-time"),
    ("traces", _traces.draw_training, "study-training"),
    ("traces", _traces.draw_weights, "study-weights"),
    ("elbo", _elbo.draw, "study-elbo"),
    ("noise", _noise.draw, "study-noise"),
)
"""The study that each figure shows, what draws it, and the name of its files."""


def save_study_figures(studies: Mapping[str, Study], folder: Path) -> list[Path]:
    """Draws every study that is given."""
    with style():
        drawn = [save(draw(studies[name]), folder, file) for name, draw, file in FIGURES if name in studies]
    return [path for paths in drawn for path in paths]
