# SPDX-License-Identifier: Apache-2.0
import copy
import math
import warnings

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import equipoise as eq
from equipoise.integrations.transformers import (
    RoutedTrainer,
    RoutedTrainerMixin,
    restore_routers,
    swap_routers,
    token_losses,
)
from equipoise.integrations.transformers._layer import routed_blocks
from support.tiny_transformers import FAMILIES, VOCABULARY, tiny_model, tokens


def dataset(rows=24, positions=12, seed=0):
    """Sequences of which different numbers of tokens count."""
    data = []
    for i, ids in enumerate(tokens(rows, positions, seed=seed)):
        labels = ids.clone()
        labels[: i % 5] = -100
        data.append({"input_ids": ids, "labels": labels})
    return data


class Losses(TrainerCallback):
    def __init__(self):
        self.losses, self.logs = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.logs.append(dict(logs))


def train(model, folder, kind=RoutedTrainer, *, steps=3, resume=None, data=None, save=None, **options):
    given = {
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
        "save_strategy": "no" if save is None else "steps",
        "save_steps": save or 500,
    }
    own = {name: options.pop(name) for name in ("surrogate", "evaluate") if name in options}
    own["eval_dataset"] = own.pop("evaluate", None)
    args = TrainingArguments(str(folder), **{**given, **options})
    seen = Losses()
    trainer = kind(model=model, args=args, train_dataset=dataset() if data is None else data, callbacks=[seen], **own)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, seen


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
        {"label_smoothing_factor": 0.1},
    ],
    ids=["plain", "accumulation", "smoothing"],
)
def test_a_router_that_changes_nothing_trains_like_the_native_trainer(tmp_path, how):
    model = tiny_model("qwen3-moe")
    native = copy.deepcopy(model)
    swap_routers(model, "topk", balance_loss=0.0)
    _, ours = train(model, tmp_path / "ours", **how)
    _, theirs = train(native, tmp_path / "theirs", Trainer, **how)
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)
    expected = dict(native.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=2e-4, msg=name)


