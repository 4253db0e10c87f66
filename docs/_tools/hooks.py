# SPDX-License-Identifier: Apache-2.0
"""Hooks of the site's build: formulas, and the documents that live outside of docs/.

CHANGELOG.md, CONTRIBUTING.md and benchmarks/README.md stay where people look for them in a repository, and are pages of
the site too. Their relative links are rewritten; figures in benchmarks/ are copied.
"""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import mathml

ROOT = Path(__file__).parents[2]
PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "benchmarks/index.md": "benchmarks/README.md",
}
_NUMBER = re.compile(r"<td([^>]*)>([-+0-9.,%() ]{1,24}(?: to [-+0-9.,%() ]{1,12})?)</td>")
_CELL = re.compile(r"<td((?: style=[^>]*)?)>(.*?)</td>", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
_FIGURE = re.compile(r'<p><img alt="([^"]+)"[^>]*></p>')
_LINK = re.compile(r"(\]\()([^)#:\s]+)([)#])")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages, figures and stored results from outside of docs/."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text()
        text = _LINK.sub(lambda found, page=page, source=source: _rewritten(found, page, source), text)
        files.append(File.generated(config, page, content=text))
    for stored in sorted((ROOT / "benchmarks").glob("2*.*")):
        files.append(File.generated(config, f"benchmarks/{stored.name}", abs_src_path=str(stored)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Draws formulas, and leads links out of docs/ to the pages above."""
    found = page.file.src_uri
    if found not in PAGES:
        markdown = _LINK.sub(lambda link: _rewritten(link, found, f"docs/{found}"), markdown)
    return mathml.in_page(markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Gives figures captions; marks cells of tables, so that numbers are not broken and long text is not squeezed."""
    html = _FIGURE.sub(r"<figure>\g<0><figcaption>\1.</figcaption></figure>", html)
    html = _NUMBER.sub(r'<td class="number"\1>\2</td>', html)
    return _CELL.sub(_marked, html)


def _marked(cell: re.Match[str]) -> str:
    """Returns a cell with a class if its text would fill more than a few lines of a narrow column."""
    size = len(_TAG.sub("", cell[2]))
    kind = "longest" if size > 300 else "long" if size > 90 else None
    return cell[0] if kind is None else f'<td class="{kind}"{cell[1]}>{cell[2]}</td>'


def _rewritten(link: re.Match[str], page: str, source: str) -> str:
    """Returns a link of a document in the repository as one between pages; one to a file that is no page stays."""
    target = (ROOT / source).parent.joinpath(link[2]).resolve()
    if not target.is_relative_to(ROOT):
        return link[0]
    path = target.relative_to(ROOT).as_posix()
    pages = {document: name for name, document in PAGES.items()}
    place = pages.get(path, path.removeprefix("docs/") if path.startswith(("docs/", "benchmarks/")) else None)
    if place is None:
        return link[0]
    return f"{link[1]}{'../' * page.count('/')}{place}{link[3]}"
