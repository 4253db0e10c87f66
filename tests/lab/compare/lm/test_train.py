# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from equipoise.nn import MoE
from equipoise_lab.compare.lm import CONTENDERS, LanguageModels, Run, Text, train
from equipoise_lab.compare.lm._train import Learner, read_trained


def run_of(name: str, *, final: bool = False, seed: int = 0, number: int = 0) -> Run:
    return Run(contender=name, setting=CONTENDERS[name].settings()[number], seed=seed, final=final)


def test_every_contender_has_three_settings() -> None:
    for contender in CONTENDERS.values():
        described = [setting.describe() for setting in contender.settings()]
        assert len(described) == 3
        assert all(described.count(setting) == 1 for setting in described)


def test_tuning_and_reported_seeds_differ() -> None:
    recipe = LanguageModels()
    chosen = {name: row.settings()[0] for name, row in CONTENDERS.items()}
    seeds = [{run.seed for run in runs} for runs in (recipe.tuning_runs(), recipe.final_runs(chosen))]
    assert not seeds[0] & seeds[1]
    assert len(seeds[1]) == recipe.seeds
    assert {run.final for run in recipe.tuning_runs()} == {False}
    assert recipe.total_steps(tuned=True) == len(recipe.final_runs(chosen)) * recipe.steps


@pytest.mark.parametrize("name", sorted(CONTENDERS))
def test_every_setting_trains(small: LanguageModels, text: Text, name: str) -> None:
    for number in range(3):
        trained = train(run_of(name, number=number), replace(small, steps=1), text)
        assert 3.0 < trained.validation < 8.0
        assert trained.test is None
        assert 0.0 <= trained.training.dropped < 1.0


def test_a_run_is_a_function_of_its_seed(small: LanguageModels, text: Text) -> None:
    first, again, other = (train(run_of("skip-iw-prior", seed=seed), small, text) for seed in (3, 3, 4))
    assert first.curve == again.curve
    assert first.curve != other.curve


def test_tuning_does_not_read_the_test_split(small: LanguageModels, text: Text) -> None:
    changed = replace(text, test=torch.flip(text.test, [0]))
    assert train(run_of("switch"), small, text).curve == train(run_of("switch"), small, changed).curve
    tests = [train(run_of("switch", final=True), small, t).test for t in (text, changed)]
    assert tests[0] != tests[1]


def test_a_saved_run_comes_back(small: LanguageModels, text: Text) -> None:
    run = run_of("gm-iw-mix-prior", final=True)
    trained = train(run, small, text)
    assert read_trained(run, trained.write()) == trained


def test_contenders_share_what_is_no_expert(small: LanguageModels) -> None:
    models = [Learner(run_of(name), small).model for name in ("dense", "switch", "skip-iw-prior")]
    for name, parameter in models[0].named_parameters():
        if "feed_forward" not in name:
            for model in models[1:]:
                assert torch.equal(parameter, model.get_parameter(name))


def test_contenders_share_batches(small: LanguageModels, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[torch.Tensor]] = {}
    step = Learner.step
    for name in ("dense", "gm-iw-mix-prior"):

        def spy(self: Learner, batch: torch.Tensor, rate: float, name: str = name):
            seen.setdefault(name, []).append(batch)
            return step(self, batch, rate)

        monkeypatch.setattr(Learner, "step", spy)
        train(run_of(name), small, text)
    assert all(map(torch.equal, *seen.values()))


def test_the_control_without_a_gate_routes_by_the_prior_alone(small: LanguageModels, text: Text) -> None:
    learner = Learner(run_of("prior"), small)
    batch = text.train[: 2 * 9].view(2, 9).long()
    for _ in range(3):
        routings = learner.step(batch, 1.0)
    ids = batch[:, :-1].reshape(-1)
    for layer, routing in zip((m for m in learner.model.modules() if isinstance(m, MoE)), routings, strict=True):
        assert not layer.router.weight.any()
        first = {int(i): logits for i, logits in zip(ids, routing.logits, strict=True)}
        assert all(torch.equal(first[int(i)], logits) for i, logits in zip(ids, routing.logits, strict=True))


def test_a_capacity_in_evaluation_drops_what_is_beyond_it(small: LanguageModels, text: Text) -> None:
    learner = Learner(run_of("hash"), small)
    sequences = text.test[: 4 * 9].view(4, 9).long()
    (free, unlimited), (limited, within) = (learner.evaluate(sequences, text.lengths, limit) for limit in (None, 1.25))
    assert unlimited.dropped == 0 < within.dropped
    assert free != limited
    assert learner.evaluate(sequences, text.lengths)[0] == free


def test_exactly_balanced_draws_have_no_violation(small: LanguageModels, text: Text) -> None:
    trained = train(run_of("gm-iw-mix-prior"), small, text)
    assert (trained.training.violation, trained.training.dropped) == (0.0, 0.0)
