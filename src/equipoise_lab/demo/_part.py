# SPDX-License-Identifier: Apache-2.0
"""What a part of the tour returns."""

from dataclasses import dataclass

from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one part found."""

    title: str  # what was done
    code: str  # the lines of Python that do it, for the reader to copy
    found: tuple[str, ...]  # what came out, a sentence each
    figure: Figure  # the picture
    caption: str  # what the picture shows
