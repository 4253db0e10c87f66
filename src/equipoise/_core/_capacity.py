# SPDX-License-Identifier: Apache-2.0
"""What callers may hand in as `capacity`, and what the code below works with.

Legend: k columns (experts), ... batch dimensions.
"""

import numbers
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeGuard

import numpy as np
import torch
from jaxtyping import Integer
from numpy.typing import NDArray
from torch import Tensor

from equipoise._core._checks import check_tensor

# NumPy's integers are no `int`, though they can be used as one: hence SupportsIndex.
Capacity = SupportsIndex | Sequence[Any] | NDArray[np.integer[Any]] | Integer[Tensor, "..."] | None

# More rows than any tensor has. Capacities above it count as this many, so that the sum over experts is an int64.
_NO_LIMIT = 2**40
_REMEDY = "give the number of rows an expert may take"
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32)


def check_capacity(
    capacity: Capacity,
    batch: Sequence[int],
    n: int,
    k: int,
    mask: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Turns any legal `capacity` into int64 [..., k].

    None means ceil(rows that are not masked / k) for each problem of the batch.
    """
    shape = [*batch, k]
    if capacity is None:
        if mask is None:
            return torch.full(shape, -(-n // k), dtype=torch.int64, device=device)
        return ((mask.sum(-1, keepdim=True) + k - 1) // k).expand(shape).contiguous()
    if not isinstance(capacity, Tensor):
        if _is_integer(capacity):
            return torch.full(shape, _bounded(capacity), dtype=torch.int64, device=device)
        capacity = _to_tensor(capacity, device)
    check_tensor("capacity", capacity)
    if capacity.dtype not in _INTEGERS:
        raise ValueError(f"capacity must be an integer tensor, got {capacity.dtype}: convert it with capacity.long()")
    if capacity.ndim > 0 and list(capacity.shape) not in ([k], shape):
        raise ValueError(
            f"capacity must be an int, or have shape [{k}] (one for each expert) or {shape} "
            f"(one for each problem and expert), got {list(capacity.shape)}: reshape it, or expand it to the batch"
        )
    return capacity.to(torch.int64).clamp(max=_NO_LIMIT).expand(shape).contiguous()


def _is_integer(x: Any) -> TypeGuard[SupportsIndex]:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _bounded(capacity: SupportsIndex) -> int:
    """Requires an integer >= 0, and cuts off what int64 cannot add up."""
    # What is an int stays as it is: torch.compile may have it as an unknown, which int() would settle.
    value = capacity if isinstance(capacity, int) else operator.index(capacity)
    if value < 0:
        raise ValueError(f"capacity must be >= 0, got {value}: {_REMEDY}")
    return _NO_LIMIT if value > _NO_LIMIT else value


def _to_tensor(capacity: Any, device: torch.device) -> Tensor:
    """Turns an array, or a list of integers or of lists, into a tensor."""
    if isinstance(capacity, np.ndarray):
        if capacity.dtype.kind not in "iu":
            raise ValueError(
                f"capacity must hold integers, got an array of {capacity.dtype}: convert it with capacity.astype(int)"
            )
        if capacity.dtype == np.uint64:  # the one type that may hold more than an int64
            capacity = np.asarray(np.minimum(capacity, np.uint64(_NO_LIMIT)))
        return torch.from_numpy(capacity.astype(np.int64)).to(device)
    if isinstance(capacity, bool | numbers.Number | np.generic):
        remedy = _REMEDY if isinstance(capacity, bool | np.bool) else "round it, for example math.ceil(capacity)"
        raise ValueError(f"capacity must be an integer, got {capacity!r}: {remedy}")
    if isinstance(capacity, str | bytes) or not isinstance(capacity, Sequence):
        raise ValueError(
            f"capacity must be None, an int, a list of ints or an integer tensor, got {type(capacity).__name__} "
            f"{capacity!r}: {_REMEDY}"
        )
    entries = _bounded_entries(capacity)
    try:
        return torch.tensor(entries, dtype=torch.int64, device=device)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"capacity must have as many entries in every list, got {capacity!r}: give each problem one for each expert"
        ) from error


def _bounded_entries(entries: Sequence[Any]) -> list[Any]:
    """Applies `_bounded` to every integer of a list, or a list of lists."""
    bounded: list[Any] = []
    for entry in entries:
        if isinstance(entry, np.ndarray) and entry.ndim > 0:
            bounded.append(_bounded_entries(entry.tolist()))
        elif isinstance(entry, Sequence) and not isinstance(entry, str | bytes):
            bounded.append(_bounded_entries(entry))  # pyright: ignore[reportUnknownArgumentType]
        elif _is_integer(entry):
            bounded.append(_bounded(entry))
        elif isinstance(entry, Tensor) and entry.ndim == 0 and entry.dtype in _INTEGERS:
            bounded.append(_bounded(int(entry)))
        else:
            remedy = "round them first" if isinstance(entry, float | np.floating) else _REMEDY
            raise ValueError(f"capacity must hold integers, got {list(entries)!r}: {remedy}")
    return bounded
