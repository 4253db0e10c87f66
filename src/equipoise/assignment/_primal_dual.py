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

import numpy as np
import torch
from torch import Tensor

from equipoise._core._threads import cut, run_blocks
from equipoise.assignment._infeasible import check_start, illegal_scores, no_room
from equipoise.assignment._kernels import _books, _contested, _flow, _newton, _small, _solve, _start
from equipoise.assignment._kernels._records import Counts, Flags, Floats, Ints, Lists, Problem, Scores, Settled

# With so many rows, or no more than experts, chains alone take less time than the passes that save work on many rows.
SMALL_ROWS = 128
# Rows that one thread reads at a time; results do not depend on it.
BLOCK_ROWS = 8192
# With more contested rows than this part of all, a wider radius would only repeat the chains.
NEARLY_ALL = 0.9
# So much wider is the radius where there is no proof. With 4, clusters of nearly equal rows take 1.4 times as long.
WIDER = 8
# Passes over the matrix after which every expert becomes a candidate of every row.
MOST_PASSES = 16


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


def _solve_small(s: Scores, rows: Flags, c: Counts, p: Floats, z: Ints, value: Floats, gap: Floats) -> None:
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
        self, scores: Scores, mask: Flags, capacity: Counts, prices: Floats, z: Ints, index: int, parallel: bool
    ) -> None:
        self.prices, self.z, self.index, self.parallel = prices, z, index, parallel
        rows = int(mask.sum())
        # Nobody takes more than all rows, whatever the capacity: what is beyond would drown the rest in rounding.
        target = np.minimum(capacity, rows).astype(np.float64)
        self.problem: Problem = (scores, mask, capacity, target, float(target.sum() - z.shape[1] * rows))
        self.log: list[str] = []

    def solve(self, warm: bool) -> tuple[float, float]:
        """Returns the value and the sum of what rows miss."""
        try:
            return self._solve(warm)
        except OverflowError:  # in float64 there is room for what float32 allows; beyond it, lists are done without
            self.prices[:] = 0.0
            if self.problem[0].dtype == np.float32:
                self.problem = (self.problem[0].astype(np.float64), *self.problem[1:])
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
            lists, settled = self._collect(radius)
            ended, value, gap = self._solve_contested(lists, settled, mu, radius)
            if ended == _solve.PROVED:
                return value, gap
            no_wider = ended != _newton.LOST and len(lists[0]) > NEARLY_ALL * len(self.z)
            if no_wider or not 0 < radius.max() < np.inf:
                break
            radius *= WIDER
        if ended == _newton.LOST:
            self.prices[:] = start
        return self._solve_listed()

    def _start(self, warm: bool) -> tuple[Floats, int]:
        """Finds prices from samples.

        Returns:
            How far each price may still move; and how the last descent ended.
        """
        radius = np.empty(len(self.prices))
        status, origin = _start.start_prices(self.problem, warm, self.prices, radius, self.z)
        if status == _start.OVERFLOWED:
            self._refuse_illegal_rows()
            raise OverflowError  # rows are legal, but scores less prices are not finite
        self.log.append(f"start from {('equal', 'given', 'sampled')[origin]} prices: {status}")
        return radius, status

    def _collect(self, radius: Floats) -> tuple[Lists, Settled]:
        """Tells settled rows from contested ones, which have the experts within the radius as candidates."""

        def collect(start: int, stop: int) -> tuple[Lists, Settled, int]:
            return _contested.collect(self.problem, self.prices, radius, start, stop, 1, self.z)

        blocks = cut(len(self.z), BLOCK_ROWS)
        parts = run_blocks(collect, blocks) if self.parallel else [collect(*block) for block in blocks]
        if any(illegal >= 0 for _, _, illegal in parts):
            self._refuse_illegal_rows()
            raise OverflowError  # rows are legal, but scores less prices are not finite
        return _join([lists for lists, _, _ in parts]), _add([settled for _, settled, _ in parts])

    def _solve_contested(self, lists: Lists, settled: Settled, mu: float, radius: Floats) -> tuple[int, float, float]:
        """Returns how it ended, the value, and what rows miss."""
        ended, value, gap, chains, few = _solve.solve_contested(
            self.problem, lists, settled, mu, self.prices, radius, self.z
        )
        self.log.append(f"{len(lists[0])} rows, newton from {mu:.3g}, {few} rows: {ended}, {chains} chains")
        return ended, value, gap

    def _list_all(self) -> Lists:
        """Makes every expert a candidate of every row."""
        scores, mask, capacity = self.problem[:3]
        self.prices[capacity == 0] = np.inf
        self.z[:] = -1
        lists, illegal = _contested.all_candidates(scores, mask, capacity, self.z.shape[1])
        if illegal >= 0:
            raise illegal_scores(scores, capacity, self.z.shape[1], illegal, self.index)
        return lists

    def _refuse_illegal_rows(self) -> None:
        row = _contested.illegal_row(self.problem, self.z.shape[1])
        if row >= 0:
            raise illegal_scores(self.problem[0], self.problem[2], self.z.shape[1], row, self.index)

    def _solve_listed(self) -> tuple[float, float]:
        """Chains alone, with all candidates: the last resort. Returns the value and what rows miss."""
        scores, mask, capacity, target, _ = self.problem
        lists = self._list_all()
        held, inside = np.empty(len(lists[3]), np.bool_), np.empty(len(self.prices), np.bool_)
        stuck, chains = _flow.exact_flow(lists, target.astype(np.int64), self.prices, held, inside)
        self.log.append(f"all rows: {chains} chains")
        _books.take_held(lists, held, self.z)
        if stuck >= 0:
            raise no_room(scores, mask, capacity, self.z, stuck, self.index)
        return _books.prove(scores, lists[0], capacity, self.prices, self.z)[:2]


def _join(parts: list[Lists]) -> Lists:
    if len(parts) == 1:
        return parts[0]
    rows, need, firsts, cols, vals = zip(*parts, strict=True)
    begins = np.cumsum([0] + [first[-1] for first in firsts])
    first = [first[:-1] + begin for first, begin in zip(firsts, begins[:-1], strict=True)]
    return (
        np.concatenate(rows),
        np.concatenate(need),
        np.concatenate([*first, begins[-1:]]),
        np.concatenate(cols),
        np.concatenate(vals),
    )


def _add(parts: list[Settled]) -> Settled:
    if len(parts) == 1:
        return parts[0]
    counts, leads = zip(*parts, strict=True)
    return np.sum(counts, axis=0), np.minimum.reduce(leads)
