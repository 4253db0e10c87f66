# SPDX-License-Identifier: Apache-2.0
"""What a command has done so far, kept on disk so that it can go on after an interruption.

A command saves each part of its work as soon as it is done: one JSON file a part, written beside its place and then
renamed, so that an interruption leaves a whole part or none. A part says what it depends on (its recipe) and carries a
checksum. What cannot be read back is named, and computed again.
"""

import errno
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

try:
    import fcntl
except ImportError:  # Windows has no fcntl; there, two commands in one folder are not noticed
    fcntl = None

T = TypeVar("T")
_log = logging.getLogger(__name__)
_LOCK = ".lock"
# What flock raises where another process has the lock, and where the file system knows no locks.
_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class Ledger:
    """A folder of parts.

    Args:
        folder: where the parts are; made when the first one is saved.
        strict: whether parts of another recipe are refused; otherwise they are computed again.
    """

    def __init__(self, folder: Path, *, strict: bool = False) -> None:
        """Reads nothing yet."""
        self.folder, self._strict, self._others_said = folder, strict, False

    def path(self, name: str) -> Path:
        """The file of a part; what a file's name should not have becomes "_"."""
        return self.folder / f"{re.sub(r'[^A-Za-z0-9.=-]+', '_', name)}.json"

    def save(self, name: str, recipe: Mapping[str, Any], content: Any) -> None:
        """Saves what a part depends on and what it holds, as JSON knows them; floats come back as the same numbers."""
        part = {**_header(name, recipe), "sha256": _checksum(content), "content": content}
        write_whole(self.path(name), json.dumps(part))

    def load(self, name: str, recipe: Mapping[str, Any], read: Callable[[Any], T]) -> T | None:
        """Reads a part back that depends on a recipe; `read` makes of the content what the caller wants.

        Returns:
            The part; None where there is none, and where the file cannot be used, which is said in the log.
        """
        path = self.path(name)
        if not path.exists():
            return None
        try:
            part = json.loads(path.read_text(encoding="utf-8"))
            if part["part"] != name or part["sha256"] != _checksum(part["content"]):
                raise ValueError("saved under another name, or changed since")
            wanted = json.loads(json.dumps(_header(name, recipe)))
            if (part["version"], part["recipe"]) == (wanted["version"], wanted["recipe"]):
                return read(part["content"])
            changed = _differences(part, wanted)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            _log.warning("equipoise: %s is damaged, or no part of this command; it will be computed again", path)
            return None
        if self._strict:
            raise ValueError(
                f"--resume needs the options of the run in {self.folder}, got others ({changed}): "
                "repeat them, or start anew without --resume"
            )
        if not self._others_said:  # one line for all of them
            self._others_said = True
            _log.warning(
                "equipoise: %s holds parts of another recipe (%s); they will be computed again", self.folder, changed
            )
        return None

    def clear(self) -> None:
        """Removes all parts."""
        for path in self.folder.glob("*.json"):
            path.unlink()


def _header(name: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {"part": name, "version": version("equipoise"), "recipe": recipe}


def _differences(part: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """What changed between two headers, in words: "seed 0, now 1"."""
    old, new = ({"version": x["version"], **_flat(x["recipe"])} for x in (part, wanted))
    changed = sorted(name for name in {**old, **new} if old.get(name) != new.get(name))
    return ", ".join(f"{name} {_short(old.get(name))}, now {_short(new.get(name))}" for name in changed)


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a recipe, those in groups too."""
    found: dict[str, Any] = {}
    for name, value in recipe.items():
        found.update(_flat(value) if isinstance(value, Mapping) else {name: value})
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader, or an interruption, never meets half of it: a temporary one, then a rename.

    The folder is made if it is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def begin(last: Path, ledgers: Iterable[Ledger], *, keep: bool = False) -> None:
    """Forgets the parts of a command that ended; those of one that was interrupted stay, and with `keep` all.

    `last` is the file that the command writes at its very end. It is removed.
    """
    if last.exists() and not keep:
        for ledger in ledgers:
            ledger.clear()
    last.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Keeps other commands out of a folder, which is made if it is missing; a ValueError says which process has it.

    The system releases the lock when the process ends, however it ends: a file that a killed process left is taken
    over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    handle = _take(path)
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _take(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                holder = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
                os.close(handle)
                raise ValueError(
                    f"out must be a folder that no other command writes to, got {path.parent}, which process {holder} "
                    "is using: wait until it ends, or give another --out"
                ) from error
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
            _log.warning("equipoise: %s cannot be locked; start no second command in it", path.parent)
        # The one who had it may have removed the file after it was opened here.
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            return handle
        os.close(handle)
