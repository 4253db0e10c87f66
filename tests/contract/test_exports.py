# SPDX-License-Identifier: Apache-2.0
"""Every public name resolves and says what it is."""

import importlib
import importlib.metadata
import inspect
from pathlib import Path

import pytest

import equipoise as eq

SOURCES = Path(eq.__file__).parents[1]


def public_packages() -> list[str]:
    """Every package of ours that has an __init__ and no private part in its name; found without importing any."""
    inits = (path for name in ("equipoise", "equipoise_lab") for path in (SOURCES / name).rglob("__init__.py"))
    folders = sorted(path.parent.relative_to(SOURCES) for path in inits)
    return [".".join(folder.parts) for folder in folders if not any(part.startswith("_") for part in folder.parts)]


def undocumented(name: str, value: object) -> bool:
    # Data (tables, aliases) is explained where it is defined.
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return False
    text = (value.__doc__ or "").strip()
    # The docstring that a dataclass makes up for itself repeats the signature.
    return not text or text.startswith(f"{name}(")


@pytest.mark.parametrize("package", public_packages())
def test_package_and_its_names_are_documented(package: str) -> None:
    module = importlib.import_module(package)
    assert (module.__doc__ or "").strip(), f"{package} does not say what it is"
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    assert [name for name, value in public.items() if undocumented(name, value)] == []


@pytest.mark.parametrize("name", ["assign", "Assignment", "conditional_values"])
def test_name_that_users_rely_on_is_exported(name: str) -> None:
    assert getattr(eq, name).__name__ == name


def test_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("equipoise") == eq.__version__
