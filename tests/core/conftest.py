# SPDX-License-Identifier: Apache-2.0
"""What the tests of `_core` share: a kernel in a folder of its own."""

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equipoise._core import _kernel_cache

SOURCE = """from equipoise._core._jit import jit


@jit
def add_one(x):
    return x + 1


@jit
def add_two(x):
    return add_one(add_one(x))
"""


@pytest.fixture
def kernel_source() -> str:
    return SOURCE


@pytest.fixture
def load_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Loads the module anew, with kernels that no call has compiled yet; `__file__` says where it is."""
    monkeypatch.setattr(_kernel_cache.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (tmp_path / "package").mkdir()
    source = tmp_path / "package" / "kernel.py"
    source.write_text(SOURCE)
    numbers = itertools.count()

    def load() -> Any:
        _kernel_cache._can_write.cache_clear()
        spec = importlib.util.spec_from_file_location(f"kernel_{next(numbers)}", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
