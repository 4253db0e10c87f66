# SPDX-License-Identifier: Apache-2.0
import copy
import pickle
import warnings

import pytest
import torch
import transformers

import equipoise as eq
from equipoise.integrations.transformers import restore_routers, swap_routers
from equipoise.integrations.transformers._layer import RoutedBlock, RoutedGate, routed_blocks
from support.tiny_transformers import FAMILIES, tiny_model, tokens

families = pytest.mark.parametrize("family", FAMILIES)
NORMALISED = [
    ("mixtral", {}),
    ("gpt-oss", {}),
    *((family, {"norm_topk_prob": norm}) for family in ("olmoe", "qwen3-moe", "deepseek-v3") for norm in (True, False)),
]


def logits(model, ids, **inputs):
    with torch.no_grad():
        return model(input_ids=ids, **inputs).logits


@pytest.mark.parametrize(("family", "options"), NORMALISED)
def test_routers_without_learnt_prices_leave_the_function_as_it_was(family, options):
    model, ids = tiny_model(family, **options), tokens()
    before = logits(model, ids)
    for router in ("topk", "loss-free", "quantile", "priced", "base"):
        assert swap_routers(model, router)
        torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=1e-5)
    swap_routers(model, "skip-iw", loss="gating")
    torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=1e-5)


@families
def test_training_mode_of_topk_is_the_native_function_and_gradient(family):
    model, ids = tiny_model(family).train(), tokens()
    native = copy.deepcopy(model)
    swap_routers(model, "topk")
    for each in (native, model):
        each(input_ids=ids).logits.square().mean().backward()
    expected = dict(native.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-7, msg=name)


@families
def test_parameters_stay_the_same_objects_under_the_same_names(family):
    model = tiny_model(family)
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    swap_routers(model, "priced")
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert [key for key in model.state_dict() if "equipoise_router" not in key] == keys
    restore_routers(model)
    assert list(model.state_dict()) == keys
    assert not any(isinstance(module, RoutedBlock | RoutedGate) for module in model.modules())


def test_deepseek_gates_keep_scale_groups_and_sigmoid():
    model = tiny_model("deepseek-v3", norm_topk_prob=False)
    (name,) = swap_routers(model, "topk")
    scoring = dict(routed_blocks(model))[name].routed_gate.router.scoring
    assert scoring == eq.nn.Scoring(function="sigmoid", normalise=False, scale=2.5, num_groups=4, kept_groups=2)


def test_score_function_routers_have_factors_of_one_over_k_times_the_scale():
    model = tiny_model("deepseek-v3")
    swap_routers(model, "skip-iw", loss="reinforce", capacity_factor=None)
    for training in (True, False):
        with eq.nn.capture(model.train(training)) as routings:
            model(input_ids=tokens())
        assert (routings[0].scores == 2.5 / 2).all()


def test_gating_has_the_native_factors_of_what_was_drawn():
    model = tiny_model("olmoe", norm_topk_prob=False).train()
    swap_routers(model, "skip-iw", loss="gating", capacity_factor=0.75)
    with eq.nn.capture(model) as routings:
        model(input_ids=tokens())
    routing = routings[0]
    kept = routing.indices < 8
    assert 0 < kept.sum() < kept.numel()
    expected = torch.where(kept, routing.logits.softmax(-1).gather(1, routing.sample.z_rounds), 0.0)
    torch.testing.assert_close(routing.scores, expected)


def test_some_layers_by_number_or_pattern():
    model = tiny_model("mixtral")
    assert swap_routers(model, "topk", layers=[1]) == ["model.layers.1.mlp"]
    assert [name for name, _ in routed_blocks(model)] == ["model.layers.1.mlp"]
    assert swap_routers(model, "priced", layers="*.0.*") == ["model.layers.0.mlp"]
    rules = [type(block.routed_gate.router.rule).__name__ for _, block in routed_blocks(model)]
    assert rules == ["Priced", "TopK"]
    for wrong in ([7], "nothing"):
        with pytest.raises(ValueError, match=r"layers must be numbers or a pattern .*, got"):
            swap_routers(model, "topk", layers=wrong)


def test_prices_move_into_the_correction_bias_when_swapped_twice():
    model, ids = tiny_model("deepseek-v3"), tokens()
    swap_routers(model, "priced")
    _learn_prices(model, tokens(seed=1))  # exact prices tie some rows of the batch that they were solved for
    before = logits(model, ids)
    swap_routers(model, "topk")
    torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=1e-5)


def _learn_prices(model, ids):
    with eq.nn.capture(model.train()) as routings:
        model(input_ids=ids)
    routings.update()
    model.eval()


def test_swapping_again_says_that_prices_are_lost_where_there_is_no_place_for_them():
    model = tiny_model("mixtral")
    swap_routers(model, "priced")
    swap_routers(model, "loss-free")  # nothing was learnt yet
    swap_routers(model, "priced")
    _learn_prices(model, tokens())
    with pytest.warns(eq.nn.RoutingWarning, match="lost the prices they had learnt"):
        swap_routers(model, "topk")


