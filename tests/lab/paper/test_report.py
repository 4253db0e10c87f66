# SPDX-License-Identifier: Apache-2.0
import base64
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from equipoise_lab.paper._claims import judge, summarise
from equipoise_lab.paper._report import find_pictures, write_report
from support.browser import Page as Tab
from support.browser import chromium, find_chromium


class Page(HTMLParser):
    """Reads a page: its text, its identifiers, what it refers to, and whether its tags are closed."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.ids, self.links, self.open = "", set[str](), list[str](), list[str]()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            if name in ("src", "href"):
                self.links.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def write(folder: Path, results: Any, studies: dict[str, Any], **changes: Any) -> Page:
    options: dict[str, Any] = {
        "recipe_description": {"steps": 10_000, "temperatures": [0.3, 1.0], "dataset": "shared"},
        "results": results,
        "claims": judge(results, studies),
        "studies": studies,
        "environment": {"processor": "a <fast> one", "versions": {"torch": "2.13.0"}},
        "command": "equipoise reproduce --out 'a & b'",
        "seconds": 754.0,
    }
    path = write_report(folder, **(options | changes))
    assert path == folder / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert page.open == []
    return page


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    folder = tmp_path / "figures"
    folder.mkdir()
    for name in ("zebra-crossing", "study-marginals", "main"):
        (folder / f"{name}.svg").write_text(f"<svg>{name}</svg>")
        (folder / f"{name}.png").write_bytes(b"png")
    return folder


def test_the_page_holds_everything_and_needs_nothing(
    make_results: Any, studies: dict[str, Any], figures: Path, tmp_path: Path
) -> None:
    results = [r for r in make_results() if r.seed < 3]
    page = write(tmp_path, results, studies)
    inside = {link.removeprefix("#") for link in page.links if link.startswith("#")}
    assert inside <= page.ids
    assert {f"claim-{number}" for number in range(1, 17)} <= page.ids
    # Nothing is loaded from elsewhere: beside the paper's address, which is a link, all is within the page.
    outside = [link for link in page.links if not link.startswith(("#", "data:"))]
    assert outside == ["https://arxiv.org/abs/2109.11817"]
    source = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"url\(|@import|<script|<link", source)
    assert "prefers-color-scheme: dark" in source
    for said in ("12 min 34 s", "equipoise reproduce --out 'a & b'", "a <fast> one", "torch 2.13.0", "10,000"):
        assert said in page.text
    for claim in judge(results, studies):
        assert claim.title in page.text
        assert all(part.measured in page.text and part.rule in page.text for part in claim.parts)
    assert page.text.count("REINFORCE, Sinkhorn first") == 1
    assert page.text.count("Without a baseline") == 3
    assert summarise(judge(results, studies)) in page.text
    assert re.search(r"about \d+ seeds would decide it", page.text)
    assert "Sensitivity" not in page.text
    assert "quick" not in page.text


def test_figures_come_in_order_and_inline(figures: Path) -> None:
    pictures = find_pictures(figures)
    assert [picture.name for picture in pictures] == ["main", "study-marginals", "zebra-crossing"]
    assert pictures[2].title == "Zebra crossing"
    kind, _, data = pictures[0].source.partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(data) == b"<svg>main</svg>"


def test_a_large_figure_is_embedded_as_a_picture(figures: Path) -> None:
    (figures / "main.svg").write_text("<svg>" + " " * 500_000 + "</svg>")
    assert find_pictures(figures)[0].source.startswith("data:image/png;base64,")
    (figures / "main.png").unlink()
    assert find_pictures(figures)[0].source.startswith("data:image/svg+xml;base64,")


def test_a_page_without_results_says_so(tmp_path: Path) -> None:
    page = write(tmp_path, [], {}, recipe_description={"quick": True, "steps": 100})
    assert "16 not judged" in page.text
    assert "Quick run (100 steps): not the experiment in full" in page.text
    assert "solved" not in page.ids
    assert "figures" not in page.ids


def test_the_sensitivity_table_is_shown_when_there_is_one(tmp_path: Path) -> None:
    verdicts = {"1": "undecided", "2": "not judged"}
    same = {"field": None, "value": None, "default": None, "verdicts": {"1": "holds", "2": "not judged"}}
    other = {"field": "dataset", "value": "shared", "default": "per-seed", "verdicts": verdicts, "minority": 0.31}
    page = write(tmp_path, [], {"sensitivity": {"rows": [same | {"solved": 0.5}, other | {"solved": 0.437}]}})
    table = page.text[page.text.index("Sensitivity to what the paper leaves open") :]
    assert "as above" in table
    assert "dataset: shared" in table
    assert "(default per-seed; 31% of its points have x ≥ 0.5)" in table
    assert "44%" in table
    assert len(re.findall(r"\bopen\b", table)) == 2  # once in the heading


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    if find_chromium() is None:
        pytest.skip("needs Chromium (Debian's package `chromium`)")
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_the_page_fits_the_screen(tab: Tab, make_results: Any, studies: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    wide = '<svg xmlns="http://www.w3.org/2000/svg" width="900" height="300"><text y="20">a figure</text></svg>'
    (tmp_path / "figures/main.svg").write_text(wide)
    write(tmp_path, [r for r in make_results() if r.seed < 3], studies)
    for width in (390, 1280):
        for dark in (False, True):
            tab.open((tmp_path / "report.html").as_uri(), width=width, dark=dark)  # from the disk, as people do
            assert tab.fits(width)
            assert tab.brightness() < 0.2 if dark else tab.brightness() > 0.8
            assert tab.run("[...document.images].filter(image => !image.naturalWidth).length") == 0
