# SPDX-License-Identifier: Apache-2.0
"""Checks of experts and of what is dispatched to them.

Legend: T rows (tokens), E experts, m rows in groups, one group an expert.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise._core._operators import value_check


def check_size(name: str, value: int) -> None:
    """Requires a whole number >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}: give a size")


def check_tokens(name: str, x: Tensor, rows: int | None, dim: int | None) -> None:
    """Requires floating point [rows, dim]; None stands for any size."""
    fits = x.ndim == 2 and (rows is None or rows == x.shape[0]) and (dim is None or dim == x.shape[1])
    if not fits:  # the text only here: a size that is a symbol while tracing cannot be written out
        wanted = f"{'rows' if rows is None else rows}, {'dim' if dim is None else dim}"
        raise ValueError(
            f"{name} must have shape [{wanted}], one row a token, got {list(x.shape)}: "
            "flatten leading dimensions, and give experts and tokens the same dim"
        )
    if not x.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {x.dtype}: convert it with {name}.float()")


def check_same_dtype(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Requires two tensors of one dtype."""
    if x.dtype != other.dtype:
        raise ValueError(
            f"{name} must have the dtype of {other_name}, {other.dtype}, got {x.dtype}: convert one of them, or run "
            "under torch.autocast"
        )


def check_group_sizes(rows: int, num_groups: int, slots: int | None, num_experts: int) -> None:
    """Requires one group for each expert, and with slots, that many rows for each."""
    if num_groups != num_experts:
        raise ValueError(
            f"counts must have one entry for each of the {num_experts} experts, got {num_groups}: dispatch with a "
            "routing of as many experts"
        )
    if slots is not None and rows != num_experts * slots:
        raise ValueError(
            f"rows must number experts * slots = {num_experts} * {slots}, got {rows}: pad each group, or give "
            "slots=None for groups of any size"
        )


def check_expert_modules(modules: Sequence[object]) -> None:
    """Requires at least one module, no one twice, each a torch.nn.Module."""
    if not modules:
        raise ValueError("experts must hold at least one module, got none: give one torch.nn.Module for each expert")
    for index, module in enumerate(modules):
        if not isinstance(module, torch.nn.Module):
            raise ValueError(
                f"experts[{index}] must be a torch.nn.Module, got {type(module).__name__}: wrap it in a module"
            )
    if len({id(module) for module in modules}) < len(modules):
        raise ValueError(
            f"experts must be {len(modules)} modules of their own, got one of them twice: copy it with copy.deepcopy"
        )


def check_expert_number(given: int, num_experts: int) -> None:
    """Requires as many experts as the layer has."""
    if given != num_experts:
        raise ValueError(
            f"experts must number num_experts = {num_experts}, got {given}: give one module for each expert, or a "
            "single module to be copied"
        )


def check_expert_output(index: int, output: object, rows: Tensor) -> None:
    """Requires an expert's output to have the shape of its input."""
    if not isinstance(output, Tensor):
        raise ValueError(
            f"experts[{index}] must return a tensor, got {type(output).__name__}: return the rows and nothing else"
        )
    if output.shape != rows.shape:
        raise ValueError(
            f"experts[{index}] must map [m, dim] to the same shape, got {list(output.shape)} for {list(rows.shape)}: "
            "end it with a layer that has dim outputs"
        )


@value_check("checked_counts")
def checked_counts(counts: Tensor, slots: int, exact: bool) -> Tensor:
    """Requires what a routing promises of the rows of each expert: at most `slots`, or exactly; returns the counts."""
    bad = (counts != slots) if exact else (counts > slots)
    if bool(bad.any()):
        expert = int(bad.nonzero()[0])
        promise = f"exactly_balanced promises {slots}" if exact else f"its capacity promises at most {slots}"
        raise ValueError(
            f"routing must keep its promise, but expert {expert} has {int(counts[expert])} rows where {promise}: "
            "correct the routing rule"
        )
    return counts.clone()
