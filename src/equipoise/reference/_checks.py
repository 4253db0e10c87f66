# SPDX-License-Identifier: Apache-2.0
"""What the oracles require: one problem, small enough to be written out.

Legend: n rows (datapoints), k columns (experts).
"""

from torch import Tensor

from equipoise._core import check_matrix


def check_one_problem(name: str, x: Tensor) -> None:
    """Requires a single floating-point matrix [n, k]: no batch dimensions."""
    check_matrix(name, x)
    if x.ndim != 2:
        raise ValueError(f"{name} must be one problem of shape [n, k], got {list(x.shape)}: loop over the batch")


def check_square(name: str, x: Tensor) -> None:
    """Requires as many rows as columns."""
    if x.shape[0] != x.shape[1]:
        raise ValueError(
            f"{name} must be square, got shape {list(x.shape)}: repeat the column of an expert for each of its slots, "
            "until there are as many columns as rows"
        )


def check_row(row: int, n: int) -> None:
    """Requires the index of one of n rows, counted from 0."""
    if not 0 <= row < n:
        raise ValueError(f"row must be one of the {n} rows, 0 <= row < {n}, got {row}: count rows from 0")


def check_enough_slots(capacity: Tensor, n: int) -> None:
    """Requires capacities int [k] that hold n rows."""
    slots = int(capacity.sum())
    if slots < n:
        raise ValueError(
            f"capacity must hold every row: {n} rows need {n} slots, got {slots} in {capacity.tolist()}: raise capacity"
        )


def check_small_enough(what: str, count: int, limit: int) -> None:
    """Requires at most `limit` of something that is written out in full."""
    if count > limit:
        raise ValueError(f"{what} must number at most {limit} to be written out, got {count}: take a smaller n or k")


def check_balanced_matrix(name: str, p: Tensor, tolerance: float = 1e-6) -> Tensor:
    """Requires one matrix [n, k] of probabilities whose columns sum to whole numbers; returns those, int64 [k]."""
    check_one_problem(name, p)
    if p.shape[0] == 0:
        raise ValueError(f"{name} must have at least one row, got shape {list(p.shape)}: leave empty batches out")
    if not bool((p >= 0).all()):
        raise ValueError(f"{name} must hold probabilities >= 0, got {float(p.min())}: pass exp of log probabilities")
    row_error = float((p.sum(1) - 1).abs().amax())
    if row_error > tolerance:
        raise ValueError(f"{name} must have rows that sum to 1, got an error of {row_error:.1e}: normalise the rows")
    columns = p.sum(0)
    if float((columns - columns.round()).abs().amax()) > tolerance:
        raise ValueError(
            f"{name} must have columns that sum to whole numbers (the capacities), got {columns.tolist()}: "
            "balance it first, to a smaller tolerance"
        )
    return columns.round().long()


def check_no_nan(name: str, x: Tensor) -> None:
    """Requires values that are finite or -inf."""
    bad = ~(x < float("inf"))
    if bool(bad.any()):
        raise ValueError(
            f"{name} must be finite or -inf (a forbidden pair), got {float(x[bad][0])} at index "
            f"{bad.nonzero()[0].tolist()}: look for an overflow upstream"
        )


def check_possible(name: str, log_normaliser: Tensor) -> None:
    """Requires that the forbidden pairs leave at least one assignment."""
    if float(log_normaliser) == -float("inf"):
        raise ValueError(f"{name} must leave an assignment within capacity, got none: fewer -inf, or a larger capacity")
