# SPDX-License-Identifier: Apache-2.0
"""`parallelize`: the experts of a model spread over the ranks of a mesh.

Legend: E experts, R ranks of the expert axis.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from equipoise._core import check_one_of
from equipoise.distributed._checks import (
    check_agreement,
    check_has_experts,
    check_mesh,
    check_model,
    check_not_sharded,
    check_spread,
    check_stacked,
)
from equipoise.distributed._exchange import AllToAllDispatcher
from equipoise.distributed._ranks import Ranks
from equipoise.distributed._scope import MeshScope
from equipoise.nn import Router, RoutingSource

SCOPES = ("local", "global")


def parallelize(model: nn.Module, mesh: DeviceMesh, *, scope: str = "local") -> nn.Module:
    """Spreads the experts of every layer over the expert axis of a mesh, in place.

    Each rank keeps E / R experts of every layer, and its own tokens; tokens travel to the ranks that hold their
    experts, and outputs travel back (`AllToAllDispatcher`). Every rank starts from the first rank's parameters. For the
    parameters outside experts, put `DistributedDataParallel` or `fully_shard` over all axes around the model. These
    average gradients over ranks; `parallelize` does the same for experts. DDP ignores the experts; their gradients are
    averaged over the other axes of the mesh when they are complete. With FSDP2, shard each layer's experts over the
    data axes first, then the model over all of them; see docs/distributed.md.

    The loss of the batch is the mean of the ranks' losses. Routers draw independent noise on every rank, whatever the
    seeds. What routers keep between steps (prices, biases, automatic proposals) is the same on all ranks:
    `routings.update()` then communicates, and every rank has to call it.

    Args:
        model: holds layers with a dispatcher and stacked experts, such as `equipoise.nn.MoE`, built alike on all ranks.
            Call `parallelize` before `fully_shard` or DDP, and before you make the optimiser, since it replaces
            parameters.
        mesh: with an axis named "expert", or with one axis. Other axes hold copies of the experts.
        scope: "local": each rank balances its own rows, and a capacity applies to these. "global": a layer's capacity
            is shared by the rows of all ranks, and whatever is computed over a batch (balanced assignments and their
            conditionals, subsets, balance losses, telemetry) is computed over all of them, exactly.

    Returns:
        The model.

    Raises:
        ValueError: the mesh is none, or has no expert axis; the model is in DistributedDataParallel already; a layer's
            experts cannot be spread over the mesh; or ranks disagree on the model's settings. Every rank raises the
            error, with the same message.

    Example:
        A mesh of one rank. In a program that `torchrun --nproc-per-node 4` starts, `dist.init_process_group()` takes no
        arguments, and a mesh (2, 2) with the axes "data" and "expert" spreads the experts over pairs of ranks.

        >>> import torch.distributed as dist
        >>> import equipoise as eq
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "expert"))
        >>> model = parallelize(eq.nn.MoE(8, 4), mesh)
        >>> model = DistributedDataParallel(model)
        >>> model(torch.randn(16, 8)).shape
        torch.Size([16, 8])
        >>> dist.destroy_process_group()
    """
    check_one_of("scope", scope, SCOPES)
    check_mesh(mesh)
    check_model(model)
    ranks = Ranks(mesh)
    layers = list(_layers(model))
    check_has_experts(len(layers))
    check_agreement(ranks.gather_objects(_settings(model, scope)))
    for name, layer in layers:
        _check_layer(name, layer, ranks.expert_size)
    _start_alike(model, ranks)
    for _, layer in layers:
        _spread(layer.experts, ranks)
        layer.dispatcher = AllToAllDispatcher(ranks)
    ignored = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    for name, module in model.named_modules():
        if isinstance(module, Router):
            module.scope = MeshScope(ranks, shared=scope == "global")
            ignored += [buffer for buffer, _ in module.named_buffers(name)]  # kept alike by what updates them
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # pyright: ignore
    return model


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the layers whose rows a dispatcher takes to experts, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, RoutingSource) and hasattr(module, "dispatcher") and hasattr(module, "experts"):
            yield name, module


def _settings(model: nn.Module, scope: str) -> dict[str, str]:
    """Describes what has to be the same on all ranks, part by part."""
    routers = ((name, module) for name, module in model.named_modules() if isinstance(module, Router))
    parts = {name: " ".join(repr(router).split()) for name, router in routers}
    shapes = {name: f"{tuple(x.shape)} {x.dtype}" for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    mode = {"mode": "training" if model.training else "evaluation"}
    return {"scope": scope, **mode, **{f"router {name!r}": text for name, text in parts.items()}, **shapes}


def _check_layer(name: str, layer: Any, size: int) -> None:
    """Requires experts whose parameters have E for their first dimension, which the axis divides."""
    number = int(layer.num_experts)
    check_spread(name, number, size)
    for parameter_name, parameter in layer.experts.named_parameters():
        check_not_sharded(name, isinstance(parameter, DTensor))
        check_stacked(name, parameter_name, parameter.shape, number)


@torch.no_grad()
def _start_alike(model: nn.Module, ranks: Ranks) -> None:
    """Gives every rank the first one's parameters and buffers."""
    for x in (*model.parameters(), *model.buffers()):
        check_not_sharded("", isinstance(x, DTensor))
        if not x.is_meta:
            ranks.broadcast(x.data)


@torch.no_grad()
def _spread(experts: nn.Module, ranks: Ranks) -> None:
    """Keeps this rank's part of every parameter, along the first dimension."""
    for module in experts.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            own = parameter.chunk(ranks.expert_size)[ranks.expert_mesh.get_local_rank()].clone()
            part = DTensor.from_local(own, ranks.expert_mesh, [Shard(0)], run_check=False)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    if ranks.data_size > 1:
        experts.register_forward_pre_hook(_AverageOverData(ranks))


class _AverageOverData:
    """Before experts run: makes sure that their gradients are averaged over the ranks that hold the same experts.

    The average of what is averaged already is itself, so that accumulated gradients come out right. FSDP2, which
    averages by itself, is left alone. A copy of the experts starts anew.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._seen: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def __call__(self, module: nn.Module, inputs: object) -> None:
        del inputs
        if isinstance(module, FSDPModule):
            return
        for parameter in module.parameters():
            if parameter.requires_grad and self._seen.get(id(parameter)) is not parameter:
                self._seen[id(parameter)] = parameter
                parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: Tensor) -> None:
        gradient: Any = parameter.grad
        self._ranks.average_over_data(gradient.to_local())

    def __deepcopy__(self, memo: dict[int, Any]) -> "_AverageOverData":
        return _AverageOverData(self._ranks)
