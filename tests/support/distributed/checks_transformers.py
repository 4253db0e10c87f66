# SPDX-License-Identifier: Apache-2.0
"""A transformers model whose routers were swapped, with its experts over ranks."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import equipoise as eq
from support.distributed.models import EXPERTS, check_gradients, mean_over_ranks, one_axis


def swapped(folder: Path, router: str, **options: Any) -> None:
    """Loss and gradients are those of one process that runs the ranks' batches in turn."""
    from transformers import MixtralConfig, MixtralForCausalLM

    from equipoise.integrations.transformers import swap_routers

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "vocab_size": 32, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model: Any = MixtralForCausalLM(MixtralConfig(**sizes, **more)).double().train()
    swap_routers(model, router, **options)
    model.set_experts_implementation("eager")  # the others know no float64
    one = deepcopy(model)
    expected = torch.zeros([], dtype=torch.float64)
    for rank in range(dist.get_world_size()):
        loss = _loss(one, rank) / dist.get_world_size()
        loss.backward()
        expected = expected + loss.detach()
    eq.distributed.parallelize(model, one_axis())
    loss = _loss(model, dist.get_rank())
    loss.backward()
    assert torch.allclose(mean_over_ranks(loss), expected, rtol=1e-6)
    check_gradients(model, one, averaged=False, tolerance=1e-6)  # norms of transformers compute in float32


def _loss(model: Any, rank: int) -> Any:
    ids = torch.randint(32, [2, 16], generator=torch.Generator().manual_seed(rank))
    with eq.nn.capture(model) as routings:
        logits = model(input_ids=ids).logits
    losses = torch.nn.functional.cross_entropy(logits.mT, ids, reduction="none")
    return eq.nn.Surrogate(baseline=0.0)(losses, routings)
