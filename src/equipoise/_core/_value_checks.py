# SPDX-License-Identifier: Apache-2.0
"""Checks that have to read values, written as operators.

Shapes and dtypes are known while `torch.compile` traces; values are not. A check of values is therefore an opaque
operator: it stops no trace, and it raises its `ValueError` when the compiled code runs. Each returns what it was asked
to check (a copy: an operator may not return its input), and the caller goes on with that, so that no optimiser may
remove the check as unused. All of them read small tensors, one entry a row or less, never the whole matrix.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

import torch
from torch import Tensor

from equipoise._core._number_checks import check_number
from equipoise._core._operators import value_check
from equipoise._core._transforms import is_batched


def row_name(failed: Tensor) -> str:
    """Names the first True entry of bool [..., n]: "row 3", or "row 3 of problem [1, 0]"."""
    *problem, row = [int(i) for i in failed.nonzero()[0]]
    return f"row {row} of problem {problem}" if problem else f"row {row}"


def all_finite(x: Tensor) -> bool:
    """Tells whether no entry is NaN or infinite: one fast reduction, where `isfinite` would write a copy first."""
    if x.numel() == 0:
        return True
    least, most = x.aminmax()  # both are NaN if any entry is
    return bool((least > -torch.inf) & (most < torch.inf))  # one number, since a device would be waited for twice


@value_check("checked_temperature")
def checked_temperature(temperature: Tensor, positive: bool) -> Tensor:
    """Requires finite temperatures >= 0, or > 0 where `positive`; returns them."""
    bad = ~((temperature > 0) if positive else (temperature >= 0)) | temperature.isinf()
    if bool(bad.any()):
        rule, remedy = _temperature_rule(positive)
        raise ValueError(f"temperature must be finite and {rule}, got {float(temperature[bad][0])}: {remedy}")
    return temperature.clone()


def _temperature_rule(positive: bool) -> tuple[str, str]:
    if positive:
        return "> 0 with sinkhorn_first", "balance logits / temperature at a temperature above zero"
    return ">= 0", "give a temperature above zero, or 0 for the deterministic choice"


def check_temperature(temperature: float | int, positive: bool) -> None:
    """Requires a finite number >= 0, or > 0 where `positive`."""
    check_number("temperature", temperature, tensor=True)
    if not ((temperature > 0) if positive else (temperature >= 0)) or temperature == float("inf"):
        rule, remedy = _temperature_rule(positive)
        raise ValueError(f"temperature must be finite and {rule}, got {temperature}: {remedy}")


@value_check("checked_choice")
def checked_choice(z: Tensor, best: Tensor) -> Tensor:
    """Requires that the best perturbed logit of every row is finite; returns the choice z.

    A maximum passes NaN on, so n numbers tell whether any of the n x k logits is NaN or +inf, or all of a row -inf.
    """
    if not all_finite(best):
        bad = ~best.isfinite()
        raise ValueError(
            f"logits must be free of NaN and +inf and leave every row an expert, got {float(best[bad][0])} as the "
            f"maximum of {row_name(bad)}: mask rows that should take no expert, and find where the NaN comes from"
        )
    return z.clone()


def checked_draws(name: str, x: Tensor) -> Tensor:
    """Requires uniform numbers without NaN, and returns them.

    Off the CPU nothing is checked, since reading the values would make the host wait for the device; nor is it within
    a vmap, where there are no values to look at.
    """
    return x if x.device.type != "cpu" or is_batched(x) else _checked_draws(x, name)


@value_check("checked_draws")
def _checked_draws(x: Tensor, name: str) -> Tensor:
    if x.numel() and bool(x.amin().isnan()):  # amin passes NaN on
        raise ValueError(
            f"{name} must not be NaN, got nan at index {x.isnan().nonzero()[0].tolist()}: pass uniform numbers, "
            f"torch.rand({list(x.shape)})"
        )
    return x.clone()


@value_check("checked_slots")
def checked_slots(capacity: Tensor) -> Tensor:
    """Requires capacities int64 [..., k] >= 1; returns them."""
    if bool((capacity < 1).any()):
        raise ValueError(
            f"capacity must be >= 1 for every expert where rows are skipped, got {int(capacity.min())}: no weight can "
            "make up for an expert that never keeps a row; forbid it with logits of -inf and give it capacity 1"
        )
    return capacity.clone()
