# SPDX-License-Identifier: Apache-2.0
"""Where a figure was measured."""

import os
import platform
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

_PACKAGES = ("equipoise", "torch", "numpy", "numba", "POT", "ortools", "scipy", "transformers")


def environment() -> dict[str, str | int | dict[str, str]]:
    """Describes machine and software: processor, cores, system, Python, versions, date. No names of hosts or users.

    Example:
        >>> sorted(environment())
        ['cores', 'date', 'processor', 'python', 'system', 'versions']
    """
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
