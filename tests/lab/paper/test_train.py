# SPDX-License-Identifier: Apache-2.0
"""Training in batches: against a plain loop over single runs, closed-form gradients, and torch's own Adam."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from equipoise.estimators import Noise, RegressionCritic
from equipoise_lab.paper import Paper, Run, train
from equipoise_lab.paper._methods import BEYOND, METHOD_TABLE
from equipoise_lab.paper._recipe import METHODS
from equipoise_lab.paper._results import SAME
from equipoise_lab.paper._task import draw_data, draw_parameters, errors, target_function
from equipoise_lab.paper._train import _Adam, _Batch, _noise

SMALL = Paper(steps=4, seeds=2, panel_seeds=2, first_seed=0, temperatures=(0.5, 2.0))


def make_run(**changes: object) -> Run:
    settings = {
        "variant": "plain",
        "method": "sample",
        "loss": "reinforce",
        "balance_weight": 0.0,
        "temperature": 1.0,
        "learning_rate": 0.1,
        "baseline": "ema",
        "seed": 0,
    }
    return Run(**{**settings, **changes})


def train_one_by_one(run: Run, recipe: Paper) -> Tensor:
    """The obvious loop: one run, nn.Linear layers, torch.optim.Adam, the estimate written out by hand."""
    x, y = draw_data(run.seed if recipe.dataset == "per-seed" else 0, recipe.num_points, recipe.noise_sd)
    start = draw_parameters(run.seed, recipe.initialisation)
    gate, experts = torch.nn.Linear(1, 1), torch.nn.Linear(1, 2)
    with torch.no_grad():
        gate.weight[0, 0], gate.bias[0] = start[0], start[1]
        experts.weight[:, 0], experts.bias[:] = start[2:4], start[4:6]
    optimiser = torch.optim.Adam([*gate.parameters(), *experts.parameters()], lr=run.learning_rate)
    method, baseline = METHOD_TABLE[run.method], 0.0
    strategy, critic = method.strategy, RegressionCritic(2, 5)
    inputs = torch.stack([x, y, x * x, x * y, y * y], 1)
    for noise in _noise([run.seed], recipe, strategy):
        a = gate(x[:, None])
        log_p = torch.log_softmax(torch.cat([torch.zeros_like(a), a], 1), 1)
        s, weight = strategy.draw(
            log_p.detach(),
            Noise(
                *(None if part is None else part[0] for part in (noise.gumbel, noise.priority, noise.coin, noise.pick))
            ),
            temperature=run.temperature,
            capacity=method.capacity(len(x)),
            sinkhorn_first=run.variant == "sinkhorn",
            importance=run.variant != "no-iw",
        )
        prediction = experts(x[:, None]).gather(1, s.z[:, None])[:, 0]
        log_p_z = log_p.gather(1, s.z[:, None])[:, 0]
        if run.loss == "gating":
            losses = (y - log_p_z.exp() * prediction) ** 2
            loss = (weight * losses).mean()
        else:
            losses = (y - prediction) ** 2
            c = critic(inputs) if method.critic else torch.full_like(log_p, baseline)
            advantage = losses.detach() - c.gather(1, s.z[:, None])[:, 0]
            loss = (weight * (advantage * log_p_z + losses)).mean() + (log_p.exp() * c).sum(1).mean()
            critic.update(inputs, s, losses.detach())
            if run.baseline == "ema":
                baseline = 0.99 * baseline + 0.01 * float(losses.detach()[s.kept].mean())
        p = log_p.exp().mean(0)
        preferred = torch.bincount(log_p.argmax(1), minlength=2) / len(x)
        loss = loss + run.balance_weight * 2 * (preferred * p).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return torch.cat([gate.weight[0], gate.bias, experts.weight[:, 0], experts.bias]).detach()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", ["plain", "sinkhorn", "no-iw"])
def test_a_batch_of_runs_equals_single_runs(method: str, variant: str) -> None:
    batches = [
        [
            make_run(method=method, variant=variant, temperature=2.0),
            make_run(method=method, variant=variant, balance_weight=0.1, learning_rate=0.03, seed=1),
            make_run(method=method, variant=variant, temperature=2.0, baseline="none"),
        ],
        [
            make_run(method=method, variant=variant, loss="gating", balance_weight=0.01, seed=1),
            make_run(method=method, variant=variant, loss="gating", temperature=0.7),
        ],
    ]
    for recipe in (SMALL, replace(SMALL, dataset="shared")):
        for runs in batches:
            found = train(runs, recipe).parameters
            expected = torch.stack([train_one_by_one(run, recipe) for run in runs])
            torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("method", BEYOND)
def test_beyond_the_paper_too_a_batch_equals_single_runs(method: str) -> None:
    runs = [make_run(method=method, temperature=t, seed=seed) for t, seed in ((2.0, 0), (0.3, 1), (2.0, 1))]
    found = train(runs, replace(SMALL, dataset="per-seed")).parameters
    expected = torch.stack([train_one_by_one(run, replace(SMALL, dataset="per-seed")) for run in runs])
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


def test_a_run_does_not_depend_on_its_company() -> None:
    together = train([make_run(seed=seed, temperature=t) for seed in (0, 1, 2) for t in (0.5, 2.0)], SMALL)
    alone = train([make_run(seed=2, temperature=2.0)], SMALL)
    torch.testing.assert_close(alone.parameters[0], together.parameters[5], rtol=1e-6, atol=1e-7)
    assert torch.equal(together.parameters, train(together.runs, SMALL).parameters)


def test_runs_with_and_without_weights_share_a_batch() -> None:
    settings = {"method": "gm", "temperature": 2.0}
    both = train([make_run(variant=v, **settings) for v in ("plain", "no-iw")], SMALL)
    apart = torch.cat([train([run], SMALL).parameters for run in both.runs])
    torch.testing.assert_close(both.parameters, apart, rtol=1e-5, atol=1e-6)
    assert (both.parameters[0] - both.parameters[1]).abs().max() > 1e-3


def test_what_only_differs_in_name_is_trained_once() -> None:
    found = train([make_run(method=m, variant="no-iw") for m in ("gm-iw", "gm", "gm-sh")], SMALL)
    assert torch.equal(found.parameters, found.parameters[:1].expand(3, -1))
    assert [result.method for result in found.results(SMALL)] == ["gm-iw", "gm", "gm-sh"]
    same = (("plain", "gm-sh"), ("sinkhorn", "gm-sh"), ("sinkhorn", "gm"))
    found = train([make_run(method=method, variant=variant) for variant, method in same], SMALL)
    assert torch.equal(found.parameters, found.parameters[:1].expand(3, -1))
    assert [(result.variant, result.method) for result in found.results(SMALL)] == list(same)


@pytest.mark.parametrize(("variant", "method"), SAME)
def test_a_run_under_another_name_samples_and_weighs_the_same(variant: str, method: str) -> None:
    """Not by the table of names, but by the strategies themselves: the same noise gives the same draws and weights."""
    generator = torch.Generator().manual_seed(0)
    log_p = torch.log_softmax(3 * torch.randn(5, 100, 2, generator=generator, dtype=torch.float64), -1)
    uniform = torch.rand(5, 100, 2, generator=generator, dtype=torch.float64)
    drawn = []
    for v, m in ((variant, method), SAME[variant, method]):
        options = {"temperature": 0.7, "sinkhorn_first": v == "sinkhorn", "importance": v != "no-iw"}
        drawn.append(METHOD_TABLE[m].strategy.draw(log_p, Noise(-(-uniform.log()).log(), None), **options))
    (ours, weight), (theirs, expected) = drawn
    assert torch.equal(ours.z, theirs.z)
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=0)
    if variant == "sinkhorn":
        # The draw is the same; not so the weights of biased Gumbel-Matching without Sinkhorn.
        plain = METHOD_TABLE[method].strategy.draw(log_p, Noise(-(-uniform.log()).log(), None), temperature=0.7)
        assert torch.equal(plain[0].z, ours.z)
        assert (method == "gm") == bool((plain[1] / weight - 1).abs().max() > 0.1)


def test_gradients_agree_with_the_closed_form() -> None:
    """d/dtheta of sum_i p(z_i) f_i, averaged over both experts of every row, by hand for the six parameters."""
    recipe = Paper(steps=1, seeds=1, num_points=6)
    x, y = draw_data(0, 6, recipe.noise_sd)
    theta = draw_parameters(0, "uniform")
    b = torch.sigmoid(theta[0] * x + theta[1])
    predictions = theta[2:4, None] * x + theta[4:6, None]
    squares = (y - predictions) ** 2
    router_part = b * (1 - b) * (squares[1] - squares[0])
    slopes = -2 * (y - predictions) * torch.stack([1 - b, b])
    parts = [(router_part * x).mean(), router_part.mean(), *(slopes * x).mean(1), *slopes.mean(1)]
    exact = torch.stack(parts)
    copies = 20_000
    batch = _Batch([make_run(seed=0)] * copies, recipe)
    uniform = torch.rand(copies, 6, 2, generator=torch.Generator().manual_seed(0))
    found = batch.gradient(Noise(-(-uniform.log()).log(), None))
    error = found.std(0) / copies**0.5
    # Six normal deviates beyond 5.5 standard errors: a false alarm in 4 million runs.
    assert ((found.mean(0) - exact).abs() < 5.5 * error).all()
    assert (error < 0.02 * exact.norm()).all()


def test_adam_equals_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(3, 6, generator=generator)
    rates = torch.tensor([0.1, 0.01, 1.0])
    ours = _Adam(mine := theta.clone(), rates)
    theirs = [torch.nn.Parameter(row.clone()) for row in theta]
    optimiser = torch.optim.Adam([{"params": [p], "lr": float(r)} for p, r in zip(theirs, rates, strict=True)])
    for _ in range(20):
        grad = torch.randn(3, 6, generator=generator)
        for parameter, row in zip(theirs, grad, strict=True):
            parameter.grad = row
        optimiser.step()
        ours.step(grad, torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close(mine, torch.stack([p.detach() for p in theirs]), rtol=1e-5, atol=1e-6)


def test_a_run_that_diverges_stops_alone() -> None:
    """With weights p/q_tau at a low temperature, biased Gumbel-Matching overflows within a few steps."""
    recipe = replace(SMALL, steps=25)
    runs = [make_run(method="gm", temperature=t, learning_rate=1.0) for t in (0.001, 1.0)]
    found = train(runs, recipe)
    assert found.mse[:, 0].isinf().all()
    assert found.mse[:, 1].isfinite().all()
    assert found.parameters.isfinite().all()
    alone = train(runs[1:], recipe)
    torch.testing.assert_close(found.parameters[1], alone.parameters[0])


def test_snapshots_and_progress() -> None:
    seen: list[int] = []
    recipe = replace(SMALL, steps=70)
    found = train([make_run()], recipe, snapshots=[0, 30, 70], progress=seen.append)
    assert sorted(found.snapshots) == [0, 30, 70]
    assert torch.equal(found.snapshots[0][0], draw_parameters(0, "uniform"))
    assert torch.equal(found.snapshots[70], found.parameters)
    assert seen == [50, 20]


def test_both_measures_of_the_error() -> None:
    x = torch.tensor([[-0.5, 0.75]])
    y = target_function(x)
    # The router is sure, and right; the experts are the two pieces.
    exact = torch.tensor([[200.0, -100.0, 0.8, -2.0, -0.2, 2.0]])
    plain, gated = torch.tensor([False]), torch.tensor([True])
    for best, expected in (errors(exact, x, y, plain), errors(exact, x, y, gated)):
        assert best < 1e-10
        assert expected < 1e-10
    undecided = torch.tensor([[0.0, -1e-6, 0.8, -2.0, -0.2, 2.0]])  # always expert 0, by a hair
    best, expected = errors(undecided, x, y, plain)
    squares = torch.stack([y - (0.8 * x - 0.2), y - (2 - 2 * x)]) ** 2
    torch.testing.assert_close(best, squares[0].mean()[None])
    torch.testing.assert_close(expected, squares.mean()[None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dataset", "shared"),
        ("initialisation", "haiku"),
        ("initialisation", "small"),
        ("baseline_decay", 0.5),
        ("sinkhorn_order", "sinkhorn-first"),
        ("balance_load", "sampled"),
    ],
)
def test_every_open_choice_changes_something(field: str, value: object) -> None:
    run = make_run(variant="sinkhorn", temperature=2.0, seed=1, balance_weight=0.1)
    default = train([run], SMALL).parameters
    changed = train([run], replace(SMALL, **{field: value})).parameters
    assert not torch.allclose(default, changed)
    assert changed.isfinite().all()


def test_haiku_weights_are_truncated_and_biases_zero() -> None:
    draws = torch.stack([draw_parameters(seed, "haiku") for seed in range(300)])
    weights, biases = draws[:, [0, 2, 3]], draws[:, [1, 4, 5]]
    assert weights.abs().max() < 2
    assert 0.8 < weights.std() < 0.96  # 0.88 for a normal distribution cut at two standard deviations
    assert not biases.any()


def test_runs_must_sample_alike() -> None:
    with pytest.raises(ValueError, match=r"runs must sample alike, got \['direct-gm', 'direct-sample'\]"):
        train([make_run(), make_run(method="gm")], SMALL)
