# SPDX-License-Identifier: Apache-2.0
"""The default solver on the CPU: settle, solve what is left, prove.

The order of work for one large problem, each part a compiled kernel (`_kernels`):

1. Prices (`_smoothing.py`): equal ones or those of a warm start if a sample of the rows accepts them (`survey`); else
   from Newton steps on the sample.
2. Settle (`collect`): one pass over the matrix. A row whose K-th best offer leads the next by more than the radius is
   settled. The rest are contested, with the few candidates within the radius.
3. Solve (`descend`, `exact_flow`): Newton steps on the contested rows, then exact shortest chains of moves.
4. Prove: if no two prices have moved apart by more than the radius since the pass, no settled row has a better offer, and
   contested rows sit at their best candidates. Otherwise the pass is repeated at the prices found, and 3 runs again.

Small problems go to step 3 with every expert a candidate of every row. `docs/assignment.md` has the derivation. Legend: b
problems, n rows, k experts, K experts a row.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise._core._threads import cut, run_blocks
from equipoise.assignment._infeasible import check_start, illegal_scores, no_room
from equipoise.assignment._kernels import _books, _contested, _flow, _small, _smoothing

Matrix = NDArray[np.floating[Any]]
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Ints = NDArray[np.int32]

# Below this many entries, or rows for each expert, the passes that save work on a large problem cost more than it has.
SMALL_ENTRIES, SMALL_ROWS = 8192, 4
BLOCK_ROWS = 8192
# Rows of a sample for each expert, and at least.
SAMPLE_ROWS, LEAST_SAMPLE = 16, 1024
# The radius, in standard deviations of what a sample of so many rows leaves unknown of the prices.
RADIUS = 2.0
# The part of a sample whose leads tell how many rows are nearly tied.
NEAR = 0.1


class Lists(NamedTuple):
    rows: Ints
    need: Ints
    first: Counts
    cols: Ints
    vals: Matrix


@dataclass
class _Problem:
    scores: Matrix
    mask: NDArray[np.bool_]
    capacity: Counts
    prices: Floats
    z: Ints
    index: int
    parallel: bool
    log: list = field(default_factory=list)

    def __post_init__(self):
        self.rows = int(self.mask.sum())
        self.top_k = self.z.shape[1]
        self.free = float(self.capacity.sum() - self.top_k * self.rows)
        self.closed = self.capacity == 0
        self.target = self.capacity.astype(np.float64)

    def solve(self, warm: bool):
        n, k = self.scores.shape
        radius = self.start(self.prices.copy() if warm else None)
        for round in range(10):
            if round >= 8:
                radius = np.full(k, np.inf)
            lists, settled, leads = self.collect(radius)
            everything = np.isinf(radius).all()
            if not everything and radius.mean() > 0:
                mu, excess, deviation = self.descend(lists, settled, 1, radius.mean() / 6, k / 2)
                if round < 5 and excess > n / 8 + k:
                    radius = np.maximum(RADIUS * deviation, 4 * radius)
                    continue
            held = np.empty(int(lists.first[-1]), np.bool_)
            room = self.capacity - settled
            stuck, chains = _flow.exact_flow(lists.need, lists.first, lists.cols, lists.vals, room, self.prices, held, 1 << 62)
            self.log.append(f"flow m={len(lists.rows)} nnz={lists.first[-1]} stuck={stuck} chains={chains}")
            if stuck >= 0:
                if everything:
                    raise no_room(self.scores, self.mask, self.capacity, self.z[:, 0], stuck, self.index)
                radius = radius * 4 if radius.max() > 0 else np.full(k, np.inf)
                continue
            if everything or _books.settled_for_sure(leads, self.prices):
                value, gap, ok = self.finish(lists, held)
                if ok or everything:
                    return value, gap
            self.log.append("not proved")
            radius = radius * 2 if radius.max() > 0 else np.full(k, np.inf)
        raise AssertionError

    def finish(self, lists, held):
        k = len(self.prices)
        counts = np.empty(k, np.int64)
        _books.take_held(lists.rows, lists.need, lists.first, lists.cols, held, self.z)
        _books.count_all(self.z, counts)
        _books.rest_prices(self.prices, counts, self.capacity)
        value, largest = _books.total_value(self.scores, self.z, self.prices)
        gap, most = _books.missed(self.scores, lists.rows, self.z, self.prices)
        _books.close_prices(self.scores, self.z, self.capacity, self.prices)
        return value, gap, gap <= 1e-10 * max(abs(value), largest)

    def descend(self, lists, settled, stride, mu, goal, most=_smoothing.MOST_STEPS):
        before = self.prices.copy()
        deviation = np.empty(len(before))
        mu, excess, steps = _smoothing.descend(
            lists.need.copy(), lists.first.copy(), lists.cols.copy(), lists.vals.copy(), settled.astype(np.float64),
            self.target / stride, self.free / stride, self.prices, mu, mu * 1e-6, goal, most, deviation)
        self.log.append(f"  newton stride={stride} m={len(lists.rows)} nnz={lists.first[-1]} steps={steps} excess={excess:.1f} mu={mu:.3g} drift={self.drift(before):.4g} dev={np.median(deviation):.3g},{deviation.max():.3g}")
        return mu, excess, deviation

    def drift(self, listed):
        open_ = ~self.closed
        change = self.prices[open_] - listed[open_]
        return float(change.max() - change.min()) if len(change) else 0.0

    def survey(self, prices, stride):
        n, k = self.scores.shape
        counts = np.empty(k)
        asked = _contested.survey(self.scores, self.mask, prices.astype(self.scores.dtype), stride, self.top_k, counts)
        target = self.target * (asked / self.rows)
        over = np.maximum(counts - target, 0).sum()
        if self.free > 0:
            over = max(over, (np.maximum(target - counts, 0) * (prices > 0)).sum())
        chance = 0.4 * math.sqrt(asked * self.top_k * k) + 0.9 * math.sqrt(asked * self.top_k)
        self.log.append(f"survey asked={asked} over={over:.1f} chance={chance:.1f}")
        return over <= chance

    def start(self, given):
        n, k = self.scores.shape
        stride = max(1, n // max(SAMPLE_ROWS * k, LEAST_SAMPLE))
        self.prices[:] = np.where(self.closed, np.inf, 0.0)
        good = self.survey(self.prices, stride)
        if not good and given is not None:
            given[self.closed] = np.inf
            given -= given.min()
            good = self.survey(given, stride)
            if good:
                self.prices[:] = given
        mu = _contested.mean_spread(self.scores, self.mask, self.prices.astype(self.scores.dtype), max(1, n // 64)) / 4
        if mu == 0:
            return np.zeros(k)
        if good:
            lists, settled, _ = self.collect(np.full(k, 3 * mu / 4), stride)
            _, _, deviation = self.descend(lists, settled, stride, mu / 4, 0, 0)
            return RADIUS * deviation
        _smoothing.open_with_sinkhorn(self.scores, self.mask, stride, self.top_k, self.target / stride, self.free / stride, self.prices, mu, 3)
        mu /= 4
        radius = np.full(k, 3 * mu)
        while True:
            lists, settled, _ = self.collect(radius, stride)
            _, _, deviation = self.descend(lists, settled, stride, mu, 0.25 * math.sqrt(k * self.rows / stride))
            radius = RADIUS * deviation
            if stride < 16: return radius
            stride //= 4
            mu = radius.mean() / 6

    def collect(self, radius, stride=1):
        n, k = self.scores.shape
        kind = self.scores.dtype
        with np.errstate(invalid="ignore"):
            low = np.where(self.closed, np.inf, self.prices - radius).astype(kind)
            high = np.where(self.closed, np.inf, self.prices + radius).astype(kind)
        if np.isinf(radius).all(): low, high = np.where(self.closed, np.inf, -np.finfo(kind).max/4).astype(kind), np.where(self.closed, np.inf, 0).astype(kind)
        def work(start, stop):
            size = -(-(stop - start) // stride)
            settled = np.zeros(k, np.int64)
            rows, need, first = np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size + 1, np.int64)
            cols, vals = np.empty(size * k, np.int32), np.empty(size * k, self.scores.dtype)
            leads = np.full((k, k), np.inf, kind)
            m, illegal = _contested.collect(self.scores, self.mask, low, high, start, stop, stride, self.z, settled, rows, need, first, cols, vals, leads)
            e = first[m]
            return (rows[:m], need[:m], first[: m + 1], cols[:e], vals[:e]), settled, leads, illegal
        blocks = cut(n, BLOCK_ROWS * stride)
        parts = run_blocks(work, blocks) if self.parallel else [work(*b) for b in blocks]
        for _, _, _, illegal in parts:
            if illegal >= 0:
                raise illegal_scores(self.scores, self.capacity, illegal, self.index)
        settled = sum(p[1] for p in parts)
        leads = parts[0][2] if len(parts) == 1 else np.minimum.reduce([p[2] for p in parts])
        if len(parts) == 1:
            return Lists(*parts[0][0]), settled, leads
        first = [parts[0][0][2]]
        for p in parts[1:]:
            first.append(p[0][2][1:] + first[-1][-1])
        cat = [np.concatenate([p[0][t] for p in parts]) for t in (0, 1, 3, 4)]
        return Lists(cat[0], cat[1], np.concatenate(first), cat[2], cat[3]), settled, leads


def primal_dual(scores, capacity, mask, prices, top_k=None, log=None):
    *batch, n, k = scores.shape
    b = math.prod(batch)
    kk = 1 if top_k is None else top_k
    s = np.ascontiguousarray(scores.numpy()).reshape(b, n, k)
    rows = np.empty((b, n), np.bool_)
    rows[:] = True if mask is None else mask.numpy().reshape(b, n)
    c = np.empty((b, k), np.int64)
    if capacity is not None:
        c[:] = capacity.numpy().reshape(b, k)
    else:
        c[:] = -(-kk * n // k) if mask is None else -(-kk * rows.sum(1, keepdims=True) // k)
    p = np.zeros((b, k)) if prices is None else prices.double().numpy().copy().reshape(b, k)
    check_start(c.reshape(*batch, k), kk * np.asarray(rows.reshape(*batch, n).sum(-1)), p)
    z = np.empty((b, n, kk), np.int32)
    value, gap = np.zeros(b), np.zeros(b)
    if k == 2 or n * k <= SMALL_ENTRIES or n <= SMALL_ROWS * k:
        status = np.empty(b, np.int32)
        def small(start, stop):
            _small.solve_small(s, rows, c, start, stop, p, z, value, gap, status)
        run_blocks(small, cut(b, max(1, BLOCK_ROWS * 4 // (n * k + 1))))
        for i in np.flatnonzero(status >= 0)[:1]:
            if status[i] < n:
                raise illegal_scores(s[i], c[i], int(status[i]), int(i))
            raise no_room(s[i], rows[i], c[i], z[i, :, 0], int(status[i]) - n, int(i))
    else:
        parallel = b < torch.get_num_threads()
        def solve(start, stop):
            for i in range(start, stop):
                problem = _Problem(s[i], rows[i], c[i], p[i], z[i], i, parallel)
                if log is not None: problem.log = log
                value[i], gap[i] = problem.solve(warm=prices is not None)
        _ = solve(0, b) if parallel or b == 1 else run_blocks(solve, cut(b, 1))
    counts = np.zeros((b, k), np.int64)
    for i in range(b):
        _books.count_all(z[i], counts[i])
    zz = z.astype(np.int64)
    zz[zz < 0] = k
    shape = (*batch, n) if top_k is None else (*batch, n, kk)
    return tuple(map(torch.from_numpy, (zz.reshape(shape), counts.reshape(*batch, k), c.reshape(*batch, k), rows.reshape(*batch, n), value.reshape(batch), p.reshape(*batch, k), gap.reshape(batch))))
