# SPDX-License-Identifier: Apache-2.0
"""One line for whoever waits while kernels are compiled.

It is a warning of the logger "equipoise". Python shows warnings on the error stream where logging was not set up;
`logging.getLogger("equipoise").setLevel("ERROR")` silences it.
"""

import contextlib
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Generator

# Seconds of compiling in one process, over all kernels, before it is worth a line.
PATIENCE = 2.0
_KEPT = "This happens once: later processes load them from {folder}."
_NOT_KEPT = "No folder can be written to keep them, so every process does this: set NUMBA_CACHE_DIR to one that can."

_spent = 0.0
_said = False


@contextlib.contextmanager
def compiling(folder: str | None) -> Generator[None]:
    """Wraps the compilation of a kernel, which Numba does for one at a time.

    Args:
        folder: where the result will be kept; None if nowhere.
    """
    global _spent
    if _said or in_worker():
        yield
        return
    timer = threading.Timer(max(0.0, PATIENCE - _spent), _say, [folder])
    timer.daemon = True
    start = time.monotonic()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _spent += time.monotonic() - start


def in_worker() -> bool:
    """Whether another process speaks for this one: the parent of a data loader's worker, or rank 0."""
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    return rank != "0" or multiprocessing.parent_process() is not None


def _say(folder: str | None) -> None:
    global _said
    if not _said:
        _said = True
        outlook = _NOT_KEPT if folder is None else _KEPT.format(folder=folder)
        logging.getLogger("equipoise").warning("equipoise: compiling kernels, about 20 seconds. %s", outlook)
