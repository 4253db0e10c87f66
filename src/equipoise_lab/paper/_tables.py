# SPDX-License-Identifier: Apache-2.0
"""The verdicts on a terminal."""

from collections.abc import Sequence

from rich.table import Table

from equipoise_lab.paper._claims import Claim

_STYLES = {"reproduced": "green", "partly": "yellow", "not reproduced": "red", "not judged": "dim"}


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
    for claim in claims:
        table.add_row(str(claim.number), claim.title, f"[{_STYLES[claim.verdict]}]{claim.verdict}[/]")
    return table
