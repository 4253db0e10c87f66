# SPDX-License-Identifier: Apache-2.0
"""The default solver on the CPU: settle, solve what is left, prove.

The order of work for one large problem, each part a compiled kernel (`_kernels`):

1. Prices (`_start.py`, `_smoothing.py`, `_newton.py`). Equal ones if a sample of the rows accepts them, those of a warm
   start if it accepts those, else Newton steps on the sample; then on four times as many rows, and so on.
2. Settle (`_contested.py`). One pass over the matrix. A row whose K-th best offer leads the next by more than prices
   can still move is settled. The rest are contested, with the few candidates that are near.
3. Solve (`_solve.py`). Newton steps on the contested rows (`_newton.py`), then exact shortest chains of moves
   (`_flow.py`): of the few rows that Newton steps left, and of all contested rows if that does not end in a proof.
4. Prove (`_books.py`). No settled row has a better offer if its lead covers the difference of the final prices; the
   least lead for each pair of experts was noted in the pass. Contested rows are read once more. If a row has a better
   offer, step 2 is repeated at the prices of the Newton steps, with a larger radius.

Where rows come in clusters, scores have a low rank or sigmoids saturate, prices move further than candidates were
listed for. Then the same is done again with a larger radius. The last resort is chains of moves with all candidates.

Problems of few rows go to step 3 at once, with every expert a candidate of every row. `docs/assignment.md` has the
derivation. Legend: b problems, n rows, k experts, K experts a row, m contested rows.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise._core._threads import cut, run_blocks
from equipoise.assignment._infeasible import check_start, illegal_scores, no_room
from equipoise.assignment._kernels import _books, _contested, _flow, _newton, _small, _solve, _start

Matrix = NDArray[np.floating[Any]]
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Ints = NDArray[np.int32]
Flags = NDArray[np.bool_]

# With so many rows, or no more than experts, chains alone take less time than the passes that save work on many rows.
SMALL_ROWS = 128
# Rows that one thread reads at a time; results do not depend on it.
BLOCK_ROWS = 8192
# With more contested rows than this part of all, a wider radius would only repeat the chains.
NEARLY_ALL = 0.9
# Passes over the matrix after which every expert becomes a candidate of every row.
MOST_PASSES = 16


class Contested(NamedTuple):
    """Rows with a choice: row a takes `need[a]` of the candidates `first[a]:first[a + 1]` of `cols` and `vals`.

    Attributes:
        rows: [m] where each row stands in the matrix.
        need: [m] how many of its candidates it takes.
        first: [m + 1] where its candidates begin.
        cols: the candidates.
        vals: their scores.
    """

    rows: Ints
    need: Ints
    first: Counts
    cols: Ints
    vals: Matrix


class Settled(NamedTuple):
    """What is known of all other rows.

    Attributes:
        counts: [k] how many rows each expert has for certain.
        leads: [k, k] the least `s_ij - s_it` over settled rows that hold j and not t.
    """

    counts: Counts
    leads: Matrix


def primal_dual(
    scores: Tensor, capacity: Tensor | None, mask: Tensor | None, prices: Tensor | None, top_k: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Solves a batch of assignment problems exactly.

    Args:
        scores: float32 or float64 [..., n, k] on the CPU.
        capacity: int64 [..., k]; or None for ceil(K * rows that are not masked / k).
        mask: bool [..., n] or None.
        prices: floating [..., k] to start from, or None.
        top_k: K.

    Returns:
        z and counts, int64, with z [..., n, K] = k for masked rows; capacity and mask, of its own; value,
        prices and gap, float64.

    Raises:
        ValueError: capacities or prices that do not fit; a score is NaN or +inf, or the -inf leave no assignment.
    """
    *batch, n, k = scores.shape
    b = math.prod(batch)
    # In NumPy from here on: reshaping, say, costs a tenth of what it does in torch, and there is a lot of it.
    s = np.ascontiguousarray(scores.numpy()).reshape(b, n, k)
    rows = np.empty((b, n), np.bool_)
    rows[:] = True if mask is None else mask.numpy().reshape(b, n)
    c = np.empty((b, k), np.int64)
    if capacity is not None:
        c[:] = capacity.numpy().reshape(b, k)
    else:
        c[:] = -(-top_k * (n if mask is None else rows.sum(1, keepdims=True)) // max(k, 1))
    p = np.zeros((b, k)) if prices is None else prices.double().numpy().reshape(b, k).copy()
    if not _books.can_start(c, rows, mask is not None, p, top_k):
        check_start(c.reshape(*batch, k), np.asarray(top_k * rows.reshape(*batch, n).sum(-1)), p, top_k)
    z = np.empty((b, n, top_k), np.int32)
    value, gap = np.zeros(b), np.zeros(b)
    if (k == 2 and top_k == 1) or n <= max(SMALL_ROWS, k):
        _solve_small(s, rows, c, p, z, value, gap)
    else:
        parallel = b < torch.get_num_threads()

        def solve(start: int, stop: int) -> None:
            for i in range(start, stop):
                value[i], gap[i] = _Problem(s[i], rows[i], c[i], p[i], z[i], i, parallel).solve(prices is not None)

        _ = solve(0, b) if parallel or b == 1 else run_blocks(solve, cut(b, 1))
    z_out, counts = np.empty((b, n, top_k), np.int64), np.zeros((b, k), np.int64)
    _books.close_books(s, z, c, p, z_out, counts, gap)
    return (
        torch.from_numpy(z_out.reshape(*batch, n, top_k)),
        torch.from_numpy(counts.reshape(*batch, k)),
        torch.from_numpy(c.reshape(*batch, k)),
        torch.from_numpy(rows.reshape(*batch, n)),
        torch.from_numpy(value.reshape(batch)),
        torch.from_numpy(p.reshape(*batch, k)),
        torch.from_numpy(gap.reshape(batch)),
    )


def _solve_small(s: Matrix, rows: Flags, c: Counts, p: Floats, z: Ints, value: Floats, gap: Floats) -> None:
    b, n, k = s.shape
    status = np.empty(b, np.int32)

    def solve(start: int, stop: int) -> None:
        _small.solve_small(s, rows, c, start, stop, p, z, value, gap, status)

    run_blocks(solve, cut(b, max(1, BLOCK_ROWS * 4 // (n * k + 1))))
    for i in np.flatnonzero(status >= 0)[:1]:
        if status[i] < n:
            raise illegal_scores(s[i], c[i], z.shape[2], int(status[i]), int(i))
        raise no_room(s[i], rows[i], c[i], z[i], int(status[i]) - n, int(i))


class _Problem:
    """One large problem on its way to a solution; prices and z are changed in place.

    `log` tells what was done, for tests and for the curious.
    """

    def __init__(
        self, scores: Matrix, mask: Flags, capacity: Counts, prices: Floats, z: Ints, index: int, parallel: bool
    ) -> None:
        self.scores, self.mask, self.capacity, self.prices, self.z = scores, mask, capacity, prices, z
        self.index, self.parallel = index, parallel
        self.top_k, rows = z.shape[1], int(mask.sum())
        # Nobody takes more than all rows, whatever the capacity: what is beyond would drown the rest in rounding.
        self.slots = np.minimum(capacity, rows)
        self.target = self.slots.astype(np.float64)
        self.free = float(self.target.sum() - self.top_k * rows)
        self.log: list[str] = []

    def solve(self, warm: bool) -> tuple[float, float]:
        """Returns the value and the sum of what rows miss."""
        try:
            return self._solve(warm)
        except OverflowError:  # in float64 there is room for what float32 allows; beyond it, lists are done without
            self.prices[:] = 0.0
            if self.scores.dtype == np.float32:
                self.scores = self.scores.astype(np.float64)
                return self.solve(warm=False)
            return self._solve_listed()

    def _solve(self, warm: bool) -> tuple[float, float]:
        radius, status = self._start(warm)
        start, ended = self.prices.copy(), status
        for _ in range(MOST_PASSES):
            mu = 0.0
            if status != _newton.TIED:  # of tied rows smoothing would tell nothing more
                usual = _start.median(radius.copy())
                radius, mu = np.maximum(radius, usual), _start.FIRST_MU * usual
            contested, settled = self._collect(radius)
            ended, value, gap = self._solve_contested(contested, settled, mu, radius)
            if ended == _solve.PROVED:
                return value, gap
            no_wider = ended == _solve.MISSED and len(contested.rows) > NEARLY_ALL * len(self.scores)
            if no_wider or not 0 < radius.max() < np.inf:
                break
        if ended == _newton.LOST:
            self.prices[:] = start
        return self._solve_listed()

    def _solve_contested(
        self, contested: Contested, settled: Settled, mu: float, radius: Floats
    ) -> tuple[int, float, float]:
        """Returns how it ended, the value, and what rows miss."""
        ended, value, gap, chains, few = _solve.solve_contested(
            self.scores, *contested, *settled, self.capacity, self.slots, self.free, mu, self.prices, radius, self.z
        )
        self.log.append(f"{len(contested.rows)} rows, newton from {mu:.3g}, {few} rows: {ended}, {chains} chains")
        return ended, value, gap

    def _start(self, warm: bool) -> tuple[Floats, int]:
        """Finds prices from samples.

        Returns:
            How far each price may still move; and how the last descent ended.
        """
        radius = np.empty(len(self.prices))
        status, origin = _start.start_prices(
            self.scores, self.mask, self.capacity, self.target, self.free, warm, self.prices, radius, self.z
        )
        if status == _start.OVERFLOWED:
            self._refuse_illegal_rows()
            raise OverflowError  # rows are legal, but scores less prices are not finite
        self.log.append(f"start from {('equal', 'given', 'sampled')[origin]} prices: {status}")
        return radius, status

    def _collect(self, radius: Floats) -> tuple[Contested, Settled]:
        """Tells settled rows from contested ones, which have the experts within the radius as candidates."""
        n, k = self.scores.shape
        kind = self.scores.dtype

        def collect(start: int, stop: int) -> tuple[Contested, Settled, int]:
            size = stop - start
            rows, need, first = np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size + 1, np.int64)
            cols, vals = np.empty(size * k, np.int32), np.empty(size * k, kind)
            counts, leads = np.zeros(k, np.int64), np.full((k, k), np.inf, kind)
            m, illegal = _contested.collect(
                self.scores,
                self.mask,
                self.prices,
                radius,
                start,
                stop,
                1,
                self.z,
                counts,
                rows,
                need,
                first,
                cols,
                vals,
                leads,
            )
            entries = first[m]
            lists = Contested(rows[:m], need[:m], first[: m + 1], cols[:entries], vals[:entries])
            return lists, Settled(counts, leads), illegal

        blocks = cut(n, BLOCK_ROWS)
        parts = run_blocks(collect, blocks) if self.parallel else [collect(*block) for block in blocks]
        for _, _, illegal in parts:
            if illegal >= 0:
                self._refuse_illegal_rows()
                raise OverflowError  # the row is legal, but scores less prices are not finite
        return _join([part[0] for part in parts]), _add([part[1] for part in parts])

    def _list_all(self) -> tuple[Contested, Settled]:
        """Makes every expert a candidate of every row."""
        scores, mask, (n, k) = self.scores, self.mask, self.scores.shape
        self.prices[self.capacity == 0] = np.inf
        rows, need, first = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n + 1, np.int64)
        cols, vals = np.empty(n * k, np.int32), np.empty(n * k, scores.dtype)
        self.z[:] = -1
        m, illegal = _contested.all_candidates(scores, mask, self.capacity, self.top_k, rows, need, first, cols, vals)
        if illegal >= 0:
            raise illegal_scores(self.scores, self.capacity, self.top_k, illegal, self.index)
        nothing = Settled(np.zeros(k, np.int64), np.full((k, k), np.inf, scores.dtype))
        return Contested(rows[:m], need[:m], first[: m + 1], cols[: first[m]], vals[: first[m]]), nothing

    def _refuse_illegal_rows(self) -> None:
        row = _contested.illegal_row(self.scores, self.mask, self.capacity, self.top_k)
        if row >= 0:
            raise illegal_scores(self.scores, self.capacity, self.top_k, row, self.index)

    def _solve_listed(self) -> tuple[float, float]:
        """Chains alone, with all candidates: the last resort. Returns the value and what rows miss."""
        lists, _ = self._list_all()
        held, inside = np.empty(len(lists.cols), np.bool_), np.empty(len(self.prices), np.bool_)
        stuck, chains = _flow.exact_flow(*lists[1:], self.slots, self.prices, held, inside)
        self.log.append(f"all rows: {chains} chains")
        _books.take_held(lists.rows, lists.need, lists.first, lists.cols, held, self.z)
        if stuck >= 0:
            raise no_room(self.scores, self.mask, self.capacity, self.z, stuck, self.index)
        return _books.prove(self.scores, lists.rows, self.capacity, self.prices, self.z)[:2]


def _join(parts: list[Contested]) -> Contested:
    if len(parts) == 1:
        return parts[0]
    begins = np.cumsum([0] + [part.first[-1] for part in parts])
    first = [part.first[1:] + begin for part, begin in zip(parts, begins[:-1], strict=True)]
    return Contested(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.need for part in parts]),
        np.concatenate([np.zeros(1, np.int64), *first]),
        np.concatenate([part.cols for part in parts]),
        np.concatenate([part.vals for part in parts]),
    )


def _add(parts: list[Settled]) -> Settled:
    if len(parts) == 1:
        return parts[0]
    return Settled(np.sum([part.counts for part in parts], axis=0), np.minimum.reduce([part.leads for part in parts]))
