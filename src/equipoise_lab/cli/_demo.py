# SPDX-License-Identifier: Apache-2.0
"""`equipoise demo`."""

from pathlib import Path
from typing import Annotated

import typer

_LOG_WIDTH = 100


def demo(out: Annotated[Path, typer.Option(help="Folder for the page.", file_okay=False)] = Path("out/demo")) -> None:
    """Show what the library does, in half a minute and without any data.

    Balances a batch, draws a balanced sample, audits an estimator with and without its weights, and trains a small
    mixture of experts. Prints the results, and writes them with figures to one page, `demo.html`.

    The first call on a machine compiles kernels, which takes half a minute more.
    """
    import torch
    from rich.panel import Panel

    from equipoise_lab.cli._progress import make_console, print_paths
    from equipoise_lab.demo import PARTS, write_page

    torch.set_num_threads(1)  # the parts are small: threads that wait for each other on a busy machine only cost time
    console = make_console(_LOG_WIDTH)
    found = []
    with console.status("working") as status:
        for number, run in enumerate(PARTS, 1):
            status.update(f"part {number} of {len(PARTS)}")
            part = run()
            found.append(part)
            text = "\n".join(f"- {sentence}" for sentence in part.found)
            console.print(
                Panel(f"[dim]{part.code}[/dim]\n\n{text}", title=f"{number}. {part.title}", title_align="left")
            )
    print_paths(console, [write_page(found, out)])
