# SPDX-License-Identifier: Apache-2.0
"""Averaging gradients over ranks, for training loops without DDP and FSDP2."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equipoise.distributed._ranks import explained, whole_group


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Averages the gradients of parameters that every rank has, in place; those of experts are averaged already.

    DDP does this during the backward pass. This function sends one message for each dtype after it. It also takes
    parameters that are not part of the model, such as those of a `Surrogate` with readouts. A parameter without a
    gradient counts as 0, so that ranks whose batches differ agree.

    Args:
        parameters: the same ones on all ranks, in the same order. Those of experts are left as they are.
        mesh: the mesh; all of its ranks take part.

    Example:
        Every rank calls it between the backward pass and the optimiser's step; here there is one rank.

        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("expert",))
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> average_gradients(model.parameters(), mesh)
        >>> model.weight.grad
        tensor([[1., 1.]])
        >>> dist.destroy_process_group()
    """
    every: list[Any] = [x for x in parameters if x.requires_grad and not isinstance(x, DTensor)]
    for x in every:
        if x.grad is None:
            x.grad = torch.zeros_like(x)
    for dtype in dict.fromkeys(x.dtype for x in every):
        gradients = [x.grad for x in every if x.dtype == dtype]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        with explained("the average of gradients"):
            dist.all_reduce(flat, group=whole_group(mesh))
        parts = flat.div_(mesh.size()).split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
