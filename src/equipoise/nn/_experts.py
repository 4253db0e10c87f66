# SPDX-License-Identifier: Apache-2.0
"""Experts: two-layer networks with stacked parameters, and any module of the user's.

Legend: m rows in groups, E experts.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from equipoise._core import autocast_device, check_one_of
from equipoise.nn._expert_checks import (
    check_expert_modules,
    check_expert_number,
    check_expert_output,
    check_group_sizes,
    check_same_dtype,
    check_size,
    check_tokens,
)
from equipoise.nn._expert_paths import PATHS, pick_path
from equipoise.nn._grouped import Grouped
from equipoise.nn._plain_experts import Weights, experts_by_loop

_KINDS = ("mlp", "swiglu")
_COMPUTE = ("auto", *PATHS)


def here(x: Tensor) -> Tensor:
    """Returns a parameter's part in this process: all of it, unless experts are spread over ranks (a DTensor)."""
    to_local = getattr(x, "to_local", None)
    return x if to_local is None else to_local()


class Experts(Protocol):
    """The interface of experts: a module that computes outputs for grouped rows, in the same layout.

    `MoE(experts=)` takes a module with an attribute `num_experts` for experts; any other module is one expert.

    Example:
        Each expert multiplies its rows by a number of its own:

        >>> import equipoise as eq
        >>> class Scales(torch.nn.Module):
        ...     def __init__(self, num_experts):
        ...         super().__init__()
        ...         self.num_experts = num_experts
        ...         self.scale = torch.nn.Parameter(torch.ones(num_experts))
        ...
        ...     def forward(self, groups):
        ...         row = torch.arange(len(groups.rows))
        ...         expert = torch.bucketize(row, groups.ends(), right=True)
        ...         return groups.rows * torch.cat([self.scale, torch.zeros(1)])[expert, None]
        >>> eq.nn.MoE(8, 4, router="switch", experts=Scales(4))(torch.randn(12, 8)).shape
        torch.Size([12, 8])
    """

    def __call__(self, groups: Grouped, /) -> Float[Tensor, "m dim"]:
        """Applies each expert to its group.

        Args:
            groups: rows grouped by expert.

        Returns:
            The outputs, row for row; zero for rows that belong to no expert.
        """
        ...


class _StackedExperts(nn.Module):
    """Two layers with an activation between them, for all experts at once."""

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        hidden_dim: int | None,
        activation: str,
        width: int,
        bias: bool,
        compute: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        hidden_dim = 4 * dim if hidden_dim is None else hidden_dim
        for name, value in (("dim", dim), ("num_experts", num_experts), ("hidden_dim", hidden_dim)):
            check_size(name, value)
        check_one_of("compute", compute, _COMPUTE)
        self.dim, self.num_experts, self.hidden_dim = dim, num_experts, hidden_dim
        self.activation, self.compute = activation, compute

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        self.up = parameter(width * hidden_dim, dim)
        self.down = parameter(dim, hidden_dim)
        self.up_bias = parameter(width * hidden_dim) if bias else None
        self.down_bias = parameter(dim) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws every expert's parameters as `torch.nn.Linear` does: uniform within 1 / sqrt(inputs)."""
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            bound = 1 / math.sqrt(weight.shape[2])
            weight.uniform_(-bound, bound)
            if bias is not None:
                bias.uniform_(-bound, bound)

    def forward(self, groups: Grouped) -> Float[Tensor, "m dim"]:
        """Applies each expert to its group.

        Args:
            groups: rows grouped by expert, of the parameters' dtype; under autocast of any.

        Returns:
            The outputs, row for row; zero for rows that belong to no expert.
        """
        check_tokens("rows", groups.rows, None, self.dim)
        device = autocast_device(groups.rows.device)
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if cast is None or groups.rows.dtype == torch.float64:  # which autocast leaves alone
            check_same_dtype("rows", groups.rows, "the experts' parameters", self.up)
            weights = self._weights(groups, self.up.dtype)
            return PATHS[self._path(groups, weights)](groups, weights)
        weights = self._weights(groups, cast)
        cast_groups = Grouped(rows=groups.rows.to(cast), counts=groups.counts, slots=groups.slots)
        with torch.autocast(device, enabled=False):
            return PATHS[self._path(groups, weights)](cast_groups, weights)

    def _path(self, groups: Grouped, weights: Weights) -> str:
        return pick_path(groups, weights) if self.compute == "auto" else self.compute

    def _weights(self, groups: Grouped, dtype: torch.dtype) -> Weights:
        """Returns the parameters of the experts that are here, in `dtype`; requires a group for each."""
        up, down = here(self.up).to(dtype), here(self.down).to(dtype)
        up_bias, down_bias = (None if x is None else here(x).to(dtype) for x in (self.up_bias, self.down_bias))
        check_group_sizes(groups.rows.shape[0], groups.num_experts, groups.slots, up.shape[0])
        return Weights(up=up, up_bias=up_bias, down=down, down_bias=down_bias, activation=self.activation)

    def extra_repr(self) -> str:
        """The sizes, for `repr`."""
        return (
            f"dim={self.dim}, num_experts={self.num_experts}, hidden_dim={self.hidden_dim}, "
            f"activation={self.activation!r}, bias={self.up_bias is not None}, compute={self.compute!r}"
        )


