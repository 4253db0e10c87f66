# SPDX-License-Identifier: Apache-2.0
"""What `import equipoise` costs: nothing that a training loop does not need. What the library needs: no extra."""

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import equipoise

HEAVY = (
    "matplotlib",
    "typer",
    "ot",
    "ortools",
    "scipy",
    "numba",
    "hypothesis",
    "beartype",
    "jinja2",
    "rich",
    "sklearn",
)

SCRIPT = """
import json, sys
import torch
before = set(sys.modules)
import equipoise
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""

# The extras, and what only tests need.
EXTRAS = (
    "matplotlib",
    "typer",
    "click",
    "rich",
    "jinja2",
    "sklearn",
    "scipy",
    "ot",
    "ortools",
    "transformers",
    "pandas",
)
TOOLS = ("hypothesis", "pytest", "beartype")

BLOCKED = """
import sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # importing it now raises ImportError
import importlib, pkgutil
import torch
import equipoise as eq
for module in pkgutil.walk_packages(eq.__path__, "equipoise."):
    if "integrations" not in module.name and "__main__" not in module.name:
        importlib.import_module(module.name)
assert eq.assign(torch.tensor([[1.0, 0.0], [2.0, 0.0]])).z.tolist() == [1, 0]
assert eq.nn.MoE(4, 2)(torch.ones(3, 4)).shape == (3, 4)
assert eq.audit.audit("sample", eq.audit.Conditions(n=2, draws=100)).draws == 100
print(*sorted({name.partition(".")[0] for name in sys.modules if "equipoise" in name}))
"""

COMMAND = """
import sys
blocked, arguments = sys.argv[1].split(), sys.argv[2:]
sys.modules.update(dict.fromkeys(blocked))
from equipoise.__main__ import main
try:
    main(arguments)
except SystemExit as ended:
    print("exit", ended.code)
"""


def test_import_loads_nothing_heavy(fresh_python: Callable[..., str]) -> None:
    assert set(json.loads(fresh_python(SCRIPT))) & set(HEAVY) == set()


def test_library_works_without_extras_and_without_the_laboratory(fresh_python: Callable[..., str]) -> None:
    assert fresh_python(BLOCKED, *EXTRAS, *TOOLS).split() == ["equipoise"]


@pytest.mark.parametrize("blocked", ["typer", "rich", " ".join(EXTRAS)])
def test_command_says_how_to_install_what_it_needs(fresh_python: Callable[..., str], blocked: str) -> None:
    script = "import contextlib, sys; sys.stderr = sys.stdout\n" + COMMAND
    line, ended = fresh_python(script, blocked, "bench", "assign").splitlines()
    assert line.startswith("equipoise: error: the command needs ")
    assert line.endswith(": pip install 'equipoise[lab]'")
    assert ended == "exit 2"


def test_what_a_command_imports_late_is_named_too(fresh_python: Callable[..., str], tmp_path: Path) -> None:
    script = "import sys; sys.stderr = sys.stdout\n" + COMMAND
    out = fresh_python(script, "matplotlib", "audit", "--out", str(tmp_path / "out"))
    assert out.splitlines()[-2:] == [
        "equipoise: error: the command needs matplotlib: pip install 'equipoise[lab]'",
        "exit 2",
    ]


def test_version_needs_no_extra(fresh_python: Callable[..., str]) -> None:
    assert fresh_python(COMMAND, " ".join(EXTRAS), "--version") == f"equipoise {equipoise.__version__}\nexit 0\n"


def test_a_module_that_is_missing_for_another_reason_is_an_error(fresh_python: Callable[..., str]) -> None:
    script = COMMAND.replace("except SystemExit as ended", "except ModuleNotFoundError as ended").replace(
        ".code", ".name"
    )
    assert fresh_python(script, "equipoise_lab.cli", "--version") == "exit equipoise_lab.cli\n"


def test_tests_of_the_library_do_not_import_the_laboratory() -> None:
    folder = Path(__file__).parents[1]
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        if folder / "lab" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "equipoise_lab" for name in names):
                found.add(str(path.relative_to(folder)))
    assert found == set()
