# SPDX-License-Identifier: Apache-2.0
"""Every public name resolves and says what it is."""

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
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


# The laboratory is run, not imported.
LIBRARY = [p for p in public_packages() if not p.startswith("equipoise_lab")]


@pytest.mark.parametrize("package", LIBRARY)
def test_all_lists_what_is_public(package: str) -> None:
    module = importlib.import_module(package)
    public = {name for name, x in vars(module).items() if not name.startswith("_") and not inspect.ismodule(x)}
    if package == "equipoise":  # whose layers are imported late
        public = public - {"ModuleType", "TYPE_CHECKING"} | {"audit", "distributed", "nn", "__version__"}
    assert set(module.__all__) == public
    assert len(module.__all__) == len(public)


def test_dir_shows_the_interface_and_nothing_else() -> None:
    assert dir(eq) == sorted(eq.__all__)
    assert {"assign", "nn", "__version__"} <= set(dir(eq))
    assert {"importlib", "ModuleType", "TYPE_CHECKING"}.isdisjoint(dir(eq))


FRESH = """
import sys, equipoise, pydoc
dir(equipoise)
print("equipoise.nn" in sys.modules, equipoise.nn.__name__)
print(pydoc.render_doc(equipoise))
"""


def test_help_shows_the_interface_and_layers_are_imported_when_asked_for(fresh_python: Callable[..., str]) -> None:
    layers, text = fresh_python(FRESH).split("\n", 1)
    assert layers == "False equipoise.nn"
    assert "sample_gumbel_matching(" in text
    assert "ModuleType" not in text
    assert "TYPE_CHECKING" not in text


@pytest.mark.parametrize("name", ["assign", "Assignment", "conditional_values"])
def test_name_that_users_rely_on_is_exported(name: str) -> None:
    assert getattr(eq, name).__name__ == name


def test_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("equipoise") == eq.__version__
