# SPDX-License-Identifier: Apache-2.0
"""The command's parts put together: what is done stays done, and everything is written."""

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equipoise_lab.compare import CONTENDERS, Comparison, Task, _compare, compare, train
from equipoise_lab.compare._compare import depends_on, run_all


@pytest.fixture
def on_clusters(task: Task, monkeypatch: pytest.MonkeyPatch) -> Iterator[Task]:
    """Puts the small task in the place of the digits, within this process."""
    monkeypatch.setattr(_compare, "load_task", lambda _: task)
    _compare._task.cache_clear()
    yield task
    _compare._task.cache_clear()


def test_every_contender_has_as_many_settings() -> None:
    recipe = Comparison()
    numbers = {name: len(row.settings(recipe.learning_rates)) for name, row in CONTENDERS.items()}
    assert set(numbers.values()) == {9}
    for row in CONTENDERS.values():
        assert len(set(row.settings(recipe.learning_rates))) == 9
    assert len(recipe.runs()) == 6 * 9 * 5
    assert {run.seed for run in recipe.runs()} == {0, 1, 2, 3, 4}
    assert len({run.name for run in recipe.runs()}) == 270


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "letters"}, "task must be one of 'digits', 'digits-raw', got 'letters'"),
        ({"contenders": ("swich",)}, "contenders must be one of"),
        ({"seeds": 1}, "seeds must be an integer >= 2, got 1"),
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"first_seed": -1}, "first_seed must be an integer from 0 to .*, got -1: give one in that range"),
        ({"learning_rates": (0.0,)}, "learning_rates must be finite and > 0, got 0.0"),
        ({"eval_capacity_factor": 0.0}, "eval_capacity_factor must be finite and > 0, got 0.0"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Comparison(), **changes)


def test_a_batch_larger_than_the_data_is_refused(on_clusters: Task, small: Comparison, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch_size must be at most the 120 rows for training .*, got 121"):
        compare(replace(small, batch_size=121), tmp_path, command="", workers=0)


def test_everything_is_written(on_clusters: Task, small: Comparison, tmp_path: Path) -> None:
    said: list[str] = []
    steps: list[int] = []
    found = compare(small, tmp_path, command="here", workers=0, say=said.append, advance=steps.append)
    assert sum(steps) == 36 * 4
    assert said[0] == "training 36 runs of 4 steps"
    assert {path.name for path in found.paths} == {"compare.json", "compare.svg", "compare.png"}
    stored = json.loads((tmp_path / "compare.json").read_text())
    assert stored["command"] == "here"
    assert stored["rows"] == {"train": 120, "validation": 40, "test": 40}
    assert len(stored["outcomes"]) == 12
    assert len(stored["differences"]) == 2 * 2 * 4
    assert len(stored["validation"]) == 36
    assert stored["recipe"]["learning_rates"] == [0.01]
    picture = (tmp_path / "compare.svg").read_text()
    for name, o in zip(CONTENDERS, found.outcomes[::2], strict=True):
        assert CONTENDERS[name].label in picture
        assert f"{o.mean:.3f} (sd {o.spread:.3f})" in picture


def test_an_interrupted_run_goes_on(
    on_clusters: Task, small: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(small, contenders=("exact", "gm-iw-mix-recipe"))
    trained: list[str] = []

    def interrupted(run, recipe, task, **how):
        if len(trained) == 4:
            raise KeyboardInterrupt
        trained.append(run.name)
        return train(run, recipe, task, **how)

    with monkeypatch.context() as patch:
        patch.setattr(_compare, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_all(recipe, tmp_path / "stopped", workers=0)
    assert trained[0].startswith("gm")  # the slowest first
    assert len(list((tmp_path / "stopped" / "runs").iterdir())) == 4
    more: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(_compare, "train", lambda run, *a, **how: more.append(run.name) or train(run, *a, **how))
        again = run_all(recipe, tmp_path / "stopped", workers=0)
    assert sorted(trained + more) == sorted(run.name for run in recipe.runs())
    anew = run_all(recipe, tmp_path / "anew", workers=0)
    assert [model.run for model in again] == [model.run for model in anew] == recipe.runs()
    for one, other in zip(again, anew, strict=True):
        assert torch.equal(one.validation, other.validation)
        assert all(torch.equal(one.parameters[key], x) for key, x in other.parameters.items())


def test_after_the_end_the_same_command_starts_anew(on_clusters: Task, small: Comparison, tmp_path: Path) -> None:
    few, counts = replace(small, contenders=("base", "skip-iw-recipe")), list[int]()
    for _ in range(2):
        steps: list[int] = []
        compare(few, tmp_path, command="", workers=0, say=lambda _: None, advance=steps.append)
        counts.append(len(steps))
        assert sum(steps) == 12 * 4
    assert counts[0] == counts[1] > 12  # runs that were found would be counted at once, one call each


def test_a_run_depends_on_itself_and_not_on_others(small: Comparison) -> None:
    recipe = replace(small, contenders=("exact",))
    one, other = recipe.runs()[:2]
    assert depends_on(one, recipe) == depends_on(one, replace(recipe, contenders=("exact", "base")))
    assert depends_on(one, recipe) != depends_on(one, replace(recipe, steps=5))
    assert depends_on(one, recipe) != depends_on(other, recipe)


def test_a_run_can_be_sent_to_another_process(on_clusters: Task, small: Comparison) -> None:
    run = replace(small, contenders=("gm-iw-mix-recipe",)).runs()[0]
    function, *arguments = pickle.loads(pickle.dumps((_compare._train_run, run, small)))
    there, here = function(*arguments, progress=abs), train(run, small, on_clusters)
    returned = pickle.loads(pickle.dumps(there))
    assert returned.run == here.run
    assert torch.equal(returned.validation, here.validation)
