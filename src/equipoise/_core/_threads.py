# SPDX-License-Identifier: Apache-2.0
"""Threads for kernels that release the interpreter lock.

A pool of our own, because Numba's thread layers either fail after a fork or must not be entered from several Python
threads at once. `torch.set_num_threads` says how many; results never depend on it, because work is cut into the same
blocks for any number of threads and sums are added up in the order of the blocks.
"""

import os
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def _forget_pool() -> None:
    # A forked child inherits the pool object but none of its threads, and perhaps a lock that nobody will release.
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)


def _get_pool() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="equipoise")
        return _pool


def run_blocks(work: Callable[[int, int], T], blocks: Sequence[tuple[int, int]]) -> list[T]:
    """Calls `work(start, stop)` for every block, on as many threads as torch uses, and returns results in order."""
    threads = min(torch.get_num_threads(), len(blocks))
    if threads <= 1:
        return [work(start, stop) for start, stop in blocks]
    shares = [blocks[t * len(blocks) // threads : (t + 1) * len(blocks) // threads] for t in range(threads)]
    futures = [_get_pool().submit(_run_share, work, share) for share in shares[1:]]
    results = _run_share(work, shares[0])  # the caller's own thread works too
    for future in futures:
        results.extend(future.result())
    return results


def _run_share(work: Callable[[int, int], T], share: Sequence[tuple[int, int]]) -> list[T]:
    return [work(start, stop) for start, stop in share]


def cut(size: int, block: int) -> list[tuple[int, int]]:
    """Cuts range(size) into blocks of a fixed size, whatever the number of threads."""
    return [(start, min(start + block, size)) for start in range(0, size, block)]


@contextmanager
def num_threads(threads: int) -> Generator[None]:
    """Sets the threads that torch, and with it equipoise, may use; restores them afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