def test_the_loss_is_the_surrogates_over_all_tokens_of_the_step(tmp_path):
    """Two batches of different length, by hand, with the noise that the Trainer's model would draw."""
    model = tiny_model("mixtral").train()
    swap_routers(model, "skip-iw", marginal_entropy=0.0)
    trainer = RoutedTrainer(model=model, args=TrainingArguments(str(tmp_path), report_to="none", use_cpu=True))
    rows = dataset(4)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    torch.manual_seed(3)
    loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=torch.tensor(100))
    assert trainer.loss_is_scaled_for_ga
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    torch.manual_seed(3)
    with eq.nn.capture(model) as routings:
        logits = model(input_ids=batch["input_ids"]).logits
    labels = batch["labels"][:, 1:]
    f = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
    counted = labels != -100
    assert loss.item() == pytest.approx(f[counted].sum().item() / 100, rel=1e-5)
    # A hand formula: weights in the routers' terms only, baseline 0 at the first call.
    weight = [routing.weight.view(4, 12)[:, :-1] for routing in routings]
    score = [routing.log_prob().view(4, 12)[:, :-1] for routing in routings]
    routers = sum(((w * f.detach() * s)[counted]).sum() for w, s in zip(weight, score, strict=True))
    expected = torch.autograd.grad((f[counted].sum() + routers) / 100, list(model.parameters()))
    for x, y in zip(gradients, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_loss(tmp_path, use_reentrant):
    found = []
    for on in (False, True):
        model = tiny_model("mixtral")
        swap_routers(model, "skip-iw")
        how = {"gradient_checkpointing": on, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*None of the inputs have requires_grad.*")
            train(model, tmp_path, **(how if on else {}))
        found.append({name: p.detach() for name, p in model.named_parameters()})
    for name, p in found[0].items():
        torch.testing.assert_close(found[1][name], p, rtol=0, atol=1e-4, msg=name)


def test_bfloat16_evaluation_and_logs(tmp_path):
    model = tiny_model("qwen3-moe")
    swap_routers(model, "skip-iw", loss="gating")
    trainer, seen = train(model, tmp_path, bf16=True)
    assert all(math.isfinite(loss) for loss in seen.losses)
    names = ("max_violation", "fraction_dropped", "effective_sample_size", "router_entropy")
    for layer in ("model.layers.0.mlp", "model.layers.1.mlp"):
        for name in names:
            assert isinstance(seen.logs[0][f"routing/{layer}/{name}"], float)
    logged = trainer.evaluate(dataset(4))["eval_loss"]
    rows = dataset(4)
    with torch.no_grad():
        expected = model.eval()(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss
    assert logged == pytest.approx(expected.item(), rel=1e-2)  # the evaluation runs in bfloat16
    assert not any(name.startswith("routing/") for name in trainer.state.log_history[-1])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("average", [True, False])
def test_the_parts_of_the_loss_are_logged(tmp_path, accumulate, average, monkeypatch):
    """They add up to the Trainer's loss; the first log is the mean of two steps, by hand."""
    model = tiny_model("qwen3-moe")
    swap_routers(model, "skip-iw", marginal_entropy=0.1)
    taken, parts = [], eq.nn.Surrogate.parts

    def note(self, *args, **kwargs):
        taken.append(parts(self, *args, **kwargs))
        return taken[-1]

    monkeypatch.setattr(eq.nn.Surrogate, "parts", note)
    rows = [{**row, "labels": row["input_ids"]} for row in dataset(32)]  # as many tokens in every batch
    how = {"gradient_accumulation_steps": accumulate, "average_tokens_across_devices": average}
    _, seen = train(model, tmp_path, steps=4, data=rows, logging_steps=2, **how)
    logs = [log for log in seen.logs if "loss" in log]
    assert len(logs) == 2
    for number, log in enumerate(logs):
        own = taken[2 * accumulate * number : 2 * accumulate * (number + 1)]
        for name in ("task", "balance"):
            mean = sum(float(getattr(each, name)) for each in own) / len(own)
            assert log[f"{name}_loss"] == pytest.approx(mean, rel=1e-5)
        assert log["balance_loss"] < 0 < log["loss"] < log["task_loss"]
        assert log["task_loss"] + log["balance_loss"] == pytest.approx(log["loss"], rel=1e-4)


@pytest.mark.parametrize(("family", "router"), [("mixtral", "priced"), ("qwen3-moe", "skip-iw")])
def test_an_interrupted_run_goes_on_with_the_same_losses(tmp_path, family, router):
    """Mixtral's experts are stored under other names, which the Trainer does not convert back by itself."""

    def run(resume=None):
        model = tiny_model(family)
        swap_routers(model, router)
        trainer, seen = train(model, tmp_path, steps=4, save=2, resume=resume)
        prices = [block.routed_gate.router.state_dict() for _, block in routed_blocks(model)]
        return seen.losses, prices, trainer.surrogate.state_dict()

    losses, prices, baseline = run()
    again, prices_again, baseline_again = run(str(tmp_path / "checkpoint-2"))
    assert again == losses[2:]
    torch.testing.assert_close(prices_again, prices, rtol=0, atol=0)
    torch.testing.assert_close(baseline_again, baseline, rtol=0, atol=0)


def test_the_best_model_is_loaded_whole_at_the_end(tmp_path):
    model = tiny_model("mixtral")  # whose experts are stored under other names
    swap_routers(model, "priced")
    how = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1.0}
    trainer, _ = train(model, tmp_path, steps=3, save=1, evaluate=dataset(4), **how)
    best = trainer.state.best_model_checkpoint
    assert best.endswith("checkpoint-1")  # a learning rate of 1 makes it worse and worse
    stored = type(model).from_pretrained(best)
    for name, parameter in stored.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert all(block.routed_gate.router.updates.item() == 1 for _, block in routed_blocks(model))


def test_prices_move_after_the_optimiser_step_once_for_each_of_its_batches(tmp_path):
    model = tiny_model("mixtral")
    swap_routers(model, "priced")
    train(model, tmp_path, steps=2, gradient_accumulation_steps=2)
    for _, block in routed_blocks(model):
        router = block.routed_gate.router
        assert router.updates.item() == 4  # every batch is observed
        assert router.rule.average.prices.abs().sum() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_its_gates(tmp_path, family):
    model = tiny_model(family)
    swap_routers(model, "gm-iw-mix", capacity_factor=1.25)
    before = [block.routed_gate.weight.clone() for _, block in routed_blocks(model)]
    _, seen = train(model, tmp_path, steps=1)
    assert math.isfinite(seen.losses[0])
    for (_, block), weight in zip(routed_blocks(model), before, strict=True):
        assert not torch.equal(block.routed_gate.weight, weight)


def test_the_mixin_and_a_surrogate_of_your_own(tmp_path):
    class Own(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(eq.nn.parameter_groups(self.model, 1e-2))
            return self.optimizer

    class Mixed(RoutedTrainerMixin, Own):
        pass

    model = tiny_model("gpt-oss")
    swap_routers(model, "gm-iw", loss="gated-reinforce")
    surrogate = eq.nn.Surrogate(credit="sequence", weights="none")
    trainer, seen = train(model, tmp_path, Mixed, surrogate=surrogate)
    assert trainer.surrogate is surrogate
    assert len(seen.losses) == 3
    assert [group["name"] for group in trainer.optimizer.param_groups] == ["model", "routers"]


def test_readouts_train_in_the_trainers_optimiser_and_resume(tmp_path):
    def run(resume=None):
        model = tiny_model("qwen3-moe")
        swap_routers(model, "skip-iw")
        torch.manual_seed(5)
        surrogate = eq.nn.Surrogate(eq.nn.Readouts(model, VOCABULARY))
        before = [p.clone() for p in surrogate.parameters()]
        trainer, seen = train(model, tmp_path, steps=4, save=2, resume=resume, surrogate=surrogate)
        assert not any(torch.equal(p, q) for p, q in zip(trainer.surrogate.parameters(), before, strict=True))
        return seen.losses

    losses = run()
    assert run(str(tmp_path / "checkpoint-2")) == losses[2:]


def test_token_losses_are_the_models_loss():
    model, ids = tiny_model("mixtral"), tokens()
    out = model(input_ids=ids, labels=ids)
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    losses, counts = token_losses(out.logits, shifted)
    assert (losses.sum() / counts.sum()).item() == pytest.approx(out.loss.item(), rel=1e-5)


def test_what_would_be_left_out_is_refused(tmp_path):
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, max_steps=1, disable_tqdm=True)
    model = tiny_model("mixtral")
    with pytest.raises(ValueError, match=r"must have routers of ours, got MixtralForCausalLM .*: call swap_routers"):
        RoutedTrainer(model=model, args=args)
    swap_routers(model, "topk")
    with pytest.raises(ValueError, match="compute_loss_func must be None"):
        RoutedTrainer(model=model, args=args, compute_loss_func=lambda *a, **k: 0)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits must be False"):
        RoutedTrainer(model=model, args=args)
    model.config.output_router_logits = False
    unlabelled = [{"input_ids": row["input_ids"]} for row in dataset(4)]
    with pytest.raises(ValueError, match="inputs must have labels in training, got input_ids"):
        RoutedTrainer(model=model, args=args, train_dataset=unlabelled).train()


def test_checkpoints_of_other_trainers_are_refused(tmp_path):
    native = tiny_model("qwen3-moe")
    train(copy.deepcopy(native), tmp_path, Trainer, steps=1, save=1)
    swap_routers(native, "topk")
    with pytest.raises(ValueError, match=r"must be a checkpoint of a RoutedTrainer, got .* without routers.pt"):
        train(native, tmp_path, resume=str(tmp_path / "checkpoint-1"))


def test_a_token_prior_reads_the_models_input_ids(tmp_path):
    model = tiny_model("mixtral")
    swap_routers(model, "skip-iw", loss="gating", token_prior=VOCABULARY)
    table = model.model.layers[0].mlp.gate.router.prior
    assert [layer.mlp.gate.router.prior.prior.seed for layer in model.model.layers] == [0, 1]  # hashes of their own
    before = [p.clone() for p in table.parameters()]
    trainer, _ = train(model, tmp_path, weight_decay=0.5)
    assert not any(torch.equal(p, q) for p, q in zip(table.parameters(), before, strict=True))
    names = {name for name, p in model.named_parameters() for q in table.parameters() if p is q}
    assert names.isdisjoint(trainer.get_decay_parameter_names(model))
    assert "model.layers.0.mlp.gate.weight" in trainer.get_decay_parameter_names(model)
    ids = tokens(1, 4)
    text = model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert text.shape == (1, 7)
    with pytest.raises(ValueError, match="token_ids"):
        model(inputs_embeds=torch.zeros(1, 4, 32))
    with pytest.warns(eq.nn.RoutingWarning, match="such as a token prior"):
        restore_routers(model)
