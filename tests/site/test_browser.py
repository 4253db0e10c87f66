# SPDX-License-Identifier: Apache-2.0
"""The site as a reader sees it: in a browser, on a phone and on a desk, in both themes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.browser import Page, chromium, find_chromium, served

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="needs Chromium (Debian's package `chromium`)")

# The start page, a tutorial with figures, the pages with the widest tables, an API page with the longest signatures.
PAGES = ("index.html", "tutorials/gumbel_matching.html", "estimators.html", "benchmarks/index.html", "api/nn.html")


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served(site) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_no_error_and_no_sideways_scrolling(page: Page, address: str, name: str, width: int, dark: bool) -> None:
    page.open(f"{address}/{name}", width=width, dark=dark)
    assert page.fits(width)
    assert page.run("document.querySelector('h1').textContent.length") > 0
    scheme = page.wait_for("document.body.getAttribute('data-md-color-scheme')")
    assert scheme == ("slate" if dark else "default")


def test_nothing_comes_from_elsewhere(page: Page, address: str) -> None:
    page.open(f"{address}/index.html", width=1280)
    loaded = page.run("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded
    assert [url for url in loaded if not url.startswith(address)] == []


def test_search_finds_a_function(page: Page, address: str) -> None:
    page.open(f"{address}/index.html", width=1280)
    page.run("document.querySelector('[data-md-component=search-query]').focus()")
    page.wait_for("document.querySelector('[data-md-component=search-result]') !== null")
    page.run(
        "{const box = document.querySelector('[data-md-component=search-query]');"
        "box.value = 'conditional_values'; box.dispatchEvent(new Event('keyup', {bubbles: true}));}"
    )
    found = page.wait_for("[...document.querySelectorAll('.md-search-result__link')].map(a => a.href).join(' ')")
    assert "api/assignment.html" in found
