# SPDX-License-Identifier: Apache-2.0
"""The pages say what is true: every public name is documented, code runs, tutorials show the scripts as they are."""

import importlib
import pkgutil
import re
import textwrap
from pathlib import Path
from types import ModuleType

import docstrings
import hooks
import pytest
import torch
import tutorials

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def blocks(page: Path) -> list[str]:
    """The code of a page that is meant to run: not what follows a comment `<!-- not run: why -->`."""
    found = re.finditer(
        r"(<!-- not run[^>]*-->\n+)?^ *```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL | re.M
    )
    return [textwrap.dedent(match[2]) for match in found if match[1] is None]  # tabs are indented


WITH_CODE = [page for page in sorted(DOCS.rglob("*.md")) if blocks(page) and page.parent.name != "tutorials"]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(DOCS)))
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}  # later blocks go on where earlier ones end
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for block in blocks(page):
            exec(compile(block, str(page.name), "exec"), names)


def test_reasons_stand_beside_code_that_does_not_run() -> None:
    notes = [note for page in DOCS.rglob("*.md") for note in re.findall(r"<!-- not run([^>]*)-->", page.read_text())]
    assert [note for note in notes if not re.match(r": \w+ \w+", note)] == []


@pytest.mark.parametrize("package", docstrings.PACKAGES)
def test_every_public_name_has_its_place(package: str) -> None:
    module = importlib.import_module(package)
    entries = {
        entry for page in (DOCS / "api").glob("*.md") for entry in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    }
    shown = {id(pkgutil.resolve_name(entry)) for entry in entries}  # one name may stand for two things
    names = {name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)} - {"__version__"}
    assert [name for name in sorted(names) if id(getattr(module, name)) not in shown] == []


def test_tutorials_show_their_scripts() -> None:
    stale = []
    for name in tutorials.tutorials():
        page = DOCS / "tutorials" / f"{name}.md"
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        script = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        expected = [part if prose else tutorials.shown(part) for prose, part in tutorials.parts(script)]
        stale += [name] if any(part not in text for part in expected) else []
    assert stale == [], "run `make tutorials`"


def test_figures_have_captions_and_pictures_in_a_line_have_none() -> None:
    figure = '<p><img alt="Rows of each expert" src="x.png" /></p>'
    assert hooks.on_page_content(figure) == f"<figure>{figure}<figcaption>Rows of each expert.</figcaption></figure>"
    inline = '<p>A badge <img alt="passing" src="x.png" /></p>'
    assert hooks.on_page_content(inline) == inline


def test_every_figure_says_what_it_shows() -> None:
    pages = [*DOCS.rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    captions = {page.name: re.findall(r"!\[([^\]]*)\]", page.read_text(encoding="utf-8")) for page in pages}
    assert {name: found for name, found in captions.items() if any(len(text.split()) < 4 for text in found)} == {}
