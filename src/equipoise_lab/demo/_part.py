# SPDX-License-Identifier: Apache-2.0
"""What a part of the tour returns."""

from dataclasses import dataclass

from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one part found.

    Attributes:
        title: what was done.
        code: the lines of Python that do it, for the reader to copy.
        found: what came out, a sentence each.
        figure: the picture.
        caption: what the picture shows.
    """

    title: str
    code: str
    found: tuple[str, ...]
    figure: Figure
    caption: str
