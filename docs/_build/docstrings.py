# SPDX-License-Identifier: Apache-2.0
"""What the API pages do to docstrings: formulas are drawn, and names of the library become links."""

import importlib
import re
import sys
from pathlib import Path
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
)
_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
_POWER = re.compile(r"(?<=\w)\*\*(?=\w)")
_RESULT = re.compile(r"^( *(?:Returns|Yields):\n)((?: +.*\n?)+)", re.MULTILINE)
_NAME = re.compile(r"(?<!`)`([A-Za-z_][A-Za-z_.]*)`(?!`)")


def targets() -> dict[str, str]:
    """Returns where each public name is documented; the first package that exports it has it."""
    where: dict[str, str] = {}
    for package in PACKAGES:
        for name in getattr(importlib.import_module(package), "__all__", ()):
            where.setdefault(name, f"{package}.{name}")
    return {name: path for name, path in where.items() if not name.startswith("_")}


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
            text = _EXAMPLE.sub(r"\1Examples:", mathml.in_docstring(obj.docstring.value))
            prose, section, examples = text.partition("Examples:\n")
            # A colon in the text of a result would end its type, which is in the signature.
            prose = _RESULT.sub(lambda found: found[1] + found[2].replace(":", "&#58;"), prose)
            obj.docstring.value = _NAME.sub(self._link, _POWER.sub(r"\\*\\*", prose)) + section + examples

    def _link(self, found: re.Match[str]) -> str:
        """Returns a link to a public name, anything else as it is."""
        path = self._targets.get(found[1].removeprefix("equipoise.").removeprefix("eq."))
        return found[0] if path is None else f"[`{found[1]}`][{path}]"
