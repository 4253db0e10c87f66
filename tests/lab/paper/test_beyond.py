# SPDX-License-Identifier: Apache-2.0
"""The goals beyond the paper, on made-up results that must meet them and that must not."""

from dataclasses import asdict, replace

import pytest

from equipoise_lab.paper import Paper, Result
from equipoise_lab.paper._beyond import SLACKENED, TIGHT, beyond_recipe, compare_paired, judge_beyond
from equipoise_lab.paper._methods import METHOD_TABLE


def make_results(recipe: Paper, solved: dict[tuple[str, float], int], otherwise: int) -> list[Result]:
    """Results in which the first so many seeds are solved."""
    return [
        Result(
            **asdict(run),
            mse=0.01
            if (fine := run.seed - recipe.first_seed < solved.get((run.method, run.temperature), otherwise))
            else 0.5,
            mse_expected=0.5,
            solved=fine,
        )
        for run in recipe.runs()
    ]


@pytest.fixture
def recipe() -> Paper:
    return beyond_recipe(Paper())


def test_no_seed_is_one_of_the_paper_s_experiment(recipe: Paper) -> None:
    seeds = {run.seed for run in recipe.runs()}
    assert len(seeds) == 40
    assert not seeds & {run.seed for run in Paper().runs()}
    assert beyond_recipe(replace(Paper(), dataset="shared")).dataset == "per-seed"


def test_what_the_goals_are_about_is_balanced_and_unbiased() -> None:
    for name in (TIGHT, SLACKENED):
        strategy = METHOD_TABLE[name].strategy
        assert strategy.respects_capacity
        assert strategy.unbiased
    assert METHOD_TABLE[TIGHT].capacity(100) is None  # n/k
    assert METHOD_TABLE[SLACKENED].capacity(100) == 62


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, [True, True]),
        ({("sample", 3.0): 39}, [False, True]),
        ({(TIGHT, 0.03): 37}, [False, True]),
        ({(TIGHT, 30.0): 37}, [False, True]),
        ({(TIGHT, 0.01): 0, (TIGHT, 100.0): 0, (SLACKENED, 0.01): 0}, [True, True]),  # outside of the range
        ({(SLACKENED, 0.1): 37}, [True, False]),
    ],
)
def test_goals_are_judged(recipe: Paper, changes: dict[tuple[str, float], int], holds: list[bool]) -> None:
    study = judge_beyond(make_results(recipe, changes, otherwise=38), recipe)
    assert [goal["holds"] for goal in study["goals"]] == holds


def test_counts_and_best_temperature(recipe: Paper) -> None:
    study = judge_beyond(make_results(recipe, {("sample", 5.0): 39, ("gm-iw", 0.01): 3}, otherwise=20), recipe)
    assert study["best"] == {"temperature": 5.0, "solved": 39}
    rows = {row["method"]: row for row in study["rows"]}
    assert rows["gm-iw"]["solved"] == [3, *[20] * 11]
    assert rows["gm-iw"]["solved_expected"] == [0] * 12
    assert {pair["solved"] for pair in study["against"][TIGHT]} == {20}


def test_a_small_experiment_stays_small() -> None:
    small = beyond_recipe(Paper(temperatures=(1.0,), panel_seeds=2, steps=5))
    assert (small.seeds, small.steps, small.temperatures) == (2, 5, (1.0,))
    assert judge_beyond(make_results(replace(small), {}, otherwise=1), small)["goals"][0]["holds"]


def test_paired_differences() -> None:
    ours, theirs = [True] * 30 + [False] * 10, [True] * 20 + [False] * 20
    difference, low, high = compare_paired(ours, theirs)
    assert difference == 0.25
    # By hand: 10.5 against 0.5 of 42 discordant.
    assert low == pytest.approx(10 / 42 - 1.96 * (11 - 100 / 42) ** 0.5 / 42)
    assert high == pytest.approx(10 / 42 + 1.96 * (11 - 100 / 42) ** 0.5 / 42)
    assert compare_paired(theirs, ours)[0] == -0.25
    assert compare_paired(ours, ours)[1] < 0 < compare_paired(ours, ours)[2]
