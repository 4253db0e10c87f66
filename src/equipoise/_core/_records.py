# SPDX-License-Identifier: Apache-2.0
"""What the library's results have in common: how they move to a device, and how they look.

A result is a frozen dataclass of tensors, with `eq=False`: two results are equal if they are the same object, and a
result can be the key of a dictionary. (Fields compared one by one would be tensors, whose truth is ambiguous.)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from equipoise._core._transforms import in_transform

R = TypeVar("R", bound="Record")  # not Self, which the tests' check of signatures cannot read


class Record:
    """A frozen dataclass of tensors."""

    __slots__ = ()

    def to(self: R, device: torch.device | str | int) -> R:
        """Copies the result to a device; dtypes stay, and so do gradients.

        Args:
            device: where to.

        Returns:
            A new result with every tensor on the device. A tensor that is there already is shared, not copied.
        """
        this = cast(Any, self)
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(this)}
        return dataclasses.replace(this, **{name: _moved(value, device) for name, value in values.items()})


def _moved(value: Any, device: torch.device | str | int) -> Any:
    if isinstance(value, Tensor | Record):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(x, device) for x in cast(tuple[Any, ...], value))
    if isinstance(value, Mapping):
        return {name: _moved(x, device) for name, x in cast(Mapping[Any, Any], value).items()}
    return value


def compact_repr(of: object, **parts: Any) -> str:
    """Writes `Name(part=value, ...)`, with numbers for tensors of one number and shapes for larger ones.

    Args:
        of: what is described, for its name.
        parts: what to say; those that are None are left out.
    """
    text = ", ".join(f"{name}={_short(value)}" for name, value in parts.items() if value is not None)
    return f"{type(of).__name__}({text})"


def _short(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{value:.6g}" if isinstance(value, float) else repr(value)
    # A number that cannot be read without waiting (a device) or at all (meta, tracing, vmap) is a shape too.
    if value.ndim == 0 and type(value) is Tensor and value.device.type == "cpu" and not in_transform():
        return f"{value.item():.6g}" if value.is_floating_point() else str(value.item())
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
