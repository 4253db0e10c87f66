# SPDX-License-Identifier: Apache-2.0
"""Where commands print."""

from rich.console import Console


def make_console(log_width: int) -> Console:
    """Makes a console.

    Args:
        log_width: columns where there is no terminal; rich assumes 80, too few for tables.
    """
    console = Console()
    return console if console.is_terminal else Console(width=log_width)
