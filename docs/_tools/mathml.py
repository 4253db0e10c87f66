# SPDX-License-Identifier: Apache-2.0
"""Formulas as MathML, which browsers draw by themselves: the site needs no script from elsewhere."""

import re
import textwrap

from latex2mathml.converter import convert

_FENCE = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r"^( *)\.\. math::\n((?:\1 +\S.*\n?|\s*\n)+)", re.MULTILINE)
_ROLE = re.compile(r":math:`([^`]+)`")


def display(latex: str) -> str:
    """Returns a formula on a line of its own, as HTML that Markdown leaves alone."""
    return f'\n\n<div class="formula">{convert(latex.strip(), display="block")}</div>\n\n'


def inline(latex: str) -> str:
    """Returns a formula within a line; in a span, since Markdown takes a line that begins with `<math>` for a block."""
    return f"<span>{convert(latex.strip())}</span>"


def in_page(markdown: str) -> str:
    """Turns the fences ```math of a page into formulas."""
    return _FENCE.sub(lambda found: display(found[1]), markdown)


def in_docstring(text: str) -> str:
    """Turns the directives `.. math::` and the roles :math:`x` of a docstring into formulas."""
    text = _DIRECTIVE.sub(lambda found: display(textwrap.dedent(found[2])), text + "\n")
    return _ROLE.sub(lambda found: inline(found[1]), text).rstrip("\n")
