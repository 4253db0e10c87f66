# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of a command on several processes, keeps what is done, and goes on where it was interrupted.

A part is one task of a process that uses one thread: tensors this small gain nothing from more.
"""

import ctypes
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from equipoise_lab._ledger import Ledger
from equipoise_lab._timing import num_threads

Progress = Callable[[int], object]
"""Called with a number of steps that are done."""

Task = tuple[Any, ...]
"""A function and its arguments; it takes a further one, `progress`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a command."""

    task: Task  # computes it
    steps: int = 0  # how many it reports while it is computed; counted at once where the part is found
    recipe: Mapping[str, Any]  # what it depends on, as JSON knows it
    write: Callable[[Any], Any]  # makes JSON of it
    read: Callable[[Any], Any]  # makes it of JSON


def run_parts(parts: Mapping[str, Part], ledger: Ledger, workers: int, advance: Progress) -> Iterator[tuple[str, Any]]:
    """Runs the parts that a ledger does not hold yet, and saves each as it ends.

    Args:
        parts: by name, in the order in which to start them.
        ledger: of the command.
        workers: processes; 0 stays in this one.
        advance: called with steps as they are done.

    Yields:
        Name and part: first those that were found, then the others as they end.
    """
    missing: dict[str, Task] = {}
    for name, part in parts.items():
        found = ledger.load(name, part.recipe, part.read)
        if found is None:
            missing[name] = part.task
        else:
            advance(part.steps)
            yield name, found
    for name, result in _run_tasks(missing, workers, advance):
        ledger.save(name, parts[name].recipe, parts[name].write(result))
        yield name, result


def _run_tasks(tasks: Mapping[str, Task], workers: int, advance: Progress) -> Iterator[tuple[str, Any]]:
    """Yields names and results as they end; `advance` gets what tasks hand to their argument `progress`."""
    processes = min(workers, len(tasks))
    if processes == 0:
        for name, (function, *arguments) in tasks.items():
            with num_threads(1):
                result = function(*arguments, progress=advance)
            yield name, result
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads in an unknown state
    steps = context.Queue()
    how: dict[str, Any] = {"mp_context": context, "initializer": _start_worker, "initargs": (steps,)}
    with ProcessPoolExecutor(processes, **how) as pool:
        waiting = {pool.submit(_call, *task): name for name, task in tasks.items()}
        try:
            while waiting:
                ended, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                with suppress(queue.Empty):
                    while True:
                        advance(steps.get_nowait())
                for future in ended:
                    yield waiting.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_steps: Any = None


def _start_worker(steps: Any) -> None:
    global _steps
    _steps = steps
    torch.set_num_threads(1)
    _keep_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _keep_memory() -> None:
    """Lets the C library keep what is freed, where it is glibc.

    A step allocates and frees some hundred tensors of about 300 kB. By default most of that goes back to the system, to
    be asked for, and cleared, again: a sixth of the time.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold = -1, -3  # names of parameters, from malloc.h
        mallopt(mmap_threshold, 32 << 20)
        mallopt(trim_threshold, 1 << 30)


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone: killed, it has no chance to end its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments, progress=_steps.put)


def ignore(steps: int) -> None:
    """The progress of a caller who wants none."""
    del steps
