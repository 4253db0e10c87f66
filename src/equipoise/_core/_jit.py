# SPDX-License-Identifier: Apache-2.0
"""How kernels are compiled: at first use, cached on disk, without the interpreter lock."""

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import IndexDataCacheFile

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
    """Compiles loops that look for maxima, where order cannot matter, or form sums that need not be exact."""
    return _compile(function, fastmath=_FASTMATH)


def _compile(function: F, **options: Any) -> F:
    # Unwrapped, because a run-time type checker (the tests use one) wraps what it checks; Numba compiles no wrapper.
    compiled = numba.njit(nogil=True, error_model="numpy", **options)(inspect.unwrap(function))
    # Without a folder to write to, neither beside the source nor in the user's cache, every process compiles anew.
    with contextlib.suppress(RuntimeError):
        compiled.enable_caching()
        _name_after_sources(compiled, Path(inspect.getfile(inspect.unwrap(function))).parent)
    return cast(F, compiled)


def _name_after_sources(compiled: Any, folder: Path) -> None:
    # Numba drops a cached kernel when the file it stands in changes, but not when a kernel that it calls does, and
    # fails on a cached type whose module is gone. Cache files named after all the sources of the folder that holds the
    # kernel are neither stale nor broken; outside of it kernels call only what is in `_vector.py`.
    cache = compiled._cache
    cache._cache_file = IndexDataCacheFile(
        cache_path=cache.cache_path,
        filename_base=f"{cache._impl.filename_base}.{_fingerprint(folder)}",
        source_stamp=None,
    )


@functools.cache
def _fingerprint(folder: Path) -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(Path(__file__).with_name("_vector.py").read_bytes())
    for source in sorted(folder.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]
