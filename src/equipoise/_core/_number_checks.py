# SPDX-License-Identifier: Apache-2.0
"""Checks of single numbers: sizes, seeds, capacity factors."""

from collections.abc import Iterable, Sequence
from typing import SupportsFloat, SupportsIndex, TypeGuard

import torch


def is_number(value: object) -> TypeGuard[float | int]:
    """Tells whether a value may stand for a number: one of Python's, of NumPy's, or of those that compiling traces."""
    return isinstance(value, float | int) or (isinstance(value, SupportsFloat) and getattr(value, "ndim", 0) == 0)


def check_number(name: str, value: float | int, *, tensor: bool) -> None:
    """Requires a number; `tensor` says whether the caller takes a tensor too."""
    if not is_number(value):
        rule, remedy = (
            ("a number or a torch.Tensor", "wrap one for each problem in torch.as_tensor")
            if tensor
            else ("a number", "give a Python float")
        )
        raise ValueError(f"{name} must be {rule}, got {value!r}: {remedy}")


def checked_sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """Requires the shape of a tensor, and returns it."""
    if torch.compiler.is_compiling():  # sizes may be symbols, which nothing should be asked about
        return tuple(shape)
    sizes = tuple(shape) if isinstance(shape, Iterable) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if sizes is None or not all(map(_is_size, sizes)):
        raise ValueError(
            f"shape must be a sequence of integers >= 0, got {shape!r}: give that of the logits, such as [n, k]"
        )
    return sizes


def _is_size(size: object) -> bool:
    return isinstance(size, SupportsIndex) and size.__index__() >= 0


def check_at_least(name: str, value: int, least: int, remedy: str = "give a whole number") -> None:
    """Requires a whole number that is not below `least`; `remedy` says what it counts."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}: {remedy}")


def check_seed(name: str, value: int) -> None:
    """Requires a seed that torch takes, with room for the streams that are derived from it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"{name} must be an integer from 0 to 2**62 - 1, because torch's seeds have 64 bits, got {value!r}: "
            "give one in that range"
        )


def check_capacity_factor(name: str, value: float | None, *, holds_all: str | None = None) -> None:
    """Requires None or a finite number > 0; >= 1 for the router `holds_all`, which drops no row."""
    if value is None:
        return
    if not 0 < value < float("inf"):
        raise ValueError(
            f"{name} must be finite and > 0, got {value}: 1.0 gives every expert room for its even share of the rows, "
            "1.25 a quarter more, None no limit"
        )
    if holds_all is not None and value < 1:
        raise ValueError(
            f"{name} must be >= 1 with router {holds_all!r}, got {value}: it assigns every row, and drops none; use a "
            "router that drops rows, such as 'skip-iw' or 'switch'"
        )
