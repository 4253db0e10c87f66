# SPDX-License-Identifier: Apache-2.0
"""Where compiled kernels are kept: in the first folder that can be written, and read from every one before it.

The folders, in this order: `NUMBA_CACHE_DIR` where that is set; `__pycache__` beside the source; the user's cache.
Numba itself uses only folders that it can write to. In an image that was built as root and runs as another user, it
would not read the kernels beside the source, and compile them in every process.
"""

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core import config
from numba.core.caching import FunctionCache, IndexDataCacheFile, UserProvidedCacheLocator
from numba.core.compiler import CompileResult
from numba.misc.appdirs import AppDirs


class KernelCache(FunctionCache):
    """The compiled versions of one kernel, in files named after all the sources that have a part in it.

    Args:
        function: the kernel.
        fingerprint: of those sources. Files of other sources have other names, so nothing read is out of date.
    """

    def __init__(self, function: Callable[..., Any], fingerprint: str) -> None:
        # Not Numba's own set-up, which fails where no folder can be written.
        self._name = repr(function)
        self._py_func = function
        code = function.__code__
        source = Path(code.co_filename)
        python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
        name = f"{source.stem}.{function.__qualname__}-{code.co_firstlineno}.{python}.{fingerprint}"
        folders, writable = cache_folders(source)
        self._files = [IndexDataCacheFile(cache_path=str(f), filename_base=name, source_stamp=None) for f in folders]
        self._cache_path = str(folders[-1]) if writable else None
        self.enable()

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        key = self._index_key(sig, target_context.codegen())
        for file in self._files:
            with contextlib.suppress(OSError):  # a folder that may not be read holds nothing for us
                data = file.load(key)
                if data is not None:
                    return CompileResult._rebuild(target_context, *data)  # pyright: ignore[reportPrivateUsage]
        return None

    def _save_overload(self, sig: Any, data: Any) -> None:
        if self._cache_path is not None and not data.library.has_dynamic_globals:
            key = self._index_key(sig, data.codegen)
            with contextlib.suppress(OSError):  # a full disk is no reason to fail: the kernel is there, only not kept
                self._files[-1].save(key, data._reduce())


def cache_folders(source: Path) -> tuple[list[Path], bool]:
    """The folders to read kernels of a source file from, and whether the last of them can be written."""
    elsewhere = UserProvidedCacheLocator.get_suitable_cache_subpath(str(source))
    folders = [source.parent / "__pycache__", Path(AppDirs("numba", appauthor=False).user_cache_dir) / elsewhere]
    named: str = vars(config)["CACHE_DIR"]
    if named:
        folders.insert(0, Path(named) / elsewhere)
    for last, folder in enumerate(folders):
        if _can_write(folder):
            return folders[: last + 1], True
    return folders, False


@functools.cache
def _can_write(folder: Path) -> bool:
    # Tried, because what the file's mode promises, a read-only file system does not keep.
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
