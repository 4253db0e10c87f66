# SPDX-License-Identifier: Apache-2.0
"""Checks of what is spread over ranks. Each finds the same on all ranks, so that none waits for one that raised."""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from equipoise.distributed._ranks import EXPERT_AXIS


def check_model(model: nn.Module) -> None:
    """Requires a model that DistributedDataParallel does not hold yet."""
    wrapped = next((name for name, each in model.named_modules() if isinstance(each, DistributedDataParallel)), None)
    if wrapped is not None:
        where = f" in {wrapped!r}" if wrapped else ""
        raise ValueError(
            f"model must not be wrapped yet, got DistributedDataParallel{where}, which holds the parameters that "
            "parallelize replaces: call parallelize(model, mesh) first, then DistributedDataParallel(model)"
        )


def check_mesh(mesh: DeviceMesh) -> None:
    """Requires a mesh with an expert axis."""
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"mesh must be a DeviceMesh, got {type(mesh).__name__}: make it with "
            "init_device_mesh(device, sizes, mesh_dim_names=('data', 'expert'))"
        )
    if mesh.ndim > 1 and EXPERT_AXIS not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"mesh must have an axis named {EXPERT_AXIS!r}, got {mesh.mesh_dim_names}: make it with "
            "init_device_mesh(device, sizes, mesh_dim_names=('data', 'expert'))"
        )


def check_has_experts(layers: int) -> None:
    """Requires at least one layer to spread."""
    if layers == 0:
        raise ValueError(
            "model must hold a layer with experts and a dispatcher, such as equipoise.nn.MoE, got none: parallelize "
            "the model that has them"
        )


def check_spread(name: str, num_experts: int, size: int) -> None:
    """Requires as many experts on every rank."""
    if num_experts % size:
        raise ValueError(
            f"the {num_experts} experts of layer {name!r} must be a multiple of the expert axis, got {size} ranks: "
            "every rank holds as many experts, at least one; make the axis smaller, or change num_experts"
        )


def check_stacked(name: str, parameter: str, shape: Sequence[int], num_experts: int) -> None:
    """Requires a parameter with one entry for each expert."""
    if len(shape) == 0 or shape[0] != num_experts:
        raise ValueError(
            f"experts of layer {name!r} must have stacked parameters [{num_experts}, ...], got {parameter} of shape "
            f"{list(shape)}: build the layer with experts='mlp' or 'swiglu', or with stacked experts of your own"
        )


def check_not_sharded(name: str, sharded: bool) -> None:
    """Requires parameters that nobody has sharded yet."""
    if sharded:
        raise ValueError(
            f"model must not be sharded yet, got a DTensor{f' in layer {name!r}' if name else ''}: call parallelize "
            "once, before fully_shard"
        )


def check_agreement(settings: Sequence[Mapping[str, str]]) -> None:
    """Requires the same settings on all ranks.

    Args:
        settings: of each rank, in the order of the mesh.
    """
    first = settings[0]
    for rank, other in enumerate(settings):
        for part in (*first, *other):
            if first.get(part) != other.get(part):
                raise ValueError(
                    f"all ranks must have the same model, but {part} is {first.get(part, 'absent')} on rank 0 and "
                    f"{other.get(part, 'absent')} on rank {rank} of the mesh: build it from one configuration"
                )