def test_state_dict_of_a_swapped_model_loads_into_another(tmp_path):
    model, ids = tiny_model("qwen3-moe"), tokens()
    swap_routers(model, "priced")
    _learn_prices(model, ids)
    other = tiny_model("qwen3-moe", seed=1)
    swap_routers(other, "priced")
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, ids), logits(model, ids))
    model.save_pretrained(tmp_path)  # and a plain model takes the weights, without the prices
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    swap_routers(plain, "topk")
    with pytest.warns(eq.nn.RoutingWarning, match="lost the prices"):
        restore_routers(model)
    torch.testing.assert_close(logits(plain, ids), logits(model, ids), rtol=0, atol=1e-6)


@families
def test_routers_load_after_from_pretrained(tmp_path, family):
    """As docs/transformers.md says: `save_pretrained` renames experts, and in Mixtral gates too."""
    model, ids = tiny_model(family), tokens()
    swap_routers(model, "priced")
    _learn_prices(model, ids)
    model.save_pretrained(tmp_path)
    routers = {name: x for name, x in model.state_dict().items() if "equipoise_router" in name}
    torch.save(routers, tmp_path / "router_entries.pt")
    with warnings.catch_warnings(action="ignore"):  # of entries that a plain model has no place for
        other = type(model).from_pretrained(tmp_path)
    swap_routers(other, "priced")
    found = other.load_state_dict(torch.load(tmp_path / "router_entries.pt"), strict=False)
    assert not found.unexpected_keys
    torch.testing.assert_close(logits(other, ids), logits(model, ids), rtol=0, atol=1e-5)


@families
def test_copies_and_pickles_are_models_of_their_own(family):
    model, ids = tiny_model(family), tokens()
    swap_routers(model, "priced")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, ids), logits(model, ids))
        ours = {id(block.equipoise_layer) for _, block in routed_blocks(model)}
        for _, block in routed_blocks(twin):
            assert id(block.equipoise_layer) not in ours
            assert block.routed_gate.equipoise_layer is block.equipoise_layer is block.experts.equipoise_layer
            assert block.equipoise_layer.rows is twin.equipoise_rows[0]


@families
def test_transformers_still_records_the_logits(family):
    model, ids = tiny_model(family), tokens()
    if family == "deepseek-v3":
        inner = model.model
    else:
        inner = model
    before = inner(input_ids=ids, output_router_logits=True).router_logits
    swap_routers(model, "priced")
    after = inner(input_ids=ids, output_router_logits=True).router_logits
    assert len(before) == len(after) > 0
    torch.testing.assert_close(after, before)


def test_padding_takes_no_expert_in_training_and_changes_nothing_in_evaluation():
    model, ids = tiny_model("mixtral"), tokens()
    attended = torch.ones_like(ids)
    attended[1, 8:] = 0
    before = logits(model, ids, attention_mask=attended)
    swap_routers(model, "topk")
    torch.testing.assert_close(logits(model, ids, attention_mask=attended), before, rtol=0, atol=1e-5)
    with eq.nn.capture(model.train()) as routings:
        model(input_ids=ids, attention_mask=attended)
    for routing in routings:
        assert routing.shape == (2, 12)
        assert torch.equal((routing.indices < 4).all(-1), attended.flatten() != 0)


