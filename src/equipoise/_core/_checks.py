# SPDX-License-Identifier: Apache-2.0
"""Checks of what a caller hands in, those that several layers share. A layer's own stand with its code.

A failed check raises a `ValueError` that names the parameter, the rule, the value received and the remedy. Checks that
need only shapes and dtypes are plain Python and vanish under `torch.compile`; checks that need values live where the
values are read anyway (a solver's first pass over the scores).

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

from collections.abc import Sequence
from typing import SupportsFloat

import torch
from torch import Tensor

from equipoise._core._number_checks import check_number

# What scores, logits and prices may be.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(name: str, x: Tensor) -> None:
    """Requires a dense tensor."""
    if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}: wrap it in torch.as_tensor")
    if x.is_nested:
        raise ValueError(f"{name} must be a dense tensor, got a nested one: pad its parts, and mask the padding")
    if x.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {x.layout}: convert it with {name}.to_dense()")


def check_matrix(name: str, x: Tensor) -> None:
    """Requires a floating-point matrix [..., n, k] with k >= 1."""
    check_tensor(name, x)
    if x.dtype not in FLOATS:
        raise ValueError(
            f"{name} must be floating point (float16, bfloat16, float32 or float64), got {x.dtype}: "
            f"{f'take {name}.real' if x.is_complex() else f'convert it with {name}.float()'}"
        )
    if x.ndim < 2:
        raise ValueError(
            f"{name} must have shape [..., n, k], rows by experts, got {list(x.shape)}: "
            "add the missing dimension with unsqueeze"
        )
    if x.shape[-1] == 0:
        raise ValueError(
            f"{name} must have at least one expert (last dimension k >= 1), got shape {list(x.shape)}: "
            "give it a column for each expert"
        )


def check_mask(mask: Tensor | None, shape: Sequence[int]) -> None:
    """Requires None or bool [..., n] that matches `shape` = [..., n]."""
    if mask is None:
        return
    check_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be boolean, True for rows that take an expert, got {mask.dtype}: use mask.bool() or mask > 0"
        )
    if list(mask.shape) != list(shape):
        raise ValueError(
            f"mask must have shape {list(shape)} (one entry a row), got {list(mask.shape)}: expand it to the batch"
        )


def check_same_device(name: str, x: Tensor | None, other_name: str, other: Tensor) -> None:
    """Requires two tensors on one device."""
    if x is not None and x.device != other.device:
        raise ValueError(
            f"{name} must be on the device of {other_name} ({other.device}), got {x.device}: "
            f"move it with {name}.to({other_name}.device)"
        )


def check_one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Requires one of the known names."""
    if not isinstance(value, str) or value not in known:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def check_positive(name: str, value: float | int) -> None:
    """Requires a finite number above zero."""
    if isinstance(value, bool | str | bytes) or not isinstance(value, SupportsFloat):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name} must be a number > 0, got {value!r}: give a positive number")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be finite and > 0, got {value}: give a positive number")


def check_shape(name: str, x: Tensor, shape: Sequence[int], meaning: str) -> None:
    """Requires a tensor of exactly this shape; `meaning` says what an entry stands for."""
    check_tensor(name, x)
    if list(x.shape) != list(shape):
        raise ValueError(
            f"{name} must have shape {list(shape)} ({meaning}), got {list(x.shape)}: "
            "reshape it, or expand it to the batch"
        )


def check_floating(name: str, x: Tensor) -> None:
    """Requires a floating-point tensor."""
    if not x.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {x.dtype}: convert it with {name}.float()")


def check_fraction(name: str, value: float) -> None:
    """Requires 0 <= value < 1."""
    check_number(name, value, tensor=False)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}: 0 keeps nothing of the past, 0.99 is usual")


def check_iterations(name: str, value: int) -> None:
    """Requires a whole number >= 1 of iterations."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}: give the number of iterations to stop at")
