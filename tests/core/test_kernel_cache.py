# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels are found again: in a folder that may only be read, too."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import equipoise
from equipoise._core import _jit, _kernel_cache
from equipoise._core._kernel_cache import cache_folders

Load = Callable[[], Any]


def hits_and_misses(kernel: Any) -> tuple[int, int]:
    return sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values())


def forbid(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    """Makes folders unwritable that have one of these in their path."""
    can_write = _kernel_cache._can_write.__wrapped__
    monkeypatch.setattr(
        _kernel_cache, "_can_write", lambda folder: not set(parts) & set(folder.parts) and can_write(folder)
    )
    monkeypatch.setattr(_kernel_cache._can_write, "cache_clear", lambda: None, raising=False)


def test_kept_beside_the_source(load_kernel: Load, tmp_path: Path) -> None:
    first = load_kernel()
    assert first.add_two(1) == 3
    assert hits_and_misses(first.add_two) == (0, 1)
    assert first.add_two.stats.cache_path == str(tmp_path / "package" / "__pycache__")
    again = load_kernel()
    assert again.add_two(1) == 3
    assert hits_and_misses(again.add_two) == (1, 0)


def test_read_where_it_cannot_be_written(load_kernel: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernel().add_two(1)
    forbid(monkeypatch, "package", "user")
    again = load_kernel()
    assert again.add_two(1) == 3
    assert hits_and_misses(again.add_two) == (1, 0)
    assert again.add_two.stats.cache_path is None
    assert again.add_two(1.5) == 3.5  # compiled, and not kept
    assert hits_and_misses(load_kernel().add_two) == (0, 0)


def test_new_versions_go_to_the_users_cache(load_kernel: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernel().add_two(1)
    forbid(monkeypatch, "package")
    second = load_kernel()
    assert (second.add_two(1), second.add_two(1.5)) == (3, 3.5)
    assert hits_and_misses(second.add_two) == (1, 1)
    third = load_kernel()
    assert (third.add_two(1), third.add_two(1.5)) == (3, 3.5)
    assert hits_and_misses(third.add_two) == (2, 0)
    assert list((tmp_path / "user").rglob("*.nbi"))


def test_a_changed_source_is_compiled_anew(load_kernel: Load) -> None:
    first = load_kernel()
    assert first.add_two(1) == 3
    source = Path(first.__file__)
    source.write_text(source.read_text().replace("return x + 1", "return x + 2"))
    for file in (source.parent / "__pycache__").glob("*.pyc"):  # or Python might not notice, within the same second
        file.unlink()
    _jit._fingerprint.cache_clear()
    again = load_kernel()
    assert again.add_two(1) == 5
    assert hits_and_misses(again.add_two) == (0, 1)


def test_the_folder_that_the_environment_names_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernel_cache.config, "CACHE_DIR", str(tmp_path / "named"))
    folders, writable = cache_folders(tmp_path / "package" / "kernel.py")
    assert writable
    assert [folder.parent for folder in folders] == [tmp_path / "named"]


def test_a_named_folder_that_cannot_be_written_is_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named").write_text("not a folder")
    monkeypatch.setattr(_kernel_cache.config, "CACHE_DIR", str(tmp_path / "named"))
    folders, writable = cache_folders(tmp_path / "package" / "kernel.py")
    assert writable
    assert [folder.parent for folder in folders] == [tmp_path / "named", tmp_path / "package"]


def test_a_full_disk_does_not_stop_a_call(load_kernel: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_kernel_cache.IndexDataCacheFile, "save", fail)
    assert load_kernel().add_two(1) == 3


# The interpreter itself need not be readable by another user: what it needs is imported before.
AS_ANOTHER_USER = """
import os, sys
import numba
import equipoise._core._jit
numba.njit(lambda x: x + 1)(1)
if sys.argv[1] == "nobody":
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
import kernel
print(kernel.add_two(1), sum(kernel.add_two.stats.cache_hits.values()), kernel.add_two.stats.cache_path is not None)
"""


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user can read; those of pytest are for their owner."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can become another user")
def test_built_as_root_and_run_as_nobody(public_folder: Path, kernel_source: str) -> None:
    (public_folder / "kernel.py").write_text(kernel_source)
    library = str(Path(equipoise.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(public_folder), library]), "NUMBA_CACHE_DIR": ""}
    environment.pop("XDG_CACHE_HOME", None)

    def run(user: str, home: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", AS_ANOTHER_USER, user],
            capture_output=True,
            text=True,
            env={**environment, "HOME": home},
            cwd=public_folder,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("root", str(public_folder)).split() == ["3", "0", "True"]
    assert run("nobody", "/nonexistent").split() == ["3", "1", "False"]