class Wrapper(torch.nn.Module):
    """Passes on whatever it gets, as wrappers of models do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_mask_by_position_is_that_by_name(wrapped):
    model, ids = tiny_model("mixtral"), tokens()
    model = Wrapper(model) if wrapped else model
    attended = torch.ones_like(ids)
    attended[1, 8:] = 0
    swap_routers(model, "priced")
    for args, kwargs in [((ids, attended), {}), ((ids,), {"attention_mask": attended}), ((ids, attended, None), {})]:
        with eq.nn.capture(model.train()) as routings:
            model(*args, **kwargs)
        assert all(torch.equal(routing.mask, attended.flatten() != 0) for routing in routings)
    with eq.nn.capture(model) as routings:
        model(ids)
    assert routings[0].mask is None  # nothing is left of the input before


def test_token_ids_reach_the_router():
    model, ids = tiny_model("mixtral"), tokens()
    swap_routers(model, "hash", top_k=1)
    with eq.nn.capture(model) as routings:
        model(ids)  # by position, as people do
    by_id = {}
    for token, z in zip(ids.flatten().tolist(), routings[0].indices.flatten().tolist(), strict=True):
        assert by_id.setdefault(token, z) == z
    assert len(set(by_id.values())) > 1


def test_parameter_groups_know_the_gates():
    model = tiny_model("gpt-oss")
    swap_routers(model, "topk")
    _, routers = eq.nn.parameter_groups(model, 1e-3)
    expected = {id(p) for _, block in routed_blocks(model) for p in block.routed_gate.parameters()}
    assert {id(p) for p in routers["params"]} == expected
    assert len(expected) == 4


def test_a_gate_that_computes_something_else_is_refused():
    config = transformers.PhimoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.PhimoeForCausalLM(config)
    with pytest.raises(
        ValueError, match="must score by softmax or sigmoid, got PhimoeTopKRouter of 'model.layers.0.mlp'"
    ):
        swap_routers(model, "topk")


def test_unknown_scores_and_wrong_contracts_are_refused(monkeypatch):
    model = tiny_model("mixtral")
    gate = type(model.model.layers[0].mlp.gate)
    native = gate.forward
    monkeypatch.setattr(
        gate,
        "forward",
        lambda self, h: (native(self, h)[0], *(x.sqrt() if x.is_floating_point() else x for x in native(self, h)[1:])),
    )
    with pytest.raises(
        ValueError, match=r"must score by softmax or sigmoid, got MixtralTopKRouter of 'model.layers.0.mlp'"
    ):
        swap_routers(model, "topk")
    monkeypatch.setattr(gate, "forward", lambda self, h: native(self, h)[:2])
    with pytest.raises(
        ValueError, match=r"must return logits \[T, E\], scores \[T, K\] and indices \[T, K\], got tuple"
    ):
        swap_routers(model, "topk")


def test_a_gate_that_takes_more_than_rows_is_refused(monkeypatch):
    model = tiny_model("mixtral")
    gate = type(model.model.layers[0].mlp.gate)
    monkeypatch.setattr(gate, "forward", lambda self, h, bias: None)
    with pytest.raises(ValueError, match=r"a gate must take rows and nothing else, got MixtralTopKRouter of .*bias"):
        swap_routers(model, "topk")


def test_models_without_experts_are_refused():
    with pytest.raises(ValueError, match="model must have a gate next to stacked experts .* got Linear"):
        swap_routers(torch.nn.Linear(2, 2), "topk")


def test_what_cannot_be_swapped_is_refused_before_anything_changes():
    model = tiny_model("mixtral")
    model.model.layers[1].mlp.experts._is_expert_parallel = True
    with pytest.raises(
        ValueError, match=r"experts must be whole .* 'model.layers.1.mlp' with transformers' expert para"
    ):
        swap_routers(model, "topk")
    assert not routed_blocks(model)
    with pytest.raises(ValueError, match="router must be a name, a strategy or a rule, got a Router"):
        swap_routers(model, eq.nn.make_router("topk", 32, 4))
    with pytest.raises(
        ValueError,
        match=r"top_k must be left at 1 with router 'switch', .*, since the model has 2 .* pass top_k=1 to swap",
    ):
        swap_routers(model, "switch", layers=[0])
    with pytest.raises(ValueError, match=r"with a rule of your own, .* pass top_k=1 to swap_routers"):
        swap_routers(model, lambda logits, request: eq.nn.choose_top(logits, request, top_k=1), layers=[0])
    with pytest.raises(ValueError, match=r"top_k must be left at 1 with router 'switch', .* got 2: only"):
        swap_routers(model, "switch", layers=[0], top_k=2)
    with pytest.raises(TypeError, match="did you mean temperature"):
        swap_routers(model, "skip-iw", layers=[0], temprature=2.0)
    with torch.device("meta"):
        ghost = transformers.MixtralForCausalLM(model.config)
    with pytest.raises(ValueError, match="model must have its parameters, got 'model.layers.0.mlp' on the meta device"):
        swap_routers(ghost, "topk")


@families
@pytest.mark.parametrize("upstream", [False, True])
def test_the_score_function_ends_at_the_gate_unless_upstream(family, upstream):
    # Only gradients of the score function depend on a baseline.
    gradients = []
    for baseline in (0.0, 5.0):
        model, ids = tiny_model(family).train(), tokens()
        swap_routers(model, "skip-iw", upstream=upstream)
        torch.manual_seed(0)
        with eq.nn.capture(model) as routings:
            losses = model(input_ids=ids).logits.square().mean(-1)
        eq.nn.Surrogate(baseline)(losses, routings).backward()
        gate = routed_blocks(model)[-1][1].routed_gate
        gradients.append((model.get_input_embeddings().weight.grad, next(gate.parameters()).grad))
    (before, gate), (before_again, gate_again) = gradients
    assert torch.equal(before, before_again) is not upstream
    assert not torch.equal(gate, gate_again)


@families
def test_logits_of_the_score_function_are_those_of_the_draw_under_autocast(family):
    model, ids = tiny_model(family).train(), tokens()
    swap_routers(model, "skip-iw")
    with eq.nn.capture(model) as routings, torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=ids)
    for routing in routings[1:]:  # nothing before the first gate has an expert
        assert routing.own_log_p is not None
        assert torch.equal(routing.own_log_p, routing.log_p)
