# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace

import pytest
import torch

from equipoise_lab.compare import Comparison, Split, Task, Trained
from equipoise_lab.compare._report import Outcome, differences, mean_validation, summarise
from equipoise_lab.compare._train import build_layer, evaluate, train


def models(recipe: Comparison, task: Task) -> list[Trained]:
    return [train(run, recipe, task) for run in recipe.runs()]


def outcome(contender: str, loss: tuple[float, ...], evaluation: str = "unlimited") -> Outcome:
    setting = Comparison(contenders=(contender,)).runs()[0].setting
    same = {"accuracy": loss, "dropped": loss, "curve": ((1, 0.5),), "validation": 0.5}
    return Outcome(contender=contender, evaluation=evaluation, setting=setting, loss=loss, **same)


def test_settings_are_chosen_on_validation_alone(task: Task, small: Comparison) -> None:
    recipe = replace(small, contenders=("switch", "skip-iw-recipe"), learning_rates=(0.003, 0.03))
    trained = models(recipe, task)
    found = summarise(recipe, trained, task)
    assert [(o.contender, o.evaluation) for o in found] == [
        (name, evaluation) for name in recipe.contenders for evaluation in ("unlimited", "limited")
    ]
    for o in found:
        index = ("unlimited", "limited").index(o.evaluation)
        losses: dict[object, list[float]] = {}
        for model in trained:
            if model.run.contender == o.contender:
                losses.setdefault(model.run.setting, []).append(float(model.validation[-1, index]))
        means = {setting: sum(values) / len(values) for setting, values in losses.items()}
        assert len(means) == 6
        assert o.setting == min(means, key=means.__getitem__)
        assert o.validation == pytest.approx(means[o.setting])
        assert o.curve[-1] == (recipe.steps, pytest.approx(o.validation))
    wrong = Split(task.test.x, (task.test.y + 1) % 3)
    again = summarise(recipe, trained, replace(task, test=wrong))
    assert [o.setting for o in again] == [o.setting for o in found]
    assert all(a.loss != b.loss for a, b in zip(again, found, strict=True))


def test_a_run_that_diverged_is_not_chosen(task: Task, small: Comparison) -> None:
    recipe = replace(small, contenders=("exact",))
    trained = models(recipe, task)
    best = summarise(recipe, trained, task)[0].setting
    broken = [
        replace(model, validation=torch.full_like(model.validation, math.nan)) if model.run.setting == best else model
        for model in trained
    ]
    assert mean_validation([model for model in broken if model.run.setting == best], 0) == math.inf
    assert summarise(recipe, broken, task)[0].setting != best


def test_test_losses_are_those_of_the_chosen_models(task: Task, small: Comparison) -> None:
    recipe = replace(small, contenders=("exact",))
    trained = models(recipe, task)
    found = summarise(recipe, trained, task)[0]
    for place, seed in enumerate((0, 1)):
        (model,) = (m for m in trained if m.run.setting == found.setting and m.run.seed == seed)
        layer = build_layer(model.run, recipe, task)
        assert evaluate(layer, task.test, task, None).loss != pytest.approx(found.loss[place])
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(model.parameters[name])
        assert evaluate(layer, task.test, task, None).loss == found.loss[place]


def test_differences_are_paired() -> None:
    stats = pytest.importorskip("scipy.stats")
    ours, other = (0.10, 0.12, 0.11, 0.09, 0.10), (0.20, 0.23, 0.20, 0.19, 0.21)
    found = differences([outcome("switch", other), outcome("skip-iw-recipe", ours), outcome("exact", ours, "limited")])
    (d,) = found
    assert (d.ours, d.other, d.evaluation) == ("skip-iw-recipe", "switch", "unlimited")
    expected = stats.ttest_rel(ours, other).confidence_interval(0.95)
    assert (d.low, d.high) == pytest.approx((expected.low, expected.high))
    assert d.mean == pytest.approx(-0.102)
    assert d.spread == pytest.approx(max(torch.tensor(ours).std().item(), torch.tensor(other).std().item()))
    assert d.better


@pytest.mark.parametrize(
    "other",
    [
        (0.11, 0.13, 0.12, 0.10, 0.11),  # sure, and less than the spread
        (0.02, 0.02, 0.05, 0.03, 0.01),  # worse
        (0.09, 0.40, 0.06, 0.08, 0.09),  # one seed makes the difference
    ],
)
def test_better_means_beyond_the_spread_and_beyond_doubt(other: tuple[float, ...]) -> None:
    (d,) = differences([outcome("base", other), outcome("skip-iw-recipe", (0.10, 0.12, 0.11, 0.09, 0.10))])
    assert not d.better
