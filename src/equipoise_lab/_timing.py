# SPDX-License-Identifier: Apache-2.0
"""Timing of one call: the best of several repetitions, each the mean over enough calls to outlast jitter."""

import gc
import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from equipoise._core import num_threads as num_threads

# A repetition of a fast call lasts at least this long, as in the standard library's timeit.
_REPETITION_SECONDS = 0.02
# A slow call is repeated until this many budgets are spent.
_PATIENCE = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The best time of a call and what the call returned."""

    seconds: float  # time of one call, in the best repetition
    repeats: int  # repetitions measured; fewer than asked for when a single call outlasts the budget
    result: Any  # what the last call returned


def best_of(call: Callable[[], Any], repeats: int, *, budget: float) -> Timing:
    """Times a call as the minimum over repetitions.

    Two calls come first: one may have something to compile or load, the other says how many make a repetition. Only if
    both took longer than `budget` seconds do they count, and then there are no further ones.

    Args:
        call: what to time.
        repeats: repetitions, each the mean over as many calls as fit into 20 ms (at least one).
        budget: seconds that a call may take to be repeated.

    Returns:
        The best time, with the number of repetitions behind it.

    Example:
        >>> best_of(lambda: 3, repeats=2, budget=1.0).result
        3
    """
    return best_in_turns({"call": call}, repeats, budget=budget)["call"]


def best_in_turns(calls: dict[str, Callable[[], Any]], repeats: int, *, budget: float) -> dict[str, Timing]:
    """Times calls that are to be compared: as `best_of`, but they take turns, so that drift of the machine meets all.

    Args:
        calls: what to time, by name.
        repeats: rounds; in each, every call is repeated for at least 20 ms.
        budget: seconds that a call may take to be in every round.

    Returns:
        The best time of each.

    Example:
        >>> [timing.result for timing in best_in_turns({"a": lambda: 1, "b": lambda: 2}, 1, budget=1.0).values()]
        [1, 2]
    """
    with _no_collection():
        runs = {name: _Run(call, budget) for name, call in calls.items()}
        for _ in range(repeats):
            for run in runs.values():
                run.repeat()
    return {name: Timing(seconds=run.best, repeats=run.done, result=run.result) for name, run in runs.items()}


class _Run:
    """One call on its way to a best time."""

    def __init__(self, call: Callable[[], Any], budget: float) -> None:
        self.call, self.patience = call, _PATIENCE * budget
        self.best, self.done, self.spent = math.inf, 0, 0.0
        (first, _), (second, self.result) = _mean_seconds(call, 1), _mean_seconds(call, 1)
        expected = min(first, second)
        if expected > budget:
            self.best, self.done, self.patience = expected, 2, 0.0
        self.loops = max(1, math.ceil(_REPETITION_SECONDS / max(expected, 1e-9)))

    def repeat(self) -> None:
        """Makes one repetition, if time is left."""
        if self.done and self.spent >= self.patience:
            return
        seconds, self.result = _mean_seconds(self.call, self.loops)
        self.best, self.done, self.spent = min(self.best, seconds), self.done + 1, self.spent + self.loops * seconds


def best_of_each(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The best time of each of several calls in turns, in seconds, however long that takes; see `best_in_turns`.

    Example:
        >>> sorted(best_of_each({"a": lambda: 1, "b": lambda: 2}, repeats=1))
        ['a', 'b']
    """
    return {name: timing.seconds for name, timing in best_in_turns(calls, repeats, budget=math.inf).items()}


def times_of_each(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """The time of every call in every round, in seconds, where more than the best of them is wanted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    with _no_collection():
        first = {name: _mean_seconds(call, 1)[0] for name, call in calls.items()}
        for _ in range(repeats):
            for name, call in calls.items():
                loops = max(1, math.ceil(_REPETITION_SECONDS / max(first[name], 1e-9)))
                times[name].append(_mean_seconds(call, loops)[0])
    return times


def _mean_seconds(call: Callable[[], Any], loops: int) -> tuple[float, Any]:
    result = None
    start = time.perf_counter()
    for _ in range(loops):
        result = call()
    return (time.perf_counter() - start) / loops, result


@contextmanager
def _no_collection() -> Generator[None]:
    """Keeps the garbage collector, whose pauses belong to no call, out of the way."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
