# SPDX-License-Identifier: Apache-2.0
"""What `import equipoise` costs: nothing that a training loop does not need. What the library needs: no extra."""

import ast
import json
import subprocess
import sys
import tomllib
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

# One process for all: each case finds the laboratory not imported yet, and some modules missing.
COMMANDS = """
import contextlib, io, json, sys
from equipoise.__main__ import main

def run(blocked, arguments):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("equipoise_lab", *blocked)]:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(blocked))
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(arguments)
    except (SystemExit, ModuleNotFoundError) as ended:
        how = ended.code if isinstance(ended, SystemExit) else ended.name
    for name in blocked:
        del sys.modules[name]
    return out.getvalue(), err.getvalue(), how

print(json.dumps({name: run(*case) for name, case in json.loads(sys.argv[1]).items()}))
"""
CASES = {
    "typer": (["typer"], ["bench", "assign"]),
    "rich": (["rich"], ["bench", "assign"]),
    "extras": (EXTRAS, ["bench", "assign"]),
    "version": (EXTRAS, ["--version"]),
    "another reason": (["equipoise_lab.cli"], ["--version"]),
    "late": (["matplotlib"], ["audit", "--out"]),
}
Ended = dict[str, tuple[str, str, int | str]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """What each command wrote to its two streams, and how it ended."""
    blocked, arguments = CASES["late"]
    cases = {**CASES, "late": (blocked, [*arguments, str(tmp_path_factory.mktemp("audit") / "out")])}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(cases)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name: tuple(parts) for name, parts in json.loads(done.stdout).items()}


def test_import_loads_nothing_heavy(fresh_python: Callable[..., str]) -> None:
    assert set(json.loads(fresh_python(SCRIPT))) & set(HEAVY) == set()


def test_library_works_without_extras_and_without_the_laboratory(fresh_python: Callable[..., str]) -> None:
    assert fresh_python(BLOCKED, *EXTRAS, *TOOLS).split() == ["equipoise"]


@pytest.mark.parametrize("blocked", ["typer", "rich", "extras"])
def test_command_says_how_to_install_what_it_needs(ended: Ended, blocked: str) -> None:
    out, err, code = ended[blocked]
    (line,) = err.splitlines()
    assert line.startswith("equipoise: error: the command needs ")
    assert line.endswith(": pip install 'equipoise[lab]'")
    assert (out, code) == ("", 2)


def test_what_a_command_imports_late_is_named_too(ended: Ended) -> None:
    _, err, code = ended["late"]
    assert err.splitlines()[-1] == "equipoise: error: the command needs matplotlib: pip install 'equipoise[lab]'"
    assert code == 2


def test_command_starts_in_the_library_which_is_there_without_the_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"equipoise": "equipoise.__main__:main"}
    required = {name.partition(">")[0] for name in project["dependencies"]}
    assert required == {"torch", "numpy", "numba", "jaxtyping"}


def test_version_needs_no_extra(ended: Ended) -> None:
    assert ended["version"] == (f"equipoise {equipoise.__version__}\n", "", 0)


def test_a_module_that_is_missing_for_another_reason_is_an_error(ended: Ended) -> None:
    assert ended["another reason"] == ("", "", "equipoise_lab.cli")


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
