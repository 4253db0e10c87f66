# SPDX-License-Identifier: Apache-2.0
"""The batched training is that of `equipoise.nn`, run by run."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

import equipoise as eq
from equipoise_lab.compare import CONTENDERS, Comparison, Run, Split, Task, _train, train
from equipoise_lab.compare._evaluate import evaluate, slots
from equipoise_lab.compare._model import start_layer
from equipoise_lab.compare._train import build_model, measured_at

ROUTERS = {"switch": "switch", "base": "base", "exact": "sample", "skip-iw": "skip-iw", "skip-iw-recipe": "skip-iw"}
ROUTERS["gm-iw-mix-recipe"] = "gm-iw-mix"


def layer_of(run: Run, recipe: Comparison, task: Task, **options: object) -> eq.nn.MoE:
    s = run.setting
    how = {"capacity_factor": s.capacity_factor, "balance_loss": s.balance_loss, "marginal_entropy": s.marginal_entropy}
    router = ROUTERS[run.contender]
    return start_layer(run.seed, task.dim, recipe.num_experts, recipe.hidden_dim, router=router, **how, **options)


def by_hand(run: Run, recipe: Comparison, task: Task) -> eq.nn.MoE:
    """Trains one run with the layer, the surrogate and a loop, as a user would."""
    moe = layer_of(run, recipe, task)
    optimizer = torch.optim.Adam(moe.parameters(), lr=run.setting.learning_rate)
    order = torch.Generator().manual_seed(_train._ORDER + run.seed)
    noise = torch.Generator().manual_seed(_train._NOISE + run.seed)
    critic = eq.RegressionCritic(recipe.num_experts, task.num_classes - 1, decay=0.9)
    surrogate = eq.nn.Surrogate()
    rows = torch.randperm(len(task.train), generator=order).split(recipe.batch_size)
    for step in range(recipe.steps):
        x, y = task.train.x[rows[step]], task.train.y[rows[step]]
        optimizer.zero_grad()
        if run.contender == "exact":
            expected_loss(moe, x, y, task.num_classes, run.setting.marginal_entropy).backward()
        else:
            label = one_hot(y, task.num_classes)[:, :-1].float()
            with eq.nn.capture(moe) as routings:
                losses = cross_entropy(moe(x, generator=noise)[:, : task.num_classes], y, reduction="none")
            aware = run.contender.endswith("recipe")
            b = (routings[0].log_p.detach().exp() * critic(label)).sum(-1) if aware else None
            routing = routings[0]
            surrogate(losses, routings, baseline=b).backward()
            if aware:
                critic.update(label, routing.sample, losses.detach())
        optimizer.step()
    return moe


def expected_loss(moe: eq.nn.MoE, x: Tensor, y: Tensor, num_classes: int, bonus: float) -> Tensor:
    """The expectation under the router of the loss under each expert, one expert after the other."""
    log_p = torch.log_softmax(moe.router.logits(x), -1)
    total = torch.zeros(())
    for j in range(moe.num_experts):
        counts = torch.where(torch.arange(moe.num_experts) == j, len(x), 0)
        outputs = moe.experts(eq.nn.Grouped(rows=x, counts=counts, slots=None))[:, :num_classes]
        total = total + (log_p[:, j].exp() * cross_entropy(outputs, y, reduction="none")).mean()
    return total + bonus * eq.marginal_entropy_loss(log_p)


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_batch_of_runs_is_the_layer_trained_by_hand(
    name: str, task: Task, small: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_train, "_CHUNK", 1)  # noise step by step, as a layer draws it
    recipe = replace(small, contenders=(name,), steps=3)
    runs = [recipe.runs()[0], recipe.runs()[-1]]  # of its own settings the first and the last, two seeds
    trained = train(runs, recipe, task)
    for i, run in enumerate(runs):
        moe = by_hand(run, recipe, task)
        experts, classes = moe.experts, task.num_classes
        start = build_model([run], small, task)
        expected = {
            "gate": moe.router.weight,
            "up": experts.up.flatten(0, 1),
            "up_bias": experts.up_bias.flatten()[None],
            "down": experts.down[:, :classes],
            "down_bias": experts.down_bias[:, None, :classes],
        }
        for key, value in expected.items():
            torch.testing.assert_close(trained.parameters[key][i], value.detach(), rtol=1e-4, atol=2e-5)
            assert (value - getattr(start, key)[0]).abs().max() > 0.01


@pytest.mark.parametrize("name", ["switch", "skip-iw"])
@pytest.mark.parametrize("factor", [None, 1.25])
def test_evaluation_is_the_layers(name: str, factor: float | None, task: Task, small: Comparison) -> None:
    run = replace(small, contenders=(name,)).runs()[0]
    moe = layer_of(run, small, task, eval_capacity_factor=factor).eval()
    with torch.no_grad(), eq.nn.capture(moe) as routings:
        scores = moe(task.validation.x)[:, : task.num_classes]
    kept = routings[0].kept
    model, gated = build_model([run], small, task), CONTENDERS[name].gated
    (found,) = evaluate(model, task.validation, gated=gated, capacity_factors=[factor])
    torch.testing.assert_close(found.loss[0], cross_entropy(scores, task.validation.y))
    torch.testing.assert_close(found.dropped[0], 1 - kept.float().mean())
    right = (scores.argmax(-1) == task.validation.y) & kept
    torch.testing.assert_close(found.accuracy[0], right.float().mean())
    assert bool((~kept).any()) == (factor is not None)


def test_a_run_does_not_depend_on_those_beside_it(task: Task, small: Comparison) -> None:
    runs = replace(small, contenders=("gm-iw-mix-recipe",)).runs()
    together = train(runs, small, task)
    alone = train([runs[3]], small, task)
    for name, value in alone.parameters.items():
        torch.testing.assert_close(together.parameters[name][3], value[0], rtol=1e-5, atol=1e-6)


def test_the_test_split_is_not_touched(task: Task, small: Comparison) -> None:
    runs = replace(small, contenders=("skip-iw",)).runs()
    poisoned = replace(task, test=Split(torch.full_like(task.test.x, torch.nan), task.test.y))
    once, again = train(runs, small, task), train(runs, small, poisoned)
    assert torch.equal(once.validation, again.validation)


@pytest.mark.parametrize("name", ["base", "skip-iw-recipe", "gm-iw-mix-recipe"])
def test_contenders_learn(name: str, task: Task, small: Comparison) -> None:
    recipe = replace(small, contenders=(name,), steps=60, learning_rates=(0.03,))
    trained = train(recipe.runs()[:2], recipe, task)
    assert trained.steps == measured_at(60)
    assert trained.validation.shape == (10, 2, 2)
    assert (trained.validation[-1, 0] < 0.6 * trained.validation[0, 0]).all()


def test_progress_counts_every_step_once(task: Task, small: Comparison) -> None:
    recipe = replace(small, contenders=("exact",), steps=45)
    seen: list[int] = []
    train(recipe.runs(), recipe, task, progress=seen.append)
    assert (sum(seen), len(seen)) == (45, 10)


def test_runs_of_several_units_are_refused(task: Task, small: Comparison) -> None:
    runs = replace(small, contenders=("exact", "base")).runs()
    with pytest.raises(ValueError, match="runs must be of one unit, got"):
        train(runs, small, task)


def test_capacity_is_the_routers() -> None:
    router = eq.nn.MoE(4, 8, router="switch").router
    for rows in (1, 7, 100, 128):
        assert slots(1.25, rows, 8) == router.capacity(rows)
