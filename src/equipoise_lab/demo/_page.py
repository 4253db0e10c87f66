# SPDX-License-Identifier: Apache-2.0
"""What a part of the tour returns, and `demo.html`: the tour on one page that needs nothing else."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from equipoise import __version__
from equipoise_lab._ledger import write_whole
from equipoise_lab._style import save


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one part found."""

    title: str  # what was done
    code: str  # the lines of Python that do it, for the reader to copy
    found: tuple[str, ...]  # what came out, a sentence each
    figure: Figure  # the picture
    caption: str  # what the picture shows


def write_page(parts: Sequence[Part], folder: Path) -> Path:
    """Writes the page and its figures into a folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    template = jinja2.Environment(loader=loader, autoescape=True).get_template("demo.html.jinja")
    pictures = [_data_uri(part) for part in parts]
    page = folder / "demo.html"
    write_whole(page, template.render(parts=list(zip(parts, pictures, strict=True)), version=__version__))
    for number, part in enumerate(parts, 1):
        save(part.figure, folder / "figures", f"demo-{number}")
    return page


def _data_uri(part: Part) -> str:
    """Returns the picture of a part, to be written into the page."""
    picture = io.BytesIO()
    part.figure.savefig(picture, format="png", dpi=160)
    return "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()
