# SPDX-License-Identifier: Apache-2.0
"""A model of two layers, its gradient over ranks, and the same in one process."""

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import equipoise as eq
from equipoise.distributed._scope import stream_seed

DIM, EXPERTS, ROWS = 8, 8, 32
ROUTERS: dict[str, dict[str, Any]] = {
    "skip-iw": {"router": "skip-iw"},
    "skip-iw-2": {"router": "skip-iw", "top_k": 2},
    "gm-iw-mix": {"router": "gm-iw-mix", "capacity_factor": 1.0},
    "gm-iw-mix-2": {"router": "gm-iw-mix", "capacity_factor": 1.0, "top_k": 2},
    "switch": {"router": "switch"},
    "topk": {"router": "topk"},
    "topk-2": {"router": "topk", "top_k": 2},
    "priced": {"router": "priced"},
    "priced-2": {"router": "priced", "top_k": 2},
}


def mesh_of(*sizes: int) -> DeviceMesh:
    names = ("data", "expert")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def one_axis() -> DeviceMesh:
    return mesh_of(dist.get_world_size())


class Model(nn.Module):
    """Two layers with residual connections, and a target for each row."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(
                eq.nn.MoE(DIM, EXPERTS, hidden_dim=8, dtype=torch.float64, **options) for _ in range(2)
            )
            self.head = nn.Linear(DIM, DIM, dtype=torch.float64)
            for layer in self.layers:
                layer.router.weight.data.normal_()  # pyright: ignore

    def forward(self, x: Tensor, generators: Any = (None, None)) -> Tensor:
        for layer, generator in zip(self.layers, generators, strict=True):
            x = x + layer(x, generator=generator)
        return (self.head(x) - 1).square().mean(-1)


def rows_of(rank: int, rows: int = ROWS, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, DIM, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor, generators: Any = (None, None), surrogate: Any = None) -> tuple[Tensor, Any]:
    with eq.nn.capture(model) as routings:
        losses = model(x, generators)
    surrogate = eq.nn.Surrogate(baseline=0.3) if surrogate is None else surrogate
    return surrogate(losses, routings), routings


def streams(seed: int, rank: int) -> list[torch.Generator]:
    """The generators that a rank's two layers draw from, when all ranks' global streams start from `seed`."""
    torch.manual_seed(seed)
    numbers = [int(torch.randint(2**62, [])) for _ in range(2)]
    return [torch.Generator().manual_seed(stream_seed(number, rank)) for number in numbers]


def reference(model: Model, sizes: list[int], seed: int, step: int = 0, *, copy: bool = True) -> tuple[Tensor, Model]:
    """The mean of the ranks' losses in one process, with its gradient, which is added to what there is."""
    model = deepcopy(model) if copy else model
    total = torch.zeros([], dtype=torch.float64)
    for rank, rows in enumerate(sizes):
        total = total + loss_of(model, rows_of(rank, rows, step), streams(seed, rank))[0] / len(sizes)
    total.backward()
    return total.detach(), model


def mean_over_ranks(x: Tensor) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def own_part(full: Tensor, like: Any) -> Tensor:
    """This rank's experts of a full tensor."""
    if not isinstance(like, DTensor):
        return full
    return full.chunk(like.device_mesh.size())[like.device_mesh.get_local_rank()]


def check_gradients(model: nn.Module, one: nn.Module, averaged: bool, tolerance: float = 1e-12) -> None:
    """Compares gradients with those of one process; dense ones are averaged here unless something else did it."""
    expected = dict(one.named_parameters())
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        assert parameter.grad is not None, name
        gradient: Any = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        elif not averaged:
            gradient = mean_over_ranks(gradient)
        wanted = expected[name].grad
        assert wanted is not None, name
        error = (gradient - wanted).abs().max() / wanted.abs().max()
        assert error < tolerance, f"{name}: relative error {error}"
