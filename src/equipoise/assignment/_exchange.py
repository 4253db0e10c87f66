# SPDX-License-Identifier: Apache-2.0
"""What travels while a problem is settled: between a device and the host, and between holders of rows.

A device computes while the host runs ahead of it. Whoever reads a number of the device on the host has to wait for all
that was computed before. So `settle` reads through one `Meter`, which counts.

Rows may be spread over several holders (ranks). What is summed over rows passes through an `Exchange`.

Legend: b problems, m rows, w columns.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor


@runtime_checkable
class Exchange(Protocol):
    """What holders of rows tell each other. All of them call the same methods in the same order."""

    def reduce(self, x: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Returns the sum, or the maximum, of `x` over all holders; the same for each of them."""
        ...

    def gather(self, rows: Shaped[Tensor, "b m w"]) -> tuple[Shaped[Tensor, "b all w"], slice]:
        """Returns the rows of all holders, in the same order for each of them, and which ones are the caller's."""
        ...

    def total(self, number: int) -> int:
        """Returns the sum of a number that the host knows over all holders."""
        ...


class Alone:
    """The exchange of one holder that has all rows.

    Example:
        >>> Alone().reduce(torch.ones(2)).tolist()
        [1.0, 1.0]
    """

    def reduce(self, x: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Returns x."""
        return x

    def gather(self, rows: Shaped[Tensor, "b m w"]) -> tuple[Shaped[Tensor, "b m w"], slice]:
        """Returns the rows, all of them the caller's."""
        return rows, slice(None)

    def total(self, number: int) -> int:
        """Returns the number."""
        return number


@dataclass(frozen=True, slots=True)
class Traffic:
    """What it took to solve a problem whose scores are on a device.

    Attributes:
        passes: how often all scores were read on the device.
        trips: how often rows were copied to the host and solved there.
        rows_copied: rows that were copied to the host, over all trips.
        bytes_copied: all that was copied, in either direction.
        waits: how often the host waited for the device.

    Example:
        >>> from equipoise.assignment import assign_with_traffic
        >>> _, traffic = assign_with_traffic(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
        >>> traffic.trips, traffic.rows_copied  # so small a problem is copied whole
        (1, 64)
    """

    passes: int
    trips: int
    rows_copied: int
    bytes_copied: int
    waits: int


class Meter:
    """Copies between the device and the host, and counts. One for each call.

    Example:
        >>> meter = Meter()
        >>> meter.read(torch.ones(3)).tolist(), meter.traffic().waits, meter.traffic().bytes_copied
        ([1.0, 1.0, 1.0], 1, 12)
    """

    def __init__(self) -> None:
        self.passes = self.trips = self.rows = self._bytes = self._waits = 0

    def read(self, x: Tensor) -> Tensor:
        """Copies a tensor to the host, and waits for it."""
        self._waits += 1
        self._bytes += x.numel() * x.element_size()
        # A copy on the CPU as well: what is read there is the caller's own, as it is from a device.
        return x.detach().to("cpu", copy=True)

    def read_rows(self, *parts: Tensor) -> list[Tensor]:
        """Copies several tensors at once, the last of which is rows to be solved."""
        packed = self.read(torch.cat([x.detach().contiguous().flatten().view(torch.uint8) for x in parts]))
        sizes = [x.numel() * x.element_size() for x in parts]
        *_, rows = parts
        number = rows[..., 0].numel()
        self.rows += number
        self.trips += number > 0
        return [y.clone().view(x.dtype).reshape(x.shape) for x, y in zip(parts, packed.split(sizes), strict=True)]

    def write(self, x: Tensor, device: torch.device) -> Tensor:
        """Copies to the device, which need not be waited for."""
        self._bytes += x.numel() * x.element_size()
        return x.to(device, copy=True)

    def traffic(self) -> Traffic:
        """What was counted so far."""
        return Traffic(self.passes, self.trips, self.rows, self._bytes, self._waits)
