# SPDX-License-Identifier: Apache-2.0
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from equipoise_lab.compare.lm import (
    CONTENDERS,
    LanguageModels,
    Run,
    Text,
    Trained,
    _compare,
    compare_models,
    read_tuned,
)
from equipoise_lab.compare.lm._report import choose_settings, difference, judge, summarise
from equipoise_lab.compare.lm._train import Routed


def made(name: str, loss: float, *, seed: int = 0, number: int = 0, violation: float = 0.0) -> Trained:
    run = Run(contender=name, setting=CONTENDERS[name].settings()[number], seed=seed, final=True)
    routed = Routed(violation=violation, dropped=0.0)
    tests = {"test": loss, "limited_test": loss}
    return Trained(run=run, curve=((1, loss),), **tests, training=routed, evaluation=routed, step_time=0.01)


def test_chooses_the_least_validation_loss_and_no_run_that_diverged() -> None:
    recipe = LanguageModels(contenders=("switch",))
    tuned = [made("switch", loss, number=number) for number, loss in enumerate((1.7, 1.6, math.nan))]
    assert choose_settings(recipe, tuned)["switch"] == CONTENDERS["switch"].settings()[1]


def test_differences_are_paired_by_seed() -> None:
    recipe = LanguageModels(contenders=("switch", "dense"), seeds=3)
    losses = {"switch": (1.0, 2.0, 3.0), "dense": (1.1, 2.2, 3.3)}
    trained = [made(name, loss, seed=seed) for name, each in losses.items() for seed, loss in enumerate(each)]
    switch, dense = summarise(recipe, list(reversed(trained)))
    d = difference(switch, dense)
    # Student's t with two degrees of freedom: 4.303 * 0.1 / sqrt(3)
    assert (d.mean, d.high - d.mean) == (pytest.approx(-0.2), pytest.approx(0.2484, abs=1e-4))
    assert not d.better
    assert difference(switch, dense, limited=True).mean == d.mean


def test_goals_are_judged_by_rule() -> None:
    means = {"dense": 1.8, "hash": 1.6, "switch": 1.7, "switch-prior": 1.505, "skip-iw-prior": 1.51}
    means |= {"gm-iw-mix-prior": 1.53, "priced": 1.72}
    violation = {"skip-iw-prior": 0.2, "switch-prior": 0.3}
    recipe = LanguageModels(contenders=tuple(means), seeds=2)
    trained = [
        made(name, mean + 0.001 * seed, seed=seed, violation=violation.get(name, 0.0))
        for name, mean in means.items()
        for seed in range(2)
    ]
    outcomes = summarise(recipe, trained)
    goals = judge(outcomes, _compare.differences(outcomes))
    assert [goal.holds for goal in goals] == [True, True, True, True, True, False, False]
    assert "Switch + prior" in goals[3].text
    assert goals[4].found == "0.20 against 0.30"


def test_settings_of_an_earlier_result(tmp_path: Path) -> None:
    recipe, path = LanguageModels(contenders=("switch",)), tmp_path / "compare-lm.json"
    second = CONTENDERS["switch"].settings()[1]
    outcomes = [{"contender": "switch", "setting": second.describe()}]
    path.write_text(json.dumps({"tuning": [{"validation": 1.5}], "outcomes": outcomes}))
    tuned = read_tuned(path, recipe)
    assert (tuned.chosen, tuned.tuning) == ({"switch": second}, [{"validation": 1.5}])
    with pytest.raises(ValueError, match=r"settings must hold one of the settings of 'dense', got None: leave it out"):
        read_tuned(path, LanguageModels(contenders=("dense",)))
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"settings must be a compare-lm.json that this command wrote"):
        read_tuned(path, recipe)


def test_goes_on_from_what_is_done(
    small: LanguageModels, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compare, "_text", lambda _: text)
    steps: list[int] = []
    first = compare_models(small, tmp_path, command="x", workers=0, say=str, advance=steps.append)
    assert sum(steps) == small.total_steps()
    assert {path.name for path in first.paths} == {f"compare-lm.{end}" for end in ("json", "svg", "png")}
    stored = json.loads((tmp_path / "compare-lm.json").read_text())
    assert [row["contender"] for row in stored["outcomes"]] == list(small.contenders)
    assert len(stored["tuning"]) == 3 * len(small.contenders)
    assert [table.row_count for table in first.tables] == [3, 4, 2]

    (tmp_path / "compare-lm.json").unlink()  # as if it had been interrupted before its end
    calls: list[str] = []
    train = _compare.train

    def spy(run: Run, *arguments, **keywords):
        calls.append(run.name)
        return train(run, *arguments, **keywords)

    monkeypatch.setattr(_compare, "train", spy)
    one_more = replace(small, seeds=3)
    again = compare_models(one_more, tmp_path, command="x", workers=0, say=str)
    assert len(calls) == len(small.contenders)
    assert [outcome.loss[:2] for outcome in again.outcomes] == [outcome.loss for outcome in first.outcomes]
