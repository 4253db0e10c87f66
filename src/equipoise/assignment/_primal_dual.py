# SPDX-License-Identifier: Apache-2.0
"""The default solver on the CPU: exact, and about as fast as an argmax.

The order of work for one problem, each part a compiled kernel (`_kernels`):

1. prices from samples of the rows, coarse to fine (`coarse_prices`), or from a warm start; where few rows say too
   little, from all of them (`all_prices`);
2. one pass over the matrix that settles most rows and lists what the others could still choose (`collect`);
3. Newton steps on the smoothed dual over those choices (`refine`), then exact shortest chains of moves (`exact_flow`).
   Where none leads from an overfull expert to one with room, rows get a choice that does (`open_doors`);
4. the proof, in float64: rows that step 2 settled have no better offer unless prices moved far since, and the others
   are priced entry by entry (`price_rows`). A row with a better offer among what step 2 left out gets it back
   (`reinstate`), and the exact part of step 3 runs again. When there is no such row, no row could do better at these
   prices: primal and dual values agree.

Small problems skip to the exact part with every expert a candidate of every row. `docs/assignment.md` has the
derivation. Legend: b problems, n rows, k experts.
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
from equipoise.assignment._kernels import (
    _amend,
    _choices,
    _collect,
    _descent,
    _flow,
    _pricing,
    _samples,
    _smoothing,
    _solve,
)

Matrix = NDArray[np.floating[Any]]
Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

# Below this many entries, or rows for each expert, the passes that save work on a large problem cost more than it has.
DIRECT_ENTRIES = 8192
DIRECT_ROWS_PER_EXPERT = 4
BLOCK_ROWS = 8192
# Experts that share no rows with others within the radius, or only within these parts of it, are found in this order.
GROUP_REACHES = np.array([1, 1 / 8, 1 / 64])
# Where prices were hard to find, the last lists of candidates reach so many of the last mu.
CHAIN_REACH = 64.0


def primal_dual(
    scores: Tensor, capacity: Tensor | None, mask: Tensor | None, prices: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Solves a batch of assignment problems exactly.

    Args:
        scores: float32 or float64 [..., n, k] on the CPU.
        capacity: int64 [..., k]; or None for ceil(rows that are not masked / k).
        mask: bool [..., n] or None.
        prices: floating [..., k] to start from, or None.

    Returns:
        z and counts, int64, with z = k for masked rows; capacity and mask, of its own; value, prices and gap, float64.

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
        c[:] = -(-n // k) if mask is None else -(-rows.sum(1, keepdims=True) // k)
    p = np.zeros((b, k)) if prices is None else _own_copy(prices).reshape(b, k)
    if not _solve.can_start(c, rows, mask is not None, p):
        check_start(c.reshape(*batch, k), np.asarray(rows.reshape(*batch, n).sum(-1)), p)
    z = np.empty((b, n), np.int32)
    value, gap = np.zeros(b), np.zeros(b)
    if k == 2 or n * k <= DIRECT_ENTRIES or n <= DIRECT_ROWS_PER_EXPERT * k:
        _solve_directly(s, rows, c, p, z, value, gap)
    else:
        parallel = b < torch.get_num_threads()

        def solve(start: int, stop: int) -> None:
            for i in range(start, stop):
                problem = _Problem(s[i], rows[i], c[i], p[i], z[i], i, parallel)
                value[i], gap[i] = problem.solve(warm=prices is not None)

        _ = solve(0, b) if parallel or b == 1 else run_blocks(solve, cut(b, 1))
    z_out, counts = np.empty((b, n), np.int64), np.zeros((b, k), np.int64)
    _pricing.close_books(z, c, p, z_out, counts, gap)
    return (
        torch.from_numpy(z_out.reshape(*batch, n)),
        torch.from_numpy(counts.reshape(*batch, k)),
        torch.from_numpy(c.reshape(*batch, k)),
        torch.from_numpy(rows.reshape(*batch, n)),
        torch.from_numpy(value.reshape(batch)),
        torch.from_numpy(p.reshape(*batch, k)),
        torch.from_numpy(gap.reshape(batch)),
    )


def _own_copy(prices: Tensor) -> Floats:
    # Most are float64 already; to have torch find that out takes as long as the copy.
    return (prices if prices.dtype is torch.float64 else prices.double()).numpy().copy()


def _solve_directly(
    s: Matrix, rows: NDArray[np.bool_], c: NDArray[np.int64], p: Floats, z: Ints, value: Floats, gap: Floats
) -> None:
    b, n, k = s.shape
    status = np.empty(b, np.int32)

    def solve(start: int, stop: int) -> None:
        _solve.solve_direct(s, rows, c, start, stop, p, z, value, gap, status)

    run_blocks(solve, cut(b, max(1, BLOCK_ROWS * 4 // (n * k + 1))))
    for i in np.flatnonzero(status >= 0)[:1]:
        if status[i] < n:
            raise illegal_scores(s[i], c[i], int(status[i]), int(i))
        raise no_room(s[i], rows[i], c[i], z[i], int(status[i]) - n, int(i))


class _Start(NamedTuple):
    """Where the exact part begins: rows with a choice, rows without, how far candidates are, what counts as tied."""

    choices: _choices.Choices
    settled: Floats
    radius: float
    slop: float


@dataclass
class _Problem:
    """One large problem on its way to a solution; prices and z are changed in place.

    `listing` is what the last pass that collected choices found out about the rows.
    """

    scores: Matrix
    mask: NDArray[np.bool_]
    capacity: NDArray[np.int64]
    prices: Floats
    z: Ints
    index: int
    parallel: bool
    listing: _collect.Listing = field(init=False)

    @property
    def slack(self) -> bool:
        """Whether slots will be left."""
        return bool(self.capacity.sum() > self.mask.sum())

    def solve(self, warm: bool) -> tuple[float, float]:
        """Returns the value and the sum of the rows' regrets."""
        try:
            return self._solve_from_lists(warm)
        except OverflowError:  # in float64 there is room for what float32 allows; beyond it, lists are done without
            if self.scores.dtype == np.float32:
                self.scores = self.scores.astype(np.float64)
                return self._solve_cold()
            self.prices[:] = 0.0
            _solve.close_experts(self.capacity, self.prices)
            return self._solve_with_all_choices()[:2]

    def _solve_from_lists(self, warm: bool) -> tuple[float, float]:
        """Raises OverflowError if an offer is beyond what the scores' precision can express."""
        if len(self.z) <= BLOCK_ROWS:
            solved, value, regret, mu, kept = _solve.solve_usual(
                self.scores, self.mask, self.capacity, warm, self.prices, self.z
            )
            if solved:
                return value, regret
            start = None
        else:
            start, mu, kept = self._start_from_samples(warm)
        if start is None and kept and mu == 0:  # else the start was forgotten before these prices were found
            return self._solve_cold()
        if start is None:
            slack = self.slack
            radius, tied = self._all_prices(mu, slack)
            if tied:
                self._refuse_illegal_rows()
                value, regret, wrong = self._solve_with_all_choices(slop=radius)
                if len(wrong) == 0:
                    return value, regret
            start = self._start_from_all_rows(slack, radius)
        value, regret, wrong = self._finish_widening(start)
        if warm and len(wrong) > 0:  # a start so far off that rounding swallowed the scores
            return self._solve_cold()
        return value, regret

    def _solve_cold(self) -> tuple[float, float]:
        """Once more without a warm start that led nowhere."""
        self.prices[:] = 0.0
        return self.solve(warm=False)

    def _start_from_samples(self, warm: bool) -> tuple[_Start | None, float, bool]:
        """The usual case, in blocks of rows.

        Returns:
            None where samples are not enough; the mu they led to, if they did; and whether a warm start's prices are in
            use.
        """
        n, k = self.scores.shape
        target = self.capacity.astype(np.float64)
        slack, radius = _solve.prepare(self.scores, self.mask, self.capacity, target, warm, self.prices)
        kept = warm and radius < 0
        if radius < 0:
            radius, mu = _solve.coarse_prices(self.scores, self.mask, target, slack, warm, self.prices, self.z)
            if mu > 0:
                return None, mu, kept
        choices, settled, excess, _ = self._refine(radius, _solve.FIRST_MU * radius, target, slack, _solve.goal_of(k))
        start = _Start(choices, settled, radius, 0.0) if _solve.near_balance(excess, n, k) else None
        return start, 0.0, kept

    def _start_from_all_rows(self, slack: bool, radius: float) -> _Start:
        """Lists of candidates within a radius of prices that are good already."""
        target, goal, before = self.capacity.astype(np.float64), _solve.goal_of(len(self.prices)), self.prices.copy()
        choices, settled, excess, mu = self._refine(radius, radius / _descent.LIST_REACH, target, slack, goal)
        for reach in radius * GROUP_REACHES:
            if 0 <= excess <= goal:
                break
            # What is left may be between experts that share no rows at a small mu.
            if excess < 0:
                self._return_to(before)
            choices, settled = self._collect(reach)
            mu = reach / _descent.REACH
            if _solve.shift_listed_groups(self.scores, self.mask, choices, settled, target, slack, mu, self.prices):
                radius, before = reach, self.prices.copy()
                choices, settled, excess, mu = self._refine(reach, mu, target, slack, goal)
        if excess < 0:
            self._return_to(before)
        else:  # every chain of moves may be long here, and needs rows to choose from at each of its links
            radius = min(radius, CHAIN_REACH * mu)
        choices, settled = self._collect(radius)
        largest = float(np.max(self.prices, where=np.isfinite(self.prices), initial=0.0))
        return _Start(choices, settled, radius, 1e-12 * (radius + largest))

    def _all_prices(self, mu: float, slack: bool) -> tuple[float, bool]:
        """Prices from all rows, from those of a sample (where it led to mu) or from none.

        Returns:
            The radius for candidates, and whether rows are tied between more experts than a list has room for.
        """
        n, k = self.scores.shape
        target = self.capacity.astype(np.float64)
        if mu == 0:
            self.prices[:] = 0.0
            _solve.close_experts(self.capacity, self.prices)
            mu, spread = _solve.first_prices(self.scores, self.mask, target, slack, self.prices)
            if not spread > 0:
                return 0.0, True
        else:  # of scores, not of offers: these differ by next to nothing where all rows are alike
            equal = np.where(np.isinf(self.prices), np.inf, 0.0)
            spread = _smoothing.mean_spread(self.scores, self.mask, max(1, n // 64), equal)
        stride, least = _samples.coarse_stride(n, k), _solve.LEAST_MU * spread
        return _descent.all_prices(self.scores, self.mask, stride, target, slack, self.prices, mu, least)

    def _finish_widening(self, start: _Start) -> tuple[float, float, Ints]:
        """The exact part; with candidates from further away where they turn out too few, in the end with all."""
        choices, settled, radius, slop = start
        prices = self.prices.copy()
        for _ in range(2):
            result = self._finish(choices, settled, radius, slop)
            if result is not None:
                return *result, np.empty(0, np.int32)
            radius *= 8
            if self._crowded(radius):
                break
            self.prices[:] = prices
            choices, settled = self._collect(radius)
        self._return_to(prices)
        return self._solve_with_all_choices()

    def _crowded(self, radius: float) -> bool:
        return _descent.crowd(self.scores, self.mask, self.prices, radius) > _descent.MANY_CANDIDATES

    def _return_to(self, prices: Floats) -> None:
        """Takes earlier prices back if they are nearer to balance: a search among too few candidates leads astray."""
        target, slack = self.capacity.astype(np.float64), self.slack
        now = _samples.held_out(self.scores, self.mask, 1, target, slack, self.prices)
        if _samples.held_out(self.scores, self.mask, 1, target, slack, prices) < now:
            self.prices[:] = prices

    def _refuse_illegal_rows(self) -> None:
        row = _solve.illegal_row(self.scores, self.mask, self.capacity)
        if row >= 0:
            raise illegal_scores(self.scores, self.capacity, row, self.index)

    def _refine(
        self, radius: float, mu: float, target: Floats, slack: bool, goal: float
    ) -> tuple[_choices.Choices, Floats, float, float]:
        """Collects choices and refines prices, again if they move out of the radius; the rest is `_solve.refine`'s."""
        choices, settled = self._collect(radius)
        excess, last = 0.0, mu
        for _ in range(_solve.MOST_DRIFTS if radius > 0 else 0):
            choices, excess, last = _solve.refine(
                choices, settled, target, slack, 1, radius, mu, goal, self.prices, self.z
            )
            if excess != _solve.DRIFTED:
                break
            choices, settled = self._collect(radius)
        return choices, settled, excess, last

    def _collect(self, radius: float) -> tuple[_choices.Choices, Floats]:
        n, k = self.scores.shape
        choices = _choices.room_for_choices(self.scores, n)
        self.listing = _collect.new_listing(self.scores, self.prices, radius)

        def collect(start: int, stop: int) -> tuple[int, int, Floats]:
            settled = np.zeros(k)
            m, illegal = _collect.collect(
                self.scores, self.mask, self.listing, start, stop, 1, choices, start, settled, self.z
            )
            return m, illegal, settled

        blocks = self._blocks()
        found = run_blocks(collect, blocks) if self.parallel else [collect(*block) for block in blocks]
        for _, illegal, _ in found:
            if illegal >= 0:
                self._refuse_illegal_rows()
                raise OverflowError  # the row is legal, but scores less prices are not finite
        sizes = np.array([m for m, _, _ in found])
        _choices.close_ranks(choices, np.array([start for start, _ in blocks]), sizes)
        return _choices.first(choices, sizes.sum()), np.sum([settled for _, _, settled in found], axis=0)

    def _finish(
        self, choices: _choices.Choices, settled: Floats, radius: float, slop: float
    ) -> tuple[float, float] | None:
        """Exact flow on the choices until no row has a better offer elsewhere.

        Returns:
            Value and regret; or None if too many rows want what is not among their choices.
        """
        distance, seated = np.empty(len(self.prices)), 0
        for _ in range(_solve.MOST_ROUNDS):
            stuck = _flow.exact_flow(choices, settled, self.capacity, self.prices, self.z, slop, seated, distance)
            if stuck >= 0:
                choices, opened = _amend.open_doors(
                    self.scores, self.capacity, self.prices, distance, choices, settled, self.z
                )
                if opened == 0:
                    raise no_room(self.scores, self.mask, self.capacity, self.z, stuck, self.index)
                seated = len(choices.rows)
                _collect.enlist(self.listing, choices.rows)
                continue
            value, regret, wrong = self._price()
            if len(wrong) == 0:
                return value, regret
            if len(wrong) > len(self.z) // 32:
                return None
            choices, seated = _amend.reinstate(
                self.scores, self.mask, self.prices, 2 * radius, wrong, choices, settled, self.z
            )
            _collect.enlist(self.listing, wrong)
        return None

    def _price(self) -> tuple[float, float, Ints]:
        """Value, sum of regrets, and the rows that have a better offer, which are none if that sum is rounding."""
        _pricing.final_prices(self.z, self.capacity, self.prices)
        wrong = np.empty(len(self.z), np.int32)

        def price(start: int, stop: int) -> tuple[float, float, float, int]:
            return _pricing.price_rows(self.scores, self.z, self.prices, self.listing, start, stop, wrong)

        blocks = self._blocks()
        parts = run_blocks(price, blocks) if self.parallel else [price(*block) for block in blocks]
        value, regret = sum(part[0] for part in parts), sum(part[1] for part in parts)
        largest = max(part[2] for part in parts)
        if regret <= _solve.ENOUGH * max(abs(value), largest):
            _pricing.finite_prices(self.scores, self.z, self.prices)
            return value, regret, wrong[:0]
        found = [wrong[start : start + part[3]] for (start, _), part in zip(blocks, parts, strict=True)]
        return value, regret, np.concatenate(found)

    def _solve_with_all_choices(self, slop: float = 0.0) -> tuple[float, float, Ints]:
        choices = _choices.all_choices(self.scores, self.mask)
        self.listing = _collect.all_listed(self.scores)
        k = len(self.prices)
        stuck = _flow.exact_flow(choices, np.zeros(k), self.capacity, self.prices, self.z, slop, 0, np.empty(k))
        if stuck >= 0:
            raise no_room(self.scores, self.mask, self.capacity, self.z, stuck, self.index)
        return self._price()

    def _blocks(self) -> list[tuple[int, int]]:
        return cut(len(self.z), BLOCK_ROWS)
