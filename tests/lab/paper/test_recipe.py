# SPDX-License-Identifier: Apache-2.0
"""The grid of the experiment, and what it refuses."""

from collections import Counter

import pytest

from equipoise_lab.paper import Paper, quick_recipe, total_steps


def test_the_panels_have_40_seeds_with_reinforce_and_20_with_gating() -> None:
    runs = Paper(sweeps=()).runs()
    assert len(runs) == len(set(runs)) == 6 * 12 * (4 * 40 + 3 * 20)
    counts = Counter((run.loss, run.variant, run.baseline) for run in runs)
    reinforce = [("plain", "ema"), ("plain", "none"), ("sinkhorn", "ema"), ("no-iw", "ema")]
    assert counts == {("reinforce", *panel): 2880 for panel in reinforce} | {
        ("gating", variant, "none"): 1440 for variant in ("plain", "sinkhorn", "no-iw")
    }
    assert {run.seed for run in runs} == set(range(1000, 1040))
    assert {run.balance_weight for run in runs if run.loss == "reinforce"} == {0.0}
    assert {run.balance_weight for run in runs if run.loss == "gating"} == {0.01}


def test_the_sweeps_add_to_the_panels_and_repeat_nothing() -> None:
    runs = Paper().runs()
    assert len(runs) == len(set(runs))
    weights = Counter((run.loss, run.balance_weight) for run in runs if run.balance_weight not in (0.0, 0.01))
    # Six methods, four temperatures, twenty seeds for each weight that the panels do not have.
    assert weights == {(loss, w): 480 for loss in ("reinforce", "gating") for w in (0.003, 0.03, 0.1)}
    rates = Counter(run.learning_rate for run in runs)
    assert {rate: rates[rate] for rate in (0.001, 0.01, 1.0)} == {0.001: 240, 0.01: 240, 1.0: 240}


def test_units_hold_what_samples_alike() -> None:
    units = Paper().units()
    assert len(units) == 9
    assert all({run.unit for run in runs} == {name} for name, runs in units.items())
    assert total_steps(Paper()) == 9 * 10_000
    # Dataset, two initialisations and the load (that of gating): all units. The order: the three that Sinkhorn changes.
    assert total_steps(Paper(), sensitivity=True) == (9 + 4 * 9 + 3) * 10_000


def test_the_quick_recipe_is_a_part_of_the_whole() -> None:
    assert set(quick_recipe().runs()) <= set(Paper().runs())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("smaple",)}, r"methods must be one of 'sample', .*, got 'smaple'"),
        ({"losses": ("rl",)}, r"losses must be one of 'reinforce', 'gating', got 'rl'"),
        ({"variants": ("iw",)}, r"variants must be one of 'plain', 'sinkhorn', 'no-iw', got 'iw'"),
        ({"sweeps": ("rate",)}, r"sweeps must be one of 'gating-balance', .*, got 'rate'"),
        ({"dataset": "own"}, r"dataset must be one of 'per-seed', 'shared', got 'own'"),
        ({"baselines": ("mean",)}, r"baselines must be one of 'ema', 'none', got 'mean'"),
        ({"panel_seeds": 0}, r"panel_seeds must be .*, got 0"),
        ({"seeds": 0}, r"seeds must be .*, got 0"),
        ({"steps": -1}, r"steps must be .*, got -1"),
        ({"temperatures": (0.0,)}, r"temperatures must be finite and > 0, got 0.0"),
        ({"learning_rate": float("nan")}, r"learning_rate must be finite and > 0, got nan"),
        ({"num_points": 7}, r"num_points must be even and at least 2, .*, got 7"),
        ({"baseline_decay": 1.0}, r"baseline_decay must be .*, got 1.0"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Paper(**changes)
