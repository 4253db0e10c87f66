# SPDX-License-Identifier: Apache-2.0
"""Timing of one call: the best of several repetitions, each the mean over enough calls to outlast jitter."""

import gc
import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# A repetition of a fast call lasts at least this long, as in the standard library's timeit.
_REPETITION_SECONDS = 0.02
# A slow call is repeated until this many budgets are spent.
_PATIENCE = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The best time of a call and what the call returned.

    Attributes:
        seconds: time of one call, in the best repetition.
        repeats: repetitions measured; fewer than asked for when a single call outlasts the budget.
        result: what the last call returned.
    """

    seconds: float
    repeats: int
    result: Any


def best_of(call: Callable[[], Any], repeats: int, *, budget: float) -> Timing:
    """Times a call as the minimum over repetitions.

    The first call warms caches up. Only if it took longer than `budget` seconds does it count; then there is one more,
    in case the first had something to compile or load, and if that too is over budget, no further.

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
    with _no_collection():
        first, result = _mean_seconds(call, 1)
        if first > budget:
            second, result = _mean_seconds(call, 1)
            first = min(first, second)
        if first > budget:
            return Timing(seconds=first, repeats=2, result=result)
        loops = max(1, math.ceil(_REPETITION_SECONDS / max(first, 1e-9)))
        best, done, spent = math.inf, 0, 0.0
        while done < repeats and (done == 0 or spent < _PATIENCE * budget):
            seconds, result = _mean_seconds(call, loops)
            best, done, spent = min(best, seconds), done + 1, spent + loops * seconds
    return Timing(seconds=best, repeats=done, result=result)


def best_of_each(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Times calls that are to be compared closely: they take turns, so that drift of the machine meets all alike.

    Args:
        calls: what to time, by name.
        repeats: rounds; in each, every call is repeated for at least 20 ms.

    Returns:
        The best time of each, in seconds.

    Example:
        >>> sorted(best_of_each({"a": lambda: 1, "b": lambda: 2}, repeats=1))
        ['a', 'b']
    """
    return {name: min(seconds) for name, seconds in times_of_each(calls, repeats).items()}


def times_of_each(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """The time of every call in every round, in seconds; see `best_of_each`."""
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


@contextmanager
def num_threads(threads: int) -> Generator[None]:
    """Sets the threads that torch, and with it equipoise, may use; restores them afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
