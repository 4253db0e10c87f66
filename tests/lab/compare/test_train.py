# SPDX-License-Identifier: Apache-2.0
"""A run is a layer of the library, trained; what is compared is what the contenders say they do."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

import equipoise as eq
from equipoise_lab.compare import CONTENDERS, Comparison, Run, Split, Task, train
from equipoise_lab.compare._train import _Learner, build_layer, evaluate, measured_at


def first_run(name: str, recipe: Comparison) -> Run:
    return replace(recipe, contenders=(name,)).runs()[0]


@pytest.mark.parametrize("name", CONTENDERS)
def test_setting_and_seed_make_the_layer(name: str, task: Task, small: Comparison) -> None:
    run = replace(small, contenders=(name,)).runs()[-1]
    layer, setting = build_layer(run, small, task), run.setting
    assert layer.router.capacity_factor == setting.capacity_factor
    weights = {"load-balance": setting.balance_loss, "marginal-entropy": setting.marginal_entropy}
    assert {key: layer.router.loss_weights.get(key, 0.0) for key in weights} == weights
    other = build_layer(replace(first_run("switch", small), seed=run.seed), small, task)
    assert torch.equal(layer.router.weight, other.router.weight)
    assert torch.equal(layer.experts.up, other.experts.up)


def test_exact_loss_is_the_expectation_over_experts(task: Task, small: Comparison) -> None:
    learner = _Learner(first_run("exact", small), small, task)
    x, y = task.train.x[:8], task.train.y[:8]
    log_p = learner.layer.router.logits(x).log_softmax(-1)
    expected = learner.run.setting.marginal_entropy * eq.marginal_entropy_loss(log_p)
    for j in range(small.num_experts):
        counts = torch.where(torch.arange(small.num_experts) == j, len(x), 0)
        outputs = learner.layer.experts(eq.nn.Grouped(rows=x, counts=counts, slots=None))[:, : task.num_classes]
        expected = expected + (log_p[:, j].exp() * cross_entropy(outputs, y, reduction="none")).mean()
    torch.testing.assert_close(learner.loss(x, y), expected)


@pytest.mark.usefixtures("unchecked")  # the other tests check the same signatures; here they would take half the time
@pytest.mark.parametrize("name", ["skip-iw", "skip-iw-recipe", "gm-iw-mix-recipe"])
def test_sampled_gradients_have_the_exact_one_for_their_mean(name: str, task: Task, small: Comparison) -> None:
    """With what the contender really does in a step: router, weights, baseline. Five standard errors.

    That the estimates are unbiased, to the last digit, is shown by the tests of `estimators` and `nn`.
    """
    sampled = _Learner(replace(first_run(name, small), seed=3), small, task)
    setting = replace(sampled.run.setting, balance_loss=0.0, marginal_entropy=0.0)
    sampled.layer = build_layer(replace(sampled.run, setting=setting), small, task)
    exact = _Learner(replace(first_run("exact", small), seed=3, setting=setting), small, task)
    x, y = task.train.x[:32], task.train.y[:32]
    (wanted,) = torch.autograd.grad(exact.loss(x, y), [exact.layer.router.weight])
    draws = [torch.autograd.grad(sampled.loss(x, y), [sampled.layer.router.weight])[0] for _ in range(500)]
    found = torch.stack(draws)
    error = found.std(0) / len(draws) ** 0.5
    assert ((found.mean(0) - wanted).abs() < 5.0 * error + 1e-7).all()
    assert (wanted.abs() > 20.0 * error).any()  # not for want of looking: a quarter of it missing would show


def test_label_aware_baseline_knows_past_batches_only(task: Task, small: Comparison) -> None:
    learner = _Learner(first_run("skip-iw-recipe", small), small, task)
    x, y = task.train.x[:32], task.train.y[:32]
    label = torch.nn.functional.one_hot(y, task.num_classes)[:, :-1].float()
    assert not learner.critic(label).any()
    learner.loss(x, y)
    assert learner.critic(label).any()


@pytest.mark.parametrize("name", ["switch", "skip-iw"])
@pytest.mark.parametrize("factor", [None, 1.25])
def test_evaluation_is_the_layers(name: str, factor: float | None, task: Task, small: Comparison) -> None:
    layer = build_layer(first_run(name, small), small, task)
    found = evaluate(layer, task.validation, task, factor)
    assert layer.training
    best, z = layer.router.logits(task.validation.x).softmax(-1).max(-1)
    limit = len(z) if factor is None else math.ceil(factor * len(z) / small.num_experts)
    kept = torch.stack([(z[: i + 1] == z[i]).sum() <= limit for i in range(len(z))])
    counts = torch.bincount(z, minlength=small.num_experts)
    order = z.argsort(stable=True)
    groups = eq.nn.Grouped(rows=task.validation.x[order], counts=counts, slots=None)
    scores = layer.experts(groups)[order.argsort()][:, : task.num_classes] * kept[:, None]
    scores = scores * (best[:, None] if name == "switch" else 1.0)
    assert found.loss == pytest.approx(float(cross_entropy(scores, task.validation.y).detach()), rel=1e-5)
    assert found.dropped == pytest.approx(float((~kept).float().mean()))
    right = (scores.argmax(-1) == task.validation.y) & kept
    assert found.accuracy == pytest.approx(float(right.float().mean()))
    assert bool((~kept).any()) == (factor is not None)


def test_a_run_depends_on_its_seed_alone(task: Task, small: Comparison) -> None:
    run = first_run("gm-iw-mix-recipe", small)
    once = train(run, small, task)
    torch.manual_seed(5)
    torch.rand(3)
    again = train(run, small, task)
    assert torch.equal(once.validation, again.validation)
    assert not torch.equal(once.validation, train(replace(run, seed=1), small, task).validation)


def test_the_test_split_is_not_touched(task: Task, small: Comparison) -> None:
    run = first_run("skip-iw", small)
    poisoned = replace(task, test=Split(torch.full_like(task.test.x, torch.nan), task.test.y))
    assert torch.equal(train(run, small, task).validation, train(run, small, poisoned).validation)


@pytest.mark.parametrize("name", CONTENDERS)
def test_contenders_learn(name: str, task: Task, small: Comparison) -> None:
    recipe = replace(small, contenders=(name,), steps=60, learning_rates=(0.03,))
    trained = train(recipe.runs()[0], recipe, task)
    assert trained.steps == measured_at(60)
    assert trained.validation.shape == (10, 2)
    assert trained.validation[-1, 0] < 0.6 * trained.validation[0, 0]


def test_progress_counts_every_step_once(task: Task, small: Comparison) -> None:
    recipe = replace(small, steps=45)
    seen: list[int] = []
    train(first_run("exact", recipe), recipe, task, progress=seen.append)
    assert (sum(seen), len(seen)) == (45, 10)
