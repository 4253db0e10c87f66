# SPDX-License-Identifier: Apache-2.0
"""`demo.html`: the tour on one page that needs nothing else."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import jinja2

from equipoise import __version__
from equipoise_lab._ledger import write_whole
from equipoise_lab._style import save
from equipoise_lab.demo._part import Part


def write_page(parts: Sequence[Part], folder: Path) -> Path:
    """Writes the page and its figures.

    Args:
        parts: what was found.
        folder: where to; made if it is missing.

    Returns:
        The page.
    """
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
