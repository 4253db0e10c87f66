# SPDX-License-Identifier: Apache-2.0
"""The default solver on the CPU: find prices, settle rows, solve what is left, prove.

The order of work for one large problem, with the file of `_kernels` that each part is in:

1. Prices. Equal ones if a sample of the rows accepts them, those of a warm start if it accepts those, else Newton
   steps (`_newton.py`, `_smoothing.py`) on the sample; then on four times as many rows, and so on.
2. Settle (`_contested.py`). One pass over the matrix. A row whose K-th best offer leads the next by more than prices
   can still move is settled. The rest are contested, with the few candidates that are near.
3. Solve. Newton steps on the contested rows, then exact shortest chains of moves (`_flow.py`): of the few rows whose
   choice these steps left open, and of all contested rows if that does not end in a proof.
4. Prove (`_books.py`). No settled row has a better offer if its lead covers the difference of the final prices; the
   least lead for each pair of experts was noted in the pass. Contested rows are read once more.

If prices move further than candidates were listed for, or a row has a better offer, the pass is repeated with a larger
radius: where rows come in clusters, scores have a low rank or sigmoids saturate. The last resort is chains of moves
with all candidates, and that is what problems of few rows begin with (`_place.py`).

`docs/assignment.md` has the derivation. Legend: b problems, n rows, k experts, K experts a row, m contested rows.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise._core._threads import cut, run_blocks
from equipoise.assignment._infeasible import check_start, find_illegal_row, illegal_scores, no_room
from equipoise.assignment._kernels import _books, _contested, _newton, _place, _smoothing
from equipoise.assignment._kernels._records import Counts, Flags, Floats, Ints, Lists, Problem, Scores, Settled

# With so many rows, or no more than experts, chains alone take less time than the passes that save work on many rows.
SMALL_ROWS = 128
# Rows that one thread reads at a time; results do not depend on it.
BLOCK_ROWS = 8192
# Rows of the first sample, for each expert and at least; each next sample has four times as many. With 256 at least,
# 4,096 x 16 is 10% faster, but one of 30 matrices of 8,192 x 16 took 25 times as long.
SAMPLE_ROWS, LEAST_SAMPLE, FINER = 16, 1024, 4
# Rows that tell how far offers differ.
SPREAD_ROWS = 64
# Where offers differ by less, what is computed from the differences would lose its digits.
TINY = 1e-280
# The radius of the first sample, as a part of what a row's offers differ by. With 3/8 of it 4,096 x 64 takes 1.25 times
# as long; with 1/6 one matrix in ten with spare capacity takes twice as long.
FIRST_RADIUS = 1 / 4
# How far a price may still move: this part of the largest of k normal errors, sqrt(2 log k) standard deviations of what
# the rows that were asked leave unknown of a price.
RADIUS = 0.7
# The first width of the smoothing, as a part of the radius: candidates that are further away have next to no share.
FIRST_MU = 1 / 3
# So much wider is the radius where prices are lost. With 8, scores of rank 2 take 1.4 times as long.
WIDER = 4
# Passes over samples and the matrix after which every expert becomes a candidate of every row.
MOST_PASSES = 24


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


def _solve_small(
    s: Scores, rows: Flags, c: Counts, p: Floats, z: Ints, value: Floats, gap: Floats, first: int = 0
) -> None:
    """Solves a batch with every expert a candidate of every row; `first` is the number of its first problem."""
    b, n, k = s.shape
    status = np.empty(b, np.int32)

    def solve(start: int, stop: int) -> None:
        _place.solve_small(s, rows, c, start, stop, p, z, value, gap, status)

    run_blocks(solve, cut(b, max(1, BLOCK_ROWS * 4 // (n * k + 1))))
    for i in np.flatnonzero(status >= 0)[:1]:
        if status[i] < n:
            raise illegal_scores(s[i], c[i], z.shape[2], int(status[i]), int(i) + first)
        raise no_room(s[i], rows[i], c[i], z[i], int(status[i]) - n, int(i) + first)


class _Problem:
    """One large problem on its way to a solution; prices and z are changed in place.

    `log` tells what was done, for tests and for the curious.
    """

    def __init__(
        self, scores: Scores, mask: Flags, capacity: Counts, prices: Floats, z: Ints, index: int, parallel: bool
    ) -> None:
        self.prices, self.z, self.index, self.parallel = prices, z, index, parallel
        self.rows, self.top_k, self.log = int(mask.sum()), z.shape[1], list[str]()
        # Nobody takes more than all rows, whatever the capacity: what is beyond would drown the rest in rounding.
        target = np.minimum(capacity, self.rows).astype(np.float64)
        self.problem: Problem = (scores, mask, capacity, target, float(target.sum() - self.top_k * self.rows))

    def solve(self, warm: bool) -> tuple[float, float]:
        """Returns the value and what rows miss."""
        with np.errstate(all="ignore"):  # what overflows is looked for, and solved at another scale
            return self._solve(warm)

    def _solve(self, warm: bool) -> tuple[float, float]:
        n, k = self.problem[0].shape
        stride = _odd(n // max(SAMPLE_ROWS * k, LEAST_SAMPLE))
        noises, spread = self._start(warm, stride)
        start, radius, deviation = self.prices.copy(), np.full(k, FIRST_RADIUS * spread), np.empty(k)
        if spread == 0:
            stride = 1
        status = _newton.REACHED if spread > 0 else _newton.TIED
        for _ in range(MOST_PASSES):
            before = self.prices.copy()
            lists, settled = self._collect(self.prices, radius, stride)
            left, fixed, mu = lists, settled[0].astype(np.float64), 0.0
            if status != _newton.TIED:  # of tied rows smoothing would tell nothing more
                # A sample cannot tell more than the noise of its counts; of accepted prices, how far they may move.
                noise = np.inf if noises > 0 else 0.25 * math.sqrt(k * self.top_k * self.rows / stride)
                goal = noise if stride > 1 else k / 2
                status, mu, left = self._descend(lists, fixed, stride, goal, radius, deviation)
            if stride > 1 and noises > 0:  # the sample would only add its own noise to accepted prices
                self.prices[:] = before
                radius = _radius(deviation * math.sqrt(2 * noises / stride), 0.0)
                stride, status = 1, _newton.REACHED
            elif status == _newton.LOST:
                radius *= WIDER
            elif stride > 1:
                radius = _radius(deviation, _smoothing.REACH * mu if status == _newton.TIED else 0.0)
                stride = 1 if stride < 3 * FINER or status == _newton.TIED else _odd(stride // FINER)
            else:
                # The few rows that Newton steps left; if that does not end in a proof, all contested ones.
                parts = [(left, fixed), (lists, settled[0])]
                for part, taken in parts if left is not lists else parts[1:]:
                    proved, value, gap = self._place(lists[0], part, taken, settled[1])
                    if proved:
                        return value, gap
                if len(lists[0]) == self.rows:
                    break
                radius *= 2  # prices are nearly right
            if not 0 < radius.max() < np.inf:
                break
        if status == _newton.LOST or np.isnan(self.prices).any():
            self.prices[:] = start
        return self._solve_whole()

    def _start(self, warm: bool, stride: int) -> tuple[int, float]:
        """Finds prices to start from: equal, given or rough ones.

        Returns:
            Of how many draws of rows the prices bear the noise, if a sample accepts them, else 0; and how far offers
            differ that a row might take.
        """
        capacity, prices = self.problem[2], self.prices
        given = prices.copy()
        prices[:] = np.where(capacity == 0, np.inf, 0.0)
        given += prices
        given -= given.min()
        noises, origin = 1, "equal"
        if not self._accepts(prices, stride):
            noises, origin = 0, "sampled"
            if warm and self._accepts(given, stride):
                noises, origin = 2, "given"  # that of these rows, and of those that the prices come from
                prices[:] = given
        spread = self._spread()
        if noises == 0 and spread > 0:  # at so large a width few rows tell enough
            _smoothing.open_with_sinkhorn(self.problem, FINER * stride - 1, self.top_k, prices, spread / 2)
        self.log.append(f"start from {origin} prices, offers differ by {spread:.3g}")
        return noises, spread

    def _accepts(self, prices: Floats, stride: int) -> bool:
        """Whether the rows of a sample would choose experts as often as they have room, but for chance."""
        (_, need, *_), (counts, _) = self._collect(prices, np.zeros(len(prices)), stride)
        tied = float(need.sum())
        taken = counts.sum() + tied
        lacking = self.problem[3] * (taken / max(1, self.top_k * self.rows)) - counts
        dear = (prices > prices.min()) & (prices < np.inf)  # where the price is least, slots may stay free
        wrong = max(-lacking.clip(max=0.0).sum(), lacking[dear].clip(min=0.0).sum() - tied)
        # By chance alone 0.4 sqrt(taken k) are, with a standard deviation of 0.3 sqrt(taken).
        return bool(wrong <= 0.4 * math.sqrt(taken * len(prices)) + 0.9 * math.sqrt(taken))

    def _spread(self) -> float:
        """How far offers differ that a row might take: the best and the one of the upper quartile, in the median row.

        Not the mean: many routers bar an expert with a huge negative score.
        """
        scores, mask = self.problem[:2]
        step, left = max(1, len(mask) // SPREAD_ROWS), len(self.prices) - self.top_k
        if left == 0:
            return 0.0
        offers = -np.sort(self.prices - scores[::step][mask[::step]], axis=1)[:, : self.top_k + 1 + left // 4]
        chooses = offers[:, self.top_k] > -np.inf
        last = np.where(offers > -np.inf, offers, np.inf).min(1)
        apart = np.sort((offers[:, 0] - last)[chooses])
        spread = float(apart[len(apart) // 2]) if len(apart) else 0.0
        if not (spread == 0 or TINY < spread < np.inf):
            raise self._overflow()
        return spread

    def _collect(self, prices: Floats, radius: Floats, stride: int) -> tuple[Lists, Settled]:
        """Tells settled rows from contested ones, which have the experts within the radius as candidates."""

        def collect(start: int, stop: int) -> tuple[Lists, Settled, int]:
            return _contested.collect(self.problem, prices, radius, start, stop, stride, self.z)

        n = len(self.z)
        blocks = cut(n, BLOCK_ROWS if stride == 1 else n)
        parts = run_blocks(collect, blocks) if self.parallel else [collect(*block) for block in blocks]
        if any(illegal >= 0 for _, _, illegal in parts):
            raise self._overflow()
        return _join([lists for lists, _, _ in parts]), _add([settled for _, settled, _ in parts])

    def _descend(
        self, lists: Lists, fixed: Floats, stride: int, goal: float, radius: Floats, deviation: Floats
    ) -> tuple[int, float, Lists]:
        """Newton steps on contested rows; returns how they ended, the last width, and the rows that are left."""
        _, mask, _, target, free = self.problem
        prices, mu, part = self.prices, FIRST_MU * radius.min(), float(mask[::stride].sum()) / self.rows
        self.log.append(f"every {stride}: {len(lists[0])} rows")
        own: Any = tuple(x.copy() for x in lists)
        status, mu, left = _newton.descend(
            own, fixed, target * part, free * part, prices, mu, goal, radius, deviation, self.z
        )
        prices -= prices.min()
        self.log[-1] += f", newton to {mu:.3g}: {status}"
        return status, mu, left

    def _place(self, contested: Ints, left: Lists, fixed: Floats | Counts, leads: Scores) -> tuple[bool, float, float]:
        """Chains of moves for the rows that are left; without a proof prices stay as they were."""
        scores, _, capacity, target, _ = self.problem
        before, room = self.prices.copy(), (target - fixed).astype(np.int64)
        ended, chains, value, gap = _place.place(scores, capacity, contested, left, room, leads, self.prices, self.z)
        self.log.append(f"{len(left[0])} of {len(contested)} rows: {ended}, {chains} chains")
        if ended != _place.PROVED:
            self.prices[:] = before
        return ended == _place.PROVED, value, gap

    def _solve_whole(self) -> tuple[float, float]:
        """Chains alone, with all candidates: the last resort."""
        scores, mask, capacity = self.problem[:3]
        value, gap = np.zeros(1), np.zeros(1)
        _solve_small(
            scores[None], mask[None], capacity[None], self.prices[None], self.z[None], value, gap, first=self.index
        )
        self.log.append("all rows")
        return float(value[0]), float(gap[0])

    def _overflow(self) -> ArithmeticError | ValueError:
        """What is wrong where scores less prices are not finite: a row, or the range of the numbers."""
        scores, mask, capacity = self.problem[:3]
        row = find_illegal_row(scores, mask, capacity, self.top_k)
        if row < 0:
            return OverflowError("scores less prices are beyond the largest number of their type, or all but equal")
        return illegal_scores(scores, capacity, self.top_k, row, self.index)


def _odd(x: int) -> int:
    """The largest odd number up to x, or 1: of rows that alternate, every second one tells half."""
    return max(1, x - 1 + x % 2)


def _radius(deviation: Floats, least: float) -> Floats:
    """How far prices may still move that are uncertain by so much."""
    radius = RADIUS * math.sqrt(2 * math.log(len(deviation))) * deviation
    return np.maximum(radius, max(least, np.sort(radius)[len(radius) // 2]))


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
