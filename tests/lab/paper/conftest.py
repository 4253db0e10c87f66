# SPDX-License-Identifier: Apache-2.0
"""Made-up outcomes: a world in which every claim of the paper holds, and the means to change it."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from equipoise_lab.paper._recipe import (
    BALANCE_WEIGHTS,
    LEARNING_RATES,
    METHODS,
    SWEEP_TEMPERATURES,
    TEMPERATURES,
)
from equipoise_lab.paper._results import LOSSES, VARIANTS, Result

SEEDS = 20


@dataclass(frozen=True)
class Setting:
    loss: str
    variant: str
    method: str
    temperature: float
    weight: float
    rate: float
    baseline: str = "ema"

    @property
    def main(self) -> bool:
        return self.rate == 0.1 and self.weight == {"reinforce": 0.0, "gating": 0.01}[self.loss]


Change = Callable[[Setting], float | None]
"""The new fraction of solved seeds for a setting, or None to leave it."""


def _reinforce(s: Setting) -> float:
    t, independent = s.temperature, s.method in ("sample", "skip-iw", "skip")
    if s.variant == "no-iw":
        return 0.9 if independent and t < 1.0 else 0.1
    start = 1.0 if s.variant == "plain" and independent else 10.0
    best = {"skip": 0.5, "gm": 0.1}.get(s.method, 1.0)
    return best if t >= start else 0.1


def _gating(s: Setting) -> float:
    t = s.temperature
    if s.variant == "no-iw" or s.weight < 0.01:
        return 0.0
    if s.method in ("gm-iw", "gm-sh"):
        return 0.9 if t <= 0.3 else 0.0
    return 1.0 if s.variant == "sinkhorn" and t <= 0.1 else 0.1


def _fraction(s: Setting) -> float:
    if s.weight == 0.1:
        return 0.0
    fraction = _reinforce(s) if s.loss == "reinforce" else _gating(s)
    return fraction * {0.1: 1.0, 0.03: 0.8, 0.3: 0.7}.get(s.rate, 0.2)


@functools.cache
def _settings() -> list[Setting]:
    found: dict[Setting, None] = {}
    for loss, weight in (("reinforce", 0.0), ("gating", 0.01)):
        for method in METHODS:
            found |= dict.fromkeys(Setting(loss, v, method, t, weight, 0.1) for v in VARIANTS for t in TEMPERATURES)
    for method in METHODS:
        for t in SWEEP_TEMPERATURES:
            found |= dict.fromkeys(Setting(x, "plain", method, t, w, 0.1) for x in LOSSES for w in BALANCE_WEIGHTS)
        for t in (1.0, 10.0):
            found |= dict.fromkeys(Setting("reinforce", "plain", method, t, 0.0, rate) for rate in LEARNING_RATES)
        found |= dict.fromkeys(Setting("reinforce", "plain", method, t, 0.0, 0.1, "none") for t in TEMPERATURES)
    return list(found)


# Thousands of runs, made again for every test but for a few: worth remembering.
@functools.cache
def _runs(s: Setting, solved: int) -> list[Result]:
    return [
        Result(
            loss=s.loss,  # pyright: ignore[reportArgumentType]
            variant=s.variant,  # pyright: ignore[reportArgumentType]
            method=s.method,
            temperature=s.temperature,
            seed=seed,
            balance_weight=s.weight,
            learning_rate=s.rate,
            baseline="none" if s.loss == "gating" else s.baseline,  # pyright: ignore[reportArgumentType]
            mse=0.0095 + 5e-5 * seed if seed < solved else 0.06 + 0.01 * seed,
            mse_expected=0.011 if seed < solved else 0.08,
            solved=seed < solved,
        )
        for seed in range(SEEDS)
    ]


@pytest.fixture
def make_results() -> Callable[..., list[Result]]:
    """Makes results in which the claims hold, but for a change; `drop` leaves out settings."""

    def make(change: Change = lambda s: None, drop: Callable[[Setting], bool] = lambda s: False) -> list[Result]:
        results: list[Result] = []
        for s in _settings():
            if drop(s):
                continue
            fraction = change(s)
            solved = round(SEEDS * (_fraction(s) if fraction is None else fraction))
            results += _runs(s, solved)
        return results

    return make


_TRACES = (
    # method, temperature, largest weight, gradient variance, effective sample size
    ("sample", 1.0, 1.0, 0.1, 1.0),
    ("skip-iw", 1.0, 2.0, 0.2, 0.7),
    ("gm-iw", 1.0, 80.0, 0.9, 0.5),
    ("gm-iw", 10.0, 6.0, 0.3, 0.4),
)


def _studies() -> dict[str, Any]:
    common = [
        {
            "method": method,
            "temperature": temperature,
            "steps": [0, 100],
            "largest_weight": [1.0, weight],
            "gradient_variance": [variance, variance],
            "ess": [ess, ess],
        }
        for method, temperature, weight, variance, ess in _TRACES
    ]
    rows = [
        {
            "n": n,
            "k": 2,
            "sd": sd,
            "sinkhorn_vs_gumbel_matching": 0.05 if n < 4 else 0.01,
            "sinkhorn_vs_gibbs": 0.012,
            "unbalanced_vs_gumbel_matching": 0.1,
            "unbalanced_vs_gibbs": 0.1,
        }
        for n in (2, 4, 8)
        for sd in (1.0, 2.0)
    ]
    noise = [
        {
            "kind": kind,
            "scale": scale,
            "method": "gm-iw",
            "importance": weights,
            "mse": [0.01] * solved + [None] * (20 - solved),
        }
        for kind, top in (("gumbel", 18), ("gaussian", 18), ("jitter", 14))
        for weights in (True, False)
        for scale, solved in ((0.1, 1), (0.3, top if weights else 1))
    ]
    elbo = [
        {"objective": objective, "sd": sd, "seed": seed, "router_entropy": entropy + 1e-3 * seed}
        for objective, entropy in (("elbo", 0.005), ("marginal", 0.2))
        for sd in (0.1, 1.0)
        for seed in range(3)
    ]
    return {
        "traces": {"common": common},
        "marginals": {"rows": rows},
        "maximum_entropy": {
            "problems": [{"n": 6, "k": 2, "r_squared": r, "tau": 1.2, "total_variation": 0.01} for r in (0.97, 0.999)]
        },
        "solver_time": {
            "sizes": [
                {"n": 1024, "k": 4, "cycle_cancelling_ms": 2.0, "hungarian_ms": 60.0, "improvements": 4.0},
                {"n": 64, "k": 64, "cycle_cancelling_ms": 9.0, "hungarian_ms": 1.0, "improvements": 90.0},
                {"n": 65536, "k": 4, "cycle_cancelling_ms": 30.0, "hungarian_ms": None, "improvements": 20.0},
            ]
        },
        "noise": {"runs": noise},
        "elbo": {"runs": elbo},
    }


@pytest.fixture
def studies() -> dict[str, Any]:
    """Studies in which the claims hold; each test gets its own copy to change."""
    return copy.deepcopy(_studies())
