# SPDX-License-Identifier: Apache-2.0
"""Timing of one call: the best of several repetitions, each the mean over enough calls to outlast jitter."""

import gc
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from equipoise._core import num_threads as num_threads

# A repetition of a fast call lasts at least this long, as in the standard library's timeit.
_REPETITION_SECONDS = 0.02
# A slow call is repeated until this many budgets are spent.
_PATIENCE = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The times of a call and what the call returned."""

    # Seconds of one call, in each repetition; fewer than asked for where it outlasts the budget.
    times: tuple[float, ...]
    result: Any  # what the last call returned

    @property
    def seconds(self) -> float:
        """The time of one call, in the best repetition."""
        return min(self.times)

    @property
    def repeats(self) -> int:
        """Repetitions measured."""
        return len(self.times)


def best_of(call: Callable[[], Any], repeats: int, *, budget: float, threads: int | None = None) -> Timing:
    """Times one call; see `best_in_turns`.

    Example:
        >>> best_of(lambda: 3, repeats=2, budget=1.0).result
        3
    """
    return best_in_turns({"call": call}, repeats, budget=budget, threads=threads)["call"]


def best_of_each(
    calls: Mapping[str, Callable[[], Any]], repeats: int, *, threads: int | None = None
) -> dict[str, float]:
    """The best time of each of several calls in turns, in seconds, however long that takes.

    Example:
        >>> sorted(best_of_each({"a": lambda: 1, "b": lambda: 2}, repeats=1))
        ['a', 'b']
    """
    return {name: timing.seconds for name, timing in best_in_turns(calls, repeats, threads=threads).items()}


def best_in_turns(
    calls: Mapping[str, Callable[[], Any]], repeats: int, *, budget: float = math.inf, threads: int | None = None
) -> dict[str, Timing]:
    """Times calls that are to be compared. They take turns, so that drift of the machine meets all.

    Two calls of each come first: one may have something to compile or load, the other says how many make a repetition.
    Only if both took longer than `budget` seconds do they count, and then there are no further ones.

    Args:
        calls: what to time, by name.
        repeats: rounds; in each, every call is repeated for at least 20 ms.
        budget: seconds that a call may take to be in every round.
        threads: of torch and of our solvers meanwhile; None leaves them.

    Example:
        >>> [timing.result for timing in best_in_turns({"a": lambda: 1, "b": lambda: 2}, 1).values()]
        [1, 2]
    """
    enabled = gc.isenabled()
    gc.disable()  # its pauses belong to no call
    try:
        with nullcontext() if threads is None else num_threads(threads):
            runs = {name: _Run(call, budget) for name, call in calls.items()}
            for _ in range(repeats):
                for run in runs.values():
                    run.repeat()
    finally:
        if enabled:
            gc.enable()
    return {name: Timing(times=tuple(run.times), result=run.result) for name, run in runs.items()}


class _Run:
    """One call on its way to a best time."""

    def __init__(self, call: Callable[[], Any], budget: float) -> None:
        self.call, self.spent = call, 0.0
        first, second = self._mean_seconds(1), self._mean_seconds(1)
        slow = min(first, second) > budget
        self.times = [first, second] if slow else []
        self.patience = 0.0 if slow else _PATIENCE * budget
        self.loops = max(1, math.ceil(_REPETITION_SECONDS / max(min(first, second), 1e-9)))

    def repeat(self) -> None:
        """Makes one repetition, if time is left."""
        if not self.times or self.spent < self.patience:
            self.times.append(self._mean_seconds(self.loops))
            self.spent += self.loops * self.times[-1]

    def _mean_seconds(self, loops: int) -> float:
        call, result = self.call, None
        start = time.perf_counter()
        for _ in range(loops):
            result = call()
        seconds = time.perf_counter() - start
        self.result = result
        return seconds / loops
