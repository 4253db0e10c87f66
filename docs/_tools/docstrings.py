# SPDX-License-Identifier: Apache-2.0
"""What the API pages do to docstrings: formulas are drawn, and names of the library become links."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))

import mathml

PACKAGES = (
    "equipoise",
    "equipoise.assignment",
    "equipoise.balancing",
    "equipoise.sampling",
    "equipoise.estimators",
    "equipoise.nn",
    "equipoise.audit",
    "equipoise.distributed",
    "equipoise.integrations.transformers",
    "equipoise.reference",
)
"""The packages whose names the API pages document."""
_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
_POWER = re.compile(r"(?<=\w)\*\*(?=\w)")
_RESULT = re.compile(r"^( *(?:Returns|Yields):\n)((?: +.*\n?)+)", re.MULTILINE)
_TABLE = re.compile(r"^ *=+(?: +=+)+\n(?:.*\n)*?(?: *=+(?: +=+)+\n(?:.+\n)+)? *=+(?: +=+)+\n", re.MULTILINE)
_NAME = re.compile(r"(?<!`)`([A-Za-z_][A-Za-z_.]*)`(?!`)")


def targets() -> dict[str, str]:
    """Returns where each public name is documented; the first package that exports it has it."""
    where: dict[str, str] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            if not (name.startswith("_") or isinstance(getattr(module, name), ModuleType)):
                where.setdefault(name, f"{package}.{name}")
    return where


def with_tables(text: str) -> str:
    """Turns tables that are ruled with `=` into those of Markdown."""
    return _TABLE.sub(lambda found: _table(found[0]), text)


def _table(block: str) -> str:
    """Converts one table; a line whose first column is empty continues the one before."""
    lines = block.rstrip("\n").splitlines()
    starts = [match.start() for match in re.finditer("=+", lines[0])]
    cells = [
        [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        for line in lines
        if set(line.strip()) - set("= ")
    ]
    rows: list[list[str]] = []
    for row in cells:
        if row[0] and not (rows and rows[-1][0].endswith(",")):
            rows.append(row)
        else:
            rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], row, strict=True)]
    headed = len([line for line in lines if not set(line.strip()) - set("= ")]) == 3
    head = rows.pop(0) if headed else [""] * len(starts)
    indent = " " * starts[0]
    table = [head, ["---"] * len(starts), *rows]
    return "\n".join(indent + "| " + " | ".join(row) + " |" for row in table) + "\n"


class Docstrings(griffe.Extension):
    """Rewrites each docstring once, when its object has been read."""

    def __init__(self) -> None:
        """Collects the names that links lead to."""
        super().__init__()
        self._targets = targets()

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            # Google's name for the section, which is where doctests are drawn as code.
            text = _EXAMPLE.sub(r"\1Examples:", mathml.in_docstring(with_tables(obj.docstring.value)))
            prose, section, examples = text.partition("Examples:\n")
            # A colon in the text of a result would end its type, which is in the signature.
            prose = _RESULT.sub(lambda found: found[1] + found[2].replace(":", "&#58;"), prose)
            obj.docstring.value = _NAME.sub(self._link, _POWER.sub(r"\\*\\*", prose)) + section + examples

    def _link(self, found: re.Match[str]) -> str:
        """Returns a link to a public name, anything else as it is."""
        path = self._targets.get(found[1].removeprefix("equipoise.").removeprefix("eq."))
        return found[0] if path is None else f"[`{found[1]}`][{path}]"
