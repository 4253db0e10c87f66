# SPDX-License-Identifier: Apache-2.0
"""Temperatures that change in the course of training."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from equipoise._core import check_at_least, check_positive

Schedule = Callable[[int], float]
"""From the number of updates so far (0 at first) to the temperature of the next forward pass."""


@dataclass(frozen=True)
class _Schedule:
    """Two temperatures and the number of updates between them; before and after, it stays."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check_positive("start", self.start)
        check_positive("end", self.end)
        check_at_least("steps", self.steps, 1)

    def fraction(self, step: int) -> float:
        """Returns how much of the way is done, from 0 to 1."""
        return min(max(step / self.steps, 0.0), 1.0)


class LinearSchedule(_Schedule):
    """Moves the temperature along a straight line.

    Example:
        >>> schedule = LinearSchedule(2.0, 1.0, steps=10)
        >>> schedule(0), schedule(5), schedule(100)
        (2.0, 1.5, 1.0)
    """

    def __call__(self, step: int) -> float:
        """Returns the temperature after this many updates."""
        return self.start + (self.end - self.start) * self.fraction(step)


class CosineSchedule(_Schedule):
    """Moves the temperature along half a cosine: slowly at both ends.

    Example:
        >>> CosineSchedule(2.0, 1.0, steps=10)(5)
        1.5
    """

    def __call__(self, step: int) -> float:
        """Returns the temperature after this many updates."""
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * self.fraction(step))) / 2


class ExponentialSchedule(_Schedule):
    """Multiplies the temperature by the same factor at every update.

    Example:
        >>> ExponentialSchedule(4.0, 1.0, steps=10)(5)
        2.0
    """

    def __call__(self, step: int) -> float:
        """Returns the temperature after this many updates."""
        return self.start * (self.end / self.start) ** self.fraction(step)
