# SPDX-License-Identifier: Apache-2.0
"""Tables on a terminal, and the numbers in them."""

from collections.abc import Sequence

from rich import box
from rich.table import Table


def format_seconds(seconds: float | None) -> str:
    """Writes a time with three digits and the unit that suits it; None is a dash.

    Example:
        >>> format_seconds(0.00123), format_seconds(12.3)
        ('1.23 ms', '12.3 s')
    """
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds / 1e-9:.0f} ns"


def name_size(size: Sequence[int]) -> str:
    """Writes n x k.

    Example:
        >>> name_size((4096, 64))
        '4,096 x 64'
    """
    return " x ".join(f"{number:,}" for number in size)


def name_threads(threads: int) -> str:
    """Writes a number of threads in words where it is one."""
    return "one thread" if threads == 1 else f"{threads} threads"


def new_table(
    title: str, left: Sequence[str] = (), right: Sequence[str] = (), *, no_wrap: bool = False, **how: str | bool
) -> Table:
    """Makes a table without rows, of columns that are aligned at the left and then of some aligned at the right.

    With `no_wrap` each entry stays on one line; further keywords are those of `rich.table.Table`.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, **how)  # pyright: ignore[reportArgumentType]
    for heading in left:
        table.add_column(heading, no_wrap=no_wrap)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=no_wrap)
    return table
