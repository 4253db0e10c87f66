# SPDX-License-Identifier: Apache-2.0
"""How kernels are compiled: at first use, cached on disk, without the interpreter lock."""

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from equipoise._core._kernel_cache import KernelCache
from equipoise._core._notice import compiling

F = TypeVar("F", bound=Callable[..., Any])

# What lets LLVM turn loops with `max` and sums into vector instructions. Scores hold no NaN where these kernels look
# (the first pass over the matrix refuses it), and -inf stays legal: `ninf` is not among the flags.
_FASTMATH = {"nnan", "nsz", "contract", "reassoc"}


def jit(function: F) -> F:
    """Compiles exact arithmetic: every operation as written."""
    return _compile(function, fastmath=False)


def jit_inline(function: F) -> F:
    """Compiles a function of a few lines into its callers: passing its arguments would cost more than its work."""
    return _compile(function, fastmath=False, inline="always")


def jit_vector(function: F) -> F:
    """Compiles loops that look for maxima, where order cannot matter, or form sums that need not be exact.

    A loop that sums may not store as well. LLVM would compile it twice, with vectors and without, and choose between
    the two by where the arrays lie in memory: the same call would round in one way or the other.
    """
    return _compile(function, fastmath=_FASTMATH)


def _compile(function: F, **options: Any) -> F:
    # Unwrapped, because a run-time type checker (the tests use one) wraps what it checks; Numba compiles no wrapper.
    plain = inspect.unwrap(function)
    options |= {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}  # nothing calls kernels from C
    compiled: Any = numba.njit(**options)(plain)
    # Numba drops a cached kernel when the file it stands in changes, but not when a kernel that it calls does, and
    # fails on a cached type whose module is gone. So files are named after all the sources of the folder that holds the
    # kernel; outside of it kernels call only what is in `_vector.py`, `_elementary.py` and `_threshold.py`.
    cache = KernelCache(plain, _fingerprint(Path(inspect.getfile(plain)).parent))
    compiled._cache = cache
    compiled._compiler.compile = _announced(compiled._compiler.compile, cache)
    return cast(F, compiled)


def _announced(compile_version: Callable[..., Any], cache: KernelCache) -> Callable[..., Any]:
    def compile_and_say_so(*signature: Any) -> Any:
        with compiling(cache.cache_path):
            return compile_version(*signature)

    return compile_and_say_so


@functools.cache
def _fingerprint(folder: Path) -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for shared in ("_vector.py", "_elementary.py", "_threshold.py"):
        digest.update(Path(__file__).with_name(shared).read_bytes())
    for source in sorted(folder.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]
