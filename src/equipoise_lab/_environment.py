# SPDX-License-Identifier: Apache-2.0
"""Where a figure was measured."""

import os
import platform
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
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
