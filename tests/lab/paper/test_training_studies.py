# SPDX-License-Identifier: Apache-2.0
"""The studies that look inside training: closed forms against autograd, sampling against its definition."""

import dataclasses
import json
import math

import pytest
import torch
from torch.distributions import Categorical, Normal

from equipoise.sampling import sample_gumbel_matching
from equipoise_lab.paper._recipe import Paper
from equipoise_lab.paper._studies import _elbo, _noise, _traces
from equipoise_lab.paper._studies._mixture import exact_gradient, measure_spread, mixture_sides
from equipoise_lab.paper._task import draw_data, lines, router
from equipoise_lab.paper._train import train

SMALL = Paper(seeds=2, panel_seeds=2, first_seed=0, steps=12, num_points=10)


@pytest.fixture
def models(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 6, generator=generator)


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    return draw_data(3, 10, 0.1)


# --- the three sides of eq. (1) --------------------------------------------------------------------------------------


def test_sides_against_distributions(models: torch.Tensor, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = data
    found = mixture_sides(models, x[None], y[None], 0.3)
    a, *predictions = lines(models, x[None])
    for r in range(len(models)):
        log_p = router(a)[r]
        density = torch.stack([Normal(prediction[r], 0.3).log_prob(y) for prediction in predictions], -1)
        choice = Categorical(logits=log_p)
        best = density.gather(1, log_p.argmax(-1, keepdim=True)).squeeze(1)
        torch.testing.assert_close(found["log_likelihood_argmax"][r], best.mean())
        torch.testing.assert_close(found["elbo"][r], (choice.probs * density).sum(-1).mean())
        torch.testing.assert_close(
            found["marginal_log_likelihood"][r], (choice.probs * density.exp()).sum(-1).log().mean()
        )
        torch.testing.assert_close(found["router_entropy"][r], choice.entropy().mean())
    assert bool((found["elbo"] < found["marginal_log_likelihood"]).all())


def test_elbo_gradients_against_autograd(models: torch.Tensor, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = data
    sd, marginal = torch.tensor([0.3, 0.3, 1.0, 1.0]), torch.tensor([True, False, True, False])
    theta = models.requires_grad_()
    sides = mixture_sides(theta, x[None], y[None], sd)
    (expected,) = torch.autograd.grad(
        torch.where(marginal, sides["marginal_log_likelihood"], sides["elbo"]).sum(), theta
    )
    torch.testing.assert_close(_elbo.gradient(models.detach(), x[None], y[None], sd, marginal), expected)


def test_elbo_study_trains_both_objectives_from_the_same_starts() -> None:
    study = _elbo.run(dataclasses.replace(SMALL, steps=200))
    assert json.loads(json.dumps(study, allow_nan=False)) == study
    runs = {(run["objective"], run["sd"], run["seed"]): run for run in study["runs"]}
    assert len(runs) == 2 * 2 * 2
    narrow, wide = _elbo.SDS
    for seed in range(2):
        # The width only scales the ELBO, which Adam undoes; it changes what the marginal likelihood asks for.
        same = runs["elbo", narrow, seed]["router_entropy"] - runs["elbo", wide, seed]["router_entropy"]
        other = runs["marginal", narrow, seed]["router_entropy"] - runs["marginal", wide, seed]["router_entropy"]
        assert abs(same) < 1e-2 < abs(other)
    first = [curve["router_entropy"][0] for curve in study["curves"]]
    assert first == [first[0]] * 4
    assert study["curves"][0]["steps"][-1] == 200
    assert all(p == sorted(p) for model in study["models"] for p in model["p"])  # turned to rise with x


# --- weights and variance --------------------------------------------------------------------------------------------


def test_variance_of_sample_is_known(data: tuple[torch.Tensor, torch.Tensor], generator: torch.Generator) -> None:
    # Rows are independent, so the variance of the sum is the sum over rows of that of (f - b) d log p / d (w, b).
    x, y = data
    model = torch.tensor([[1.5, -0.4, 0.7, -1.0, 0.2, 0.9]])
    _, baseline = exact_gradient(model, x[None], y[None])
    a, *predictions = lines(model, x[None])
    p = router(a)[0].exp()
    f = torch.stack([(y - prediction[0]).square() for prediction in predictions], -1) - baseline
    score = torch.stack([-p[:, 1], p[:, 0]], -1)  # by the logit a, for z = 0 and 1
    term = f * score
    by_row = (p * term.square()).sum(-1) - (p * term).sum(-1).square()
    exact = float((by_row * (1.0 + x.square())).sum() / len(x) ** 2)
    how = {"method": "sample", "temperature": 1.0, "draws": 20_000, "generator": generator}
    spread = measure_spread(model, x[None], y[None], **how)
    # A sum of ten bounded terms is close to normal: the sample variance has relative error sqrt(2 / 20,000) = 1%.
    assert float(spread["gradient_variance"]) == pytest.approx(exact, rel=0.06)
    assert float(spread["gradient_error"]) == pytest.approx(exact, rel=0.06)
    assert float(spread["row_variance"]) == pytest.approx(exact, rel=1e-5)
    torch.testing.assert_close(spread["ess"], torch.ones(1))
    torch.testing.assert_close(spread["largest_weight"], torch.ones(1))
    torch.testing.assert_close(spread["possible_weight"], torch.ones(1))


def test_error_tells_bias_from_variance(data: tuple[torch.Tensor, torch.Tensor], generator: torch.Generator) -> None:
    x, y = data
    skewed = torch.tensor([[0.5, 1.5, 0.8, -2.0, -0.2, 2.0]])
    how = {"temperature": 1.0, "draws": 4000, "generator": generator}
    unbiased = measure_spread(skewed, x[None], y[None], method="gm-iw", **how)
    biased = measure_spread(skewed, x[None], y[None], method="gm", **how)
    assert float(unbiased["gradient_error"]) == pytest.approx(float(unbiased["gradient_variance"]), rel=0.05)
    assert float(biased["gradient_error"]) > 1.5 * float(biased["gradient_variance"])
    # The largest weight is p/q at that row, and beyond the 1 of sampling from the router itself.
    assert float(unbiased["largest_weight"]) == pytest.approx(
        float(unbiased["p_at_largest"] / unbiased["q_at_largest"]), rel=1e-3
    )
    assert 1.5 < float(unbiased["largest_weight"]) <= float(unbiased["possible_weight"])
    assert 0.0 < float(unbiased["ess"]) < 1.0


def test_models_may_have_data_of_their_own(models: torch.Tensor) -> None:
    pairs = [draw_data(seed, 10, 0.1) for seed in range(4)]
    x, y = torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    together, _ = exact_gradient(models, x, y)
    for r in range(4):
        alone, _ = exact_gradient(models[r : r + 1], x[r : r + 1], y[r : r + 1])
        torch.testing.assert_close(together[r], alone[0])
    how = {"method": "sample", "temperature": 1.0, "draws": 400, "generator": torch.Generator().manual_seed(0)}
    spread = measure_spread(models, x, y, **how)
    # The mean of the draws is the exact gradient of each model's own data, so error and variance agree.
    torch.testing.assert_close(spread["gradient_error"], spread["gradient_variance"], rtol=0.05, atol=0.0)


# --- traces ----------------------------------------------------------------------------------------------------------


def test_checkpoints_end_where_training_does() -> None:
    assert _traces.checkpoints(10_000)[0] == 0
    assert _traces.checkpoints(10_000)[-1] == 10_000
    assert _traces.checkpoints(12) == sorted(set(_traces.checkpoints(12)))


def test_traces_use_what_was_trained_already() -> None:
    recipe = dataclasses.replace(SMALL, steps=2, methods=("sample", "gm-iw"))
    own = _traces.run(recipe, quick=True)
    assert json.loads(json.dumps(own, allow_nan=False)) == own
    paths: dict[str, torch.Tensor] = {}
    for method in recipe.methods:
        others = [dataclasses.replace(run, temperature=0.3) for run in _traces.trace_runs(recipe, method)[:2]]
        runs = [*others, *_traces.trace_runs(recipe, method)]
        trained = train(runs, recipe, snapshots=_traces.checkpoints(recipe.steps))
        paths[method] = _traces.path_of(trained, recipe)
    assert _traces.run(recipe, quick=True, paths=paths) == own


def test_traces_are_measured_at_the_same_models_for_all_methods() -> None:
    recipe = dataclasses.replace(SMALL, steps=3, methods=("sample", "skip-iw"))
    study = _traces.run(recipe, quick=True)
    assert [(record["method"], record["temperature"]) for record in study["common"]] == [
        ("sample", 1.0),
        ("sample", 10.0),
        ("skip-iw", 1.0),
        ("skip-iw", 10.0),
    ]
    norms = [record["gradient_norm"] for record in study["common"]]
    assert all(norm == norms[0] for norm in norms)
    for record in study["training"]:
        assert all(len(record[key]) == len(record["steps"]) for key in record if isinstance(record[key], list))
        assert all(e <= m for e, m in zip(record["elbo"], record["marginal_log_likelihood"], strict=True))
    model = study["model"]
    weight, bias = model["router"]
    lines = torch.tensor(model["experts"])
    x, y = torch.tensor(model["x"]), torch.tensor(model["y"])
    first = torch.sigmoid(weight * x + bias) > 0.5
    predicted = torch.where(first, lines[0, 0] * x + lines[0, 1], lines[1, 0] * x + lines[1, 1])
    assert float((predicted - y).square().mean()) == pytest.approx(model["mse"], rel=1e-4)


# --- noise -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def noisy(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One model a kind, balanced: theta [1, 3, 1, 6], noise of each kind, and a scale."""
    theta = torch.randn(1, 1, 1, 6, generator=generator).expand(1, 3, 1, 6).clone()
    v = _noise.draw_noise([generator], 1, 10)[0][None]
    return {"theta": theta, "x": draw_data(3, 10, 0.1)[0][None], "v": v, "scale": torch.tensor([0.7])}


def test_gumbel_kind_is_the_library_s_gumbel_matching(noisy: dict[str, torch.Tensor]) -> None:
    s = _noise.draw_sample(**noisy, balanced=1)
    log_p = router(lines(noisy["theta"][0, 0], noisy["x"])[0])
    # Only the difference of a row's two Gumbel variables matters, and the logistic noise is that.
    gumbel = torch.stack([torch.zeros_like(noisy["v"][0, 0]), noisy["v"][0, 0]], -1)
    expected = sample_gumbel_matching(log_p, gumbel, temperature=0.7)
    assert torch.equal(s.z[0, 0], expected.z)
    torch.testing.assert_close(s.log_q[0, 0], expected.log_q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row", [0, 4, 9])
def test_conditional_of_each_kind_is_unmoved_by_the_row_s_own_noise(noisy: dict[str, torch.Tensor], row: int) -> None:
    before = _noise.draw_sample(**noisy, balanced=1)
    moved = noisy["v"].clone()
    moved[..., row] = -0.9 * moved[..., row].sign()
    after = _noise.draw_sample(**{**noisy, "v": moved}, balanced=1)
    torch.testing.assert_close(after.log_q[..., row, :], before.log_q[..., row, :], rtol=1e-4, atol=1e-4)
    assert bool((before.z.sum(-1) == 5).all())


@pytest.mark.parametrize("balanced", [0, 1])
def test_frequencies_of_each_kind_are_what_log_q_says(
    noisy: dict[str, torch.Tensor], generator: torch.Generator, balanced: int
) -> None:
    # The mean of q over draws is the marginal, which is also how often z_i = 1.
    draws = 4000
    theta = noisy["theta"].expand(1, 3, draws, 6)
    v = _noise.draw_noise([generator], draws, 10)[:, :, 0].transpose(0, 1)[None]
    s = _noise.draw_sample(theta, noisy["x"].expand(draws, -1), v, noisy["scale"].expand(draws), balanced)
    difference = (s.log_q[..., 1].exp() - s.z)[0]
    error = difference.std(1) / math.sqrt(draws)
    # 30 comparisons at 5 standard errors: a false alarm in 2e-5 of all seeds. The floor is for rows that never change.
    assert bool((difference.mean(1).abs() < 5.0 * error + 1e-5).all())
    swapped = (s.log_q[..., 0].exp() - s.z)[0]
    assert bool((swapped.mean(1).abs() > 5.0 * error + 1e-5).any(-1).all())


def test_noise_study() -> None:
    study = _noise.run(SMALL)
    assert json.loads(json.dumps(study, allow_nan=False)) == study
    assert study == _noise.run(SMALL)
    assert len(study["runs"]) == len(_noise.SETTINGS) * len(_noise.KINDS) * len(_noise.SCALES)
    for run in study["runs"]:
        assert run["solved"] == sum(mse is not None and mse < SMALL.threshold for mse in run["mse"])
        assert len(run["mse"]) == run["seeds"] == 2
    pairs = {(run["method"], run["importance"]) for run in study["runs"]}
    assert pairs == {("gm-iw", True), ("sample", False)}
