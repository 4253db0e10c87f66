# SPDX-License-Identifier: Apache-2.0
"""Renders the tutorials: scripts in examples/ become pages with their real output and figures.

A script is divided by lines that begin with `# %%`. A part that begins with `# %% [markdown]` is prose: its comment
lines, without the `#`. Any other part is code: it runs, and what it prints and draws follows it on the page. A line
that ends in `# hidden` runs and is not shown.

    python docs/_tools/tutorials.py [NAME ...]
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLES, PAGES = ROOT / "examples", ROOT / "docs" / "tutorials"
_PART = re.compile(r"^# %%(.*)$", re.MULTILINE)


def parts(script: str) -> Iterator[tuple[bool, str]]:
    """Yields the parts of a script: whether it is prose, and its text."""
    pieces = _PART.split(script)[1:]
    for heading, text in zip(pieces[::2], pieces[1::2], strict=True):
        prose = "[markdown]" in heading
        lines = text.strip("\n").splitlines()
        if prose:
            lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
        yield prose, "\n".join(lines)


def shown(code: str) -> str:
    """Returns the code that a page shows."""
    return "\n".join(line for line in code.splitlines() if not line.endswith("# hidden")).strip("\n")


def tutorials() -> list[str]:
    """Returns the names of the scripts that are tutorials: those that begin with prose."""
    return [path.stem for path in sorted(EXAMPLES.glob("*.py")) if "# %% [markdown]" in path.read_text()]


def render(name: str, folder: Path = PAGES) -> str:
    """Runs a script, stores its figures, and returns its page."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from equipoise_lab._style import STYLE

    plt.rcParams.update(STYLE)  # one look for all figures of the project
    page: list[str] = []
    scope: dict[str, Any] = {"__name__": "__main__"}
    figures = 0
    for prose, text in parts((EXAMPLES / f"{name}.py").read_text()):
        if prose:
            page.append(text)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, f"examples/{name}.py", "exec"), scope)  # the page shows what this very code does
        if shown(text):
            page.append(f"```python\n{shown(text)}\n```")
        if printed.getvalue().strip():
            page.append(f"```text\n{printed.getvalue().rstrip()}\n```")
        for number in plt.get_fignums():
            figures += 1
            figure = plt.figure(number)
            figure.savefig(folder / f"{name}-{figures}.png", dpi=150, bbox_inches="tight")
            page.append(f"![{figure.get_label() or f'Figure {figures}'}]({name}-{figures}.png)")
            plt.close(figure)
    page.append(f"The whole script is `examples/{name}.py`: run it, change it.")
    return "\n\n".join(page) + "\n"


def main(names: list[str]) -> None:
    """Renders the named tutorials, or all."""
    PAGES.mkdir(exist_ok=True)
    os.chdir(ROOT)
    for name in names or tutorials():
        (PAGES / f"{name}.md").write_text(render(name))
        sys.stderr.write(f"docs/tutorials/{name}.md\n")


if __name__ == "__main__":
    main(sys.argv[1:])