class MLPExperts(_StackedExperts):
    r"""E networks of two layers, :math:`y = B_e \, s(A_e x + a_e) + b_e`, with stacked parameters.

    Parameters are `up` [E, hidden, dim], `up_bias` [E, hidden], `down` [E, dim, hidden] and `down_bias` [E, dim]: each
    expert's are those of `torch.nn.Linear`.

    Args:
        dim: features of a row.
        num_experts: E.
        hidden_dim: features between the layers; None: 4 * dim.
        activation: "gelu" (exact) or "relu".
        bias: whether the layers add one.
        compute: "auto" picks the fastest way. "fused", "bmm" (even groups only), "grouped" (`torch.nn.functional.
            grouped_mm`) and "loop" insist on one; the results agree.
        device: of the parameters.
        dtype: of the parameters.

    Example:
        >>> experts = MLPExperts(4, num_experts=2, hidden_dim=8)
        >>> groups = Grouped(rows=torch.randn(6, 4), counts=torch.tensor([1, 5]), slots=None)
        >>> experts(groups).shape
        torch.Size([6, 4])
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        hidden_dim: int | None = None,
        activation: str = "gelu",
        bias: bool = True,
        compute: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_one_of("activation", activation, ("gelu", "relu"))
        super().__init__(
            dim,
            num_experts,
            hidden_dim=hidden_dim,
            activation=activation,
            width=1,
            bias=bias,
            compute=compute,
            device=device,
            dtype=dtype,
        )


class SwiGLUExperts(_StackedExperts):
    r"""E gated networks, :math:`y = B_e (\mathrm{silu}(A_e x) \odot C_e x)`, with stacked parameters.

    Parameters are `up` [E, 2 * hidden, dim], A above C, and `down` [E, dim, hidden]: the layout of `gate_up_proj` and
    `down_proj` in Hugging Face transformers.

    Args:
        dim: features of a row.
        num_experts: E.
        hidden_dim: features between the layers; None: 4 * dim.
        bias: whether the layers add one.
        compute: how, see `MLPExperts`.
        device: of the parameters.
        dtype: of the parameters.

    Example:
        >>> experts = SwiGLUExperts(4, num_experts=2, hidden_dim=8)
        >>> experts(Grouped(rows=torch.randn(6, 4), counts=torch.tensor([3, 3]), slots=3)).shape
        torch.Size([6, 4])
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        hidden_dim: int | None = None,
        bias: bool = False,
        compute: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            dim,
            num_experts,
            hidden_dim=hidden_dim,
            activation="swiglu",
            width=2,
            bias=bias,
            compute=compute,
            device=device,
            dtype=dtype,
        )


class ModuleExperts(nn.Module):
    """Modules of the user's as experts: each maps [m, dim] to [m, dim], whatever is in between.

    They run one after the other. An expert without rows is not called. With ragged groups the host has to know their
    sizes, which stops a `torch.compile` trace; even groups do not.

    Args:
        modules: one for each expert.

    Example:
        >>> experts = ModuleExperts([nn.Linear(4, 4), nn.Identity()])
        >>> experts(Grouped(rows=torch.randn(6, 4), counts=torch.tensor([1, 5]), slots=None)).shape
        torch.Size([6, 4])
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        check_expert_modules(modules)
        self.experts = nn.ModuleList(modules)

    @property
    def num_experts(self) -> int:
        """The number of experts, E."""
        return len(self.experts)

    def forward(self, groups: Grouped) -> Float[Tensor, "m dim"]:
        """Applies each module to its group; returns the outputs, row for row."""
        check_group_sizes(groups.rows.shape[0], groups.num_experts, groups.slots, self.num_experts)
        return experts_by_loop(groups, self._apply_expert, skip_empty=True)

    def _apply_expert(self, index: int, rows: Tensor) -> Tensor:
        output: Any = self.experts[index](rows)
        check_expert_output(index, output, rows)
        return output


def make_experts(
    experts: str | nn.Module | Sequence[nn.Module],
    dim: int,
    num_experts: int,
    hidden_dim: int | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Builds experts from what a user may say of them.

    Args:
        experts: "mlp"; "swiglu"; one module that maps [m, dim] to [m, dim], which is copied for each expert (drawn
            anew where it has `reset_parameters`); a sequence of as many modules as there are experts; or experts
            that are ready, a module with `num_experts` that meets `Experts`.
        dim: features of a row.
        num_experts: E.
        hidden_dim: features between the layers of "mlp" and "swiglu"; None: 4 * dim.
        device: of the parameters of "mlp" and "swiglu".
        dtype: of the parameters of "mlp" and "swiglu".

    Returns:
        A module that meets `Experts`.

    Example:
        >>> make_experts([nn.Identity(), nn.Linear(4, 4)], 4, 2).num_experts
        2
    """
    check_size("num_experts", num_experts)
    if isinstance(experts, str):
        check_one_of("experts", experts, _KINDS)
        kind = MLPExperts if experts == "mlp" else SwiGLUExperts
        return kind(dim, num_experts, hidden_dim=hidden_dim, device=device, dtype=dtype)
    if isinstance(experts, nn.Module) and hasattr(experts, "num_experts"):
        check_expert_number(int(experts.num_experts), num_experts)  # pyright: ignore[reportArgumentType]
        return experts
    if isinstance(experts, nn.Module) and not isinstance(experts, nn.ModuleList):
        return ModuleExperts([experts, *(_fresh_copy(experts) for _ in range(num_experts - 1))])
    modules = list(experts)
    check_expert_number(len(modules), num_experts)
    return ModuleExperts(modules)


def _fresh_copy(module: nn.Module) -> nn.Module:
    """Copies a module and draws the parameters of the copy anew, where its layers know how."""
    fresh = copy.deepcopy(module)
    for layer in fresh.modules():
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset):
            reset()
    return fresh
