# SPDX-License-Identifier: Apache-2.0
"""The demo: each part finds what it says, and the page holds them all."""

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from equipoise_lab.demo import Part, write_page
from equipoise_lab.demo._parts import show_assignment, show_sampling, show_training
from support.browser import Page, chromium, find_chromium


@pytest.fixture(scope="module")
def parts() -> list[Part]:
    return [show_assignment(), show_sampling(), show_training(steps=2)]


def test_parts_say_what_was_found(parts: list[Part]) -> None:
    assignment, sampling, training = parts
    assert "16 rows for each of 8 experts" in assignment.found[0]
    assert sampling.found[0] == f"Rows of each expert: {', '.join(['16'] * 8)}."
    assert "nothing was dropped" in training.found[1]


def test_page_holds_text_and_pictures(parts: list[Part], tmp_path: Path) -> None:
    page = write_page(parts, tmp_path / "demo")
    text = page.read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == len(parts)
    assert all(part.title in text for part in parts)
    assert sorted(path.name for path in (tmp_path / "demo/figures").glob("*.png")) == [
        f"demo-{number}.png" for number in range(1, len(parts) + 1)
    ]
    plt.close("all")


@pytest.fixture(scope="module")
def shown(parts: list[Part], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, str]]:
    if find_chromium() is None:
        pytest.skip("needs Chromium (Debian's package `chromium`)")
    written = write_page(parts, tmp_path_factory.mktemp("demo"))
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page, written.as_uri()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_the_screen(shown: tuple[Page, str], width: int, dark: bool) -> None:
    page, address = shown
    page.open(address, width=width, dark=dark)
    assert page.fits(width)
    assert page.brightness() < 0.2 if dark else page.brightness() > 0.8
    assert page.run("[...document.images].filter(image => !image.naturalWidth).length") == 0
