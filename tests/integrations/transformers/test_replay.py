# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import equipoise as eq
from equipoise.integrations.transformers import RoutingRecord, record_routing, replay_routing, swap_routers
from equipoise.integrations.transformers._replay import log_prob
from support.tiny_transformers import FAMILIES, tiny_model, tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_takes_the_same_experts_and_weights(family):
    model, ids = tiny_model(family).train(), tokens()
    swap_routers(model, "skip-iw", loss="gating", capacity_factor=0.75)  # random, and drops rows
    with torch.no_grad(), record_routing(model) as record:
        first = model(input_ids=ids).logits
    assert not torch.equal(model(input_ids=ids).logits, first)
    for mode in (True, False):
        with replay_routing(model.train(mode), record) as replay:
            second = model(input_ids=ids).logits
        assert torch.equal(second, first)
        assert torch.equal(replay.ratio(), torch.ones(ids.shape))


def test_the_record_of_generate_fits_one_forward_pass_over_the_text():
    model, ids = tiny_model("qwen3-moe"), tokens(2, 5)
    swap_routers(model, "topk")
    with record_routing(model) as record:
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    with replay_routing(model, record) as replay, eq.nn.capture(model) as routings:
        again = model(input_ids=text[:, :-1]).logits
    assert torch.equal(again.argmax(-1)[:, -4:], text[:, -4:])
    joined = record.joined()
    for name, routing in zip(routings.names, routings, strict=True):
        assert torch.equal(joined[name].indices.flatten(0, 1), routing.indices)
    torch.testing.assert_close(replay.ratio(), torch.ones(2, 8), rtol=0, atol=1e-4)


def test_ratios_are_those_of_the_two_routers_and_the_router_learns():
    model, ids = tiny_model("mixtral"), tokens()
    swap_routers(model, "topk")
    with record_routing(model) as record:
        first = model(input_ids=ids).logits
    gates = [layer.mlp.gate for layer in model.model.layers]
    before = [gate.router.route(gate_logits(model, ids)[i]).log_p for i, gate in enumerate(gates)]
    with torch.no_grad():
        for gate in gates:
            gate.weight += 0.05 * torch.randn(gate.weight.shape)
    with replay_routing(model, record) as replay, eq.nn.capture(model) as routings:
        second = model(input_ids=ids).logits
    assert torch.equal(first, second)  # weights are the recorded ones, too
    for i, name in enumerate(routings.names):
        wanted = record.joined()[name].wanted.flatten(0, 1)
        expected = pairs(routings[i].log_p, wanted) - pairs(before[i], wanted)
        torch.testing.assert_close(replay.log_ratios[name].flatten(), expected)
    torch.testing.assert_close(replay.ratio(), sum(replay.log_ratios.values()).exp())
    second.square().mean().backward()
    assert all(gate.weight.grad.abs().sum() > 0 for gate in gates)


def gate_logits(model, ids):
    with eq.nn.capture(model) as routings:
        model(input_ids=ids)
    return [routing.logits for routing in routings]


def pairs(log_p, wanted):
    """Plackett-Luce of two experts, by hand."""
    p = log_p.exp().gather(1, wanted)
    return (p[:, 0] * p[:, 1] / (1 - p[:, 0])).log()


def test_probabilities_of_all_orders_sum_to_one():
    log_p = torch.randn(1, 4, dtype=torch.float64).log_softmax(-1)
    orders = torch.tensor([[i, j, k] for i in range(4) for j in range(4) for k in range(4) if len({i, j, k}) == 3])
    total = log_prob(log_p.expand(len(orders), 4), orders).exp().sum()
    assert total.item() == pytest.approx(1, abs=1e-12)
    # "No expert" adds nothing.
    assert torch.equal(log_prob(log_p, torch.tensor([[2, 4, 4]])), log_prob(log_p, torch.tensor([[2]])))


def test_a_replay_survives_checkpointing():
    model, ids = tiny_model("mixtral").train(), tokens()
    swap_routers(model, "skip-iw", loss="gating")
    gradients = []
    with torch.no_grad(), record_routing(model) as record:
        model(input_ids=ids)
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        with replay_routing(model, record) as replay:
            model(input_ids=ids).logits.square().mean().backward()
        assert len(replay.log_ratios) == 2
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_what_does_not_fit_is_refused(tmp_path):
    model, ids = tiny_model("mixtral"), tokens()
    with pytest.raises(
        ValueError, match=r"must have routers of ours, got MixtralForCausalLM .*: swap_routers\(model, 'topk"
    ):
        record_routing(model).__enter__()
    swap_routers(model, "topk")
    with record_routing(model) as record:
        pass
    with pytest.raises(ValueError, match="record must hold at least one forward pass"), replay_routing(model, record):
        pass
    with record_routing(model) as record:
        model(input_ids=ids)
    with replay_routing(model, record) as replay:
        with pytest.raises(ValueError, match="must have run within replay_routing"):
            replay.ratio()
        with pytest.raises(ValueError, match=r"must have the recorded shape \[2, 12\], got \[1, 12\]"):
            model(input_ids=ids[:1])
    other = RoutingRecord(layers={"elsewhere": record.layers["model.layers.0.mlp"]})
    with pytest.raises(ValueError, match=r"record must be of the model's routed layers .*, got elsewhere"):
        replay_routing(model, other).__enter__()
    with record_routing(model) as record:
        model(input_ids=ids)
        model(input_ids=ids[:1])
    with pytest.raises(ValueError, match=r"must be of the same sequences, got shapes \[\[2, 12\], \[1, 12\]\]"):
        record.joined()
