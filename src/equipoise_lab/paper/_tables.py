# SPDX-License-Identifier: Apache-2.0
"""The verdicts on a terminal."""

from collections.abc import Sequence

from rich.table import Table

from equipoise_lab.paper._claims import Claim

_STYLES = {"holds": "green", "undecided": "yellow", "does not hold": "red", "not judged": "dim"}


def claims_table(claims: Sequence[Claim]) -> Table:
    """Lists the claims with their verdicts.

    Args:
        claims: what was judged.

    Returns:
        The table.
    """
    table = Table(title="The paper's claims", title_justify="left", show_lines=False)
    table.add_column("", justify="right")
    table.add_column("claim")
    table.add_column("verdict", no_wrap=True)
    table.add_column("without baseline", no_wrap=True)
    for claim in claims:
        verdicts = (claim.verdict, claim.verdict_without)
        shown = ("" if verdict is None else f"[{_STYLES[verdict]}]{verdict}[/]" for verdict in verdicts)
        table.add_row(str(claim.number), claim.title, *shown)
    return table
