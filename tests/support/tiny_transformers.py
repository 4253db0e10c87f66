# SPDX-License-Identifier: Apache-2.0
"""Tiny transformers models of five families, randomly initialised, with gates that prefer some experts."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY = 61
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _mixtral(**options: Any) -> nn.Module:
    config = transformers.MixtralConfig(
        **_COMMON, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, **options
    )
    return transformers.MixtralForCausalLM(config)


def _olmoe(**options: Any) -> nn.Module:
    config = transformers.OlmoeConfig(**_COMMON, intermediate_size=32, num_experts=8, num_experts_per_tok=2, **options)
    return transformers.OlmoeForCausalLM(config)


def _qwen3(**options: Any) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **_COMMON, head_dim=8, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, **options
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _deepseek(**options: Any) -> nn.Module:
    config = transformers.DeepseekV3Config(
        **{**_COMMON, "num_key_value_heads": 4},
        intermediate_size=32,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        **options,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _gpt_oss(**options: Any) -> nn.Module:
    config = transformers.GptOssConfig(
        **_COMMON,
        head_dim=8,
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"] * 2,
        **options,
    )
    return transformers.GptOssForCausalLM(config)


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen3-moe": _qwen3,
    "deepseek-v3": _deepseek,
    "gpt-oss": _gpt_oss,
}


def tiny_model(family: str, *, seed: int = 0, **options: Any) -> Any:
    """Builds a model in evaluation mode, whose gates have logits of standard deviation about 1, and biases."""
    torch.manual_seed(seed)
    model = FAMILIES[family](**options).eval()
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "top_k") and hasattr(module, "weight"):
                module.weight.normal_(std=0.5)
            if hasattr(module, "e_score_correction_bias"):
                module.e_score_correction_bias.normal_(std=0.1)
    return model


def tokens(batch: int = 2, positions: int = 12, *, seed: int = 0) -> torch.Tensor:
    """Draws token ids, none of which is padding."""
    return torch.randint(1, VOCABULARY, (batch, positions), generator=torch.Generator().manual_seed(seed))
