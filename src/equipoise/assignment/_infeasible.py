# SPDX-License-Identifier: Apache-2.0
"""Why a problem has no solution, in words."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.floating[Any]]


def check_start(
    capacity: NDArray[np.int64], rows: NDArray[np.int64], prices: NDArray[np.float64] | None, top_k: int = 1
) -> None:
    """Requires capacities that hold the rows of each problem, and finite prices.

    Args:
        capacity: [..., k].
        rows: how many places they take, for each problem or for all.
        prices: [..., k] or None.
        top_k: how many experts a row takes.
    """
    if capacity.min(initial=0) < 0:
        raise ValueError(
            f"capacity must be >= 0, got {capacity.min()}: give the number of rows that each expert may take"
        )
    sums = capacity.sum(-1)
    short = np.atleast_1d(sums < rows)
    if short.any():
        first = int(short.argmax())
        where = f" in problem {first}" if short.size > 1 else ""
        missing = np.broadcast_to(rows, sums.shape).flat[first]
        what = "the number of rows" if top_k == 1 else f"{top_k} times the number of rows"
        raise ValueError(
            f"capacity must sum to at least {what}, {missing}{where}, got {sums.flat[first]}: raise it, or mask rows"
        )
    if prices is not None and not np.isfinite(prices).all():
        raise ValueError("prices must be finite, got a NaN or an infinity: pass an earlier Assignment's .prices")


def find_illegal_row(scores: Matrix, mask: NDArray[np.bool_], capacity: NDArray[np.int64], top_k: int) -> int:
    """The first row that holds a NaN or +inf or may take too few experts; -1 if there is none."""
    legal = (scores < np.inf).all(1) & (((scores > -np.inf) & (capacity > 0)).sum(1) >= top_k)
    illegal = np.flatnonzero(mask & ~legal)
    return int(illegal[0]) if len(illegal) else -1


def illegal_scores(scores: Matrix, capacity: NDArray[np.int64], top_k: int, row: int, problem: int) -> ValueError:
    """The error for a row that holds a NaN or +inf, or may go nowhere."""
    where = f"row {row}" if problem == 0 else f"row {row} of problem {problem}"
    if np.isnan(scores[row]).any():
        return ValueError(f"scores must not be NaN, got NaN in {where}: mask the row, or find out where it comes from")
    if (scores[row] == np.inf).any():
        return ValueError(f"scores must be below +inf, got +inf in {where}: use a large finite score")
    wanted = "an expert" if top_k == 1 else f"{top_k} experts"
    open_to = (scores[row] > -np.inf) & (capacity > 0)
    if (capacity > 0).all():
        found = "is -inf for all of them" if top_k == 1 else f"is -inf for all but {open_to.sum()}"
        return ValueError(
            f"scores must leave every row {wanted}, but {where} {found}: allow it {_more(top_k)}, or mask it"
        )
    found = "is -inf for all" if top_k == 1 else f"is -inf for all but {open_to.sum()} of those"
    return ValueError(
        f"scores must leave every row {wanted}, but {where} {found} that have a capacity above 0: "
        f"allow it {_more(top_k)}, raise a capacity, or mask the row"
    )


def _more(top_k: int) -> str:
    return "one" if top_k == 1 else "more, lower top_k"


def no_room(
    scores: Matrix,
    mask: NDArray[np.bool_],
    capacity: NDArray[np.int64],
    z: NDArray[np.int32],
    expert: int,
    problem: int,
) -> ValueError:
    """The error for rows that -inf confines to experts that cannot hold them all.

    `expert` is overfull under z [n, K], and no chain of moves leads from it to room. The experts that chains do reach
    hold only rows that may go nowhere else (Hall's condition fails for those rows).
    """
    k = len(capacity)
    reached, holds = np.zeros(k, np.bool_), np.zeros((len(z), k + 1), np.bool_)
    reached[expert] = True
    allowed = (scores > -np.inf) & (capacity > 0) & mask[:, None]
    np.put_along_axis(holds, np.where(z >= 0, z, k), True, 1)
    while True:
        confined = (holds[:, :k] & reached).any(1)
        grown = reached | (allowed & ~holds[:, :k])[confined].any(0)
        if (grown == reached).all():
            break
        reached = grown
    row, where = int(np.flatnonzero(confined)[0]), "" if problem == 0 else f" of problem {problem}"
    experts = ", ".join(map(str, np.flatnonzero(reached)[:8])) + (", ..." if reached.sum() > 8 else "")
    slots = int(holds[confined][:, :k][:, reached].sum())
    rows = f"{confined.sum()} rows" if z.shape[1] == 1 else f"{slots} places of {confined.sum()} rows"
    return ValueError(
        f"scores must leave the rows room, but -inf confines {rows}{where}, among them row {row}, to "
        f"experts {experts}, which hold {capacity[reached].sum()}: allow more pairs or raise those capacities"
    )
