# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

import equipoise as eq
from equipoise.integrations.transformers import _experts, swap_routers
from support.tiny_transformers import FAMILIES, tiny_model, tokens

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm", "equipoise")


@pytest.mark.parametrize(
    ("router", "options"),
    [
        ("skip-iw", {"capacity_factor": 0.5, "loss": "gating"}),  # drops rows
        ("gm-iw", {"capacity_factor": 1.0}),  # exactly balanced, but for the padding
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_implementations_give_the_same_outputs_and_gradients(family, router, options):
    model, ids = tiny_model(family).train(), tokens(2, 16)
    attended = torch.ones_like(ids)
    attended[1, -4:] = 0
    swap_routers(model, router, **options)
    expected: list[torch.Tensor] = []
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        model.zero_grad()
        torch.manual_seed(1)
        with eq.nn.capture(model) as routings:
            output = model(input_ids=ids, attention_mask=attended).logits
        dropped = routings[0].indices >= routings[0].num_experts
        assert dropped.any()
        output.square().mean().backward()
        found = [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        expected = expected or [x.clone() for x in found]
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5 * float(y.abs().max()), msg=implementation)


def test_a_balanced_batch_is_computed_in_equal_slots(monkeypatch):
    model, ids = tiny_model("mixtral").train(), tokens(2, 16)
    swap_routers(model, "gm-iw", capacity_factor=1.0)
    model.set_experts_implementation("equipoise")

    def never(*args):
        raise AssertionError("grouped_mm was called")

    monkeypatch.setattr(_experts, "grouped_mm_experts_forward", never)
    sizes = []
    even = _experts._even
    monkeypatch.setattr(
        _experts, "_even", lambda experts, groups: (sizes.append(groups.slots), even(experts, groups))[1]
    )
    model(input_ids=ids)
    assert sizes == [16, 16]  # 32 rows, 2 experts a row, 4 experts: no slot is empty
    swap_routers(model, "topk")
    with pytest.raises(AssertionError, match="grouped_mm was called"):
        model(input_ids=ids)


def test_the_backend_is_an_option_of_any_model():
    model, ids = tiny_model("olmoe"), tokens()
    with torch.no_grad():
        before = model(input_ids=ids).logits
        model.set_experts_implementation("equipoise")
        torch.testing.assert_close(model(input_ids=ids).logits, before)
