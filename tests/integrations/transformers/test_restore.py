# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import warnings

import pytest
import torch

import equipoise as eq
from equipoise.integrations.transformers import restore_routers, swap_routers
from support.tiny_transformers import FAMILIES, tiny_model, tokens

# What someone does who has never heard of equipoise.
PLAIN = """
import sys
sys.modules["equipoise"] = None
import torch
from transformers import AutoModelForCausalLM
ids = torch.load(sys.argv[1] + "/ids.pt")
for name in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/" + name)
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    torch.save(text, sys.argv[1] + "/" + name + ".pt")
"""


def generate(model, ids, **how):
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, **how)


def step(model, ids):
    with eq.nn.capture(model.train()) as routings:
        model(input_ids=ids)
    routings.update()
    model.eval()


def test_restored_models_load_without_equipoise_and_write_the_same_text(tmp_path):
    ids = tokens(2, 6)
    torch.save(ids, tmp_path / "ids.pt")
    texts = {}
    for family in FAMILIES:
        model = tiny_model(family)
        swap_routers(model, "priced" if family == "deepseek-v3" else "skip-iw", **_gating(family))
        step(model, ids)
        texts[family] = generate(model, ids)
        restore_routers(model)
        model.save_pretrained(tmp_path / family)
    subprocess.run([sys.executable, "-c", PLAIN, str(tmp_path), *texts], check=True, capture_output=True)
    for family, text in texts.items():
        assert torch.equal(torch.load(tmp_path / f"{family}.pt"), text), family


def _gating(family):
    return {} if family == "deepseek-v3" else {"loss": "gating"}


@pytest.mark.parametrize("router", ["priced", "loss-free", "quantile", "topk"])
def test_prices_become_the_correction_bias(router):
    model, ids = tiny_model("deepseek-v3"), tokens()
    swap_routers(model, router)
    step(model, tokens(seed=1))  # exact prices tie some rows of the batch that they were solved for
    with torch.no_grad():
        before = model(input_ids=ids).logits
        bias = model.model.layers[1].mlp.gate.e_score_correction_bias.clone()
        restore_routers(model)
        after = model(input_ids=ids).logits
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    moved = not torch.equal(model.model.layers[1].mlp.gate.e_score_correction_bias, bias)
    assert moved == (router != "topk")


def test_it_says_what_is_lost():
    model, ids = tiny_model("mixtral"), tokens()
    swap_routers(model, "priced")
    step(model, ids)
    with pytest.warns(
        eq.nn.RoutingWarning, match=r"gates of model.layers.0.mlp, model.layers.1.mlp have lost the prices"
    ):
        assert restore_routers(model) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    swap_routers(model, "skip-iw", loss="reinforce")
    with pytest.warns(eq.nn.RoutingWarning, match="have lost factors of 1/K"):
        restore_routers(model)
    with warnings.catch_warnings(action="error"):
        assert restore_routers(model) == []  # nothing left to restore


def test_it_says_that_k_goes_back_to_the_models():
    model, ids = tiny_model("qwen3-moe"), tokens()
    before = model(ids).logits
    swap_routers(model, "topk", top_k=1)
    assert not torch.allclose(model(ids).logits, before, atol=1e-3)
    with pytest.warns(
        eq.nn.RoutingWarning, match="have lost their K of 1, .* back to num_experts_per_tok=2 experts a token"
    ):
        restore_routers(model)
    torch.testing.assert_close(model(ids).logits, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_cache_is_that_without(family):
    model, ids = tiny_model(family), tokens(1, 6)
    swap_routers(model, "skip-iw", loss="gating", evaluation="priced")
    step(model, ids)
    text = generate(model, ids, use_cache=True)
    assert torch.equal(generate(model, ids, use_cache=True), text)
    assert torch.equal(generate(model, ids, use_cache=False), text)
    restore_quietly(model)


def restore_quietly(model):
    with warnings.catch_warnings(action="ignore"):
        restore_routers(model)
