# SPDX-License-Identifier: Apache-2.0
"""Settle, solve what is left, prove: the exact solver for scores on a device, or spread over several holders.

What reads all scores stays where they are, in torch. Only contested rows travel.

1. Prices (`_price_steps.py`). Newton steps on the smoothed dual of all rows.
2. Settle. A row whose K-th best offer leads the next by more than a radius is settled.
3. Solve. Contested rows are copied to the host and solved there by the compiled solver (`_primal_dual.py`), with the
   capacity that settled rows leave.
4. Prove (`_proof.py`). At the final prices no settled row has a better offer. A row that has one becomes contested, and
   step 3 is repeated.

Where settled rows leave too little room the radius grows; where too many rows are contested, all of them are. In the
end the whole problem is solved on the host, so the result is exact whatever the prices were.

Legend: b problems, n rows, k experts, K experts a row, m contested rows.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from equipoise.assignment._exchange import Alone, Exchange, Meter
from equipoise.assignment._infeasible import check_start
from equipoise.assignment._price_steps import Start, best_experts, count_experts, find_prices
from equipoise.assignment._proof import Proof, prove
from equipoise.assignment._range import Solved

Floats = NDArray[np.float64]

# Radii to choose from, in units of the last step's length: the least one that leaves experts room for settled rows.
LADDER = (1.5, 4.0, 16.0)
# With more contested rows than this part of all, the problem is copied whole.
MOST_CONTESTED = 0.25
# Trips after which it is, too.
MOST_TRIPS = 4
# Entries of a problem below which it is copied at once: to copy so little takes less time than the passes do.
SMALL_ENTRIES = 1 << 14
# A gap of this much of the value, or of the largest score assigned, is rounding.
ROUNDING = 1e-13


class Unsettled(Exception):
    """A problem that cannot be solved from contested rows: its scores are illegal, or leave the rows no room."""


class Problem(NamedTuple):
    """A batch of problems, or the part of one holder.

    Attributes:
        scores: [b, n, k] float32 or float64; finite for masked rows.
        mask: [b, n] or None.
        capacity: [b, k] of the rows of all holders.
        top_k: K.
    """

    scores: Float[Tensor, "b n k"]
    mask: Bool[Tensor, "b n"] | None
    capacity: Int[Tensor, "b k"]
    top_k: int


class Choice(NamedTuple):
    """What rows take at some prices.

    Attributes:
        z: [b, n, K].
        lead: [b, n] by how much the K-th best offer exceeds the next; -inf for masked rows, which are never contested.
        radii: [b, 3] the ladder.
    """

    z: Int[Tensor, "b n K"]
    lead: Float[Tensor, "b n"]
    radii: Float[Tensor, "b 3"]


def settle_in_torch(
    scores: Tensor,
    capacity: Tensor | None,
    mask: Tensor | None,
    prices: Tensor | None,
    top_k: int = 1,
    meter: Meter | None = None,
) -> Solved:
    """Solves a batch of assignment problems exactly, on the device of the scores; see `primal_dual`.

    Args:
        scores: float32 or float64 [..., n, k].
        capacity: int64 [..., k]; or None for ceil(K * rows that are not masked / k).
        mask: bool [..., n] or None.
        prices: floating [..., k] to start from, or None.
        top_k: K.
        meter: counts what is copied.
    """
    meter = Meter() if meter is None else meter
    *batch, n, k = scores.shape
    if n * k <= SMALL_ENTRIES:
        return copy_whole(scores, capacity, mask, prices, top_k, meter)
    flat = scores.reshape(-1, n, k)
    flat_mask = None if mask is None else mask.reshape(-1, n)
    if flat_mask is not None:
        flat = flat.masked_fill(~flat_mask.unsqueeze(-1), 0.0)
    if capacity is None:
        capacity = default_capacity(flat, flat_mask, top_k, Alone()).reshape([*batch, k])
    problem = Problem(flat, flat_mask, capacity.reshape(-1, k), top_k)
    try:
        proof = settle(problem, None if prices is None else prices.reshape(-1, k).double(), Alone(), meter)
    except Unsettled:  # the compiled solver says what is wrong, or finds that nothing is
        return copy_whole(scores, capacity, mask, prices, top_k, meter)
    z = proof.z if flat_mask is None else proof.z.where(flat_mask.unsqueeze(-1), k)
    return (
        z.reshape([*batch, n, top_k]),
        proof.counts.reshape([*batch, k]),
        capacity.clone(),
        scores.new_ones([*batch, n], dtype=torch.bool) if mask is None else mask.clone(),
        proof.value.reshape(batch),
        proof.prices.reshape([*batch, k]),
        proof.gap.reshape(batch),
    )


def copy_whole(
    scores: Tensor, capacity: Tensor | None, mask: Tensor | None, prices: Tensor | None, top_k: int, meter: Meter
) -> Solved:
    """Solves on the host, with all that there is."""
    device = scores.device
    *batch, n, _ = scores.shape
    meter.trips += 1
    meter.rows += int(np.prod(batch)) * n
    given = (x if x is None else meter.read(x) for x in (capacity, mask, prices))
    return tuple(meter.write(x, device) for x in _compiled()(meter.read(scores), *given, top_k))  # pyright: ignore[reportReturnType]


def default_capacity(
    scores: Float[Tensor, "b n k"], mask: Bool[Tensor, "b n"] | None, top_k: int, exchange: Exchange
) -> Int[Tensor, "b k"]:
    """ceil(K * rows / k) with the rows of all holders."""
    b, _, k = scores.shape
    return -(-top_k * count_rows(scores, mask, exchange).long() // k).unsqueeze(-1).expand(b, k)


def settle(problem: Problem, given: Float[Tensor, "b k"] | None, exchange: Exchange, meter: Meter) -> Proof:
    """Solves problems exactly; z of masked rows means nothing.

    Args:
        problem: the problems, or this holder's part of them.
        given: prices to start from.
        exchange: how holders of rows tell each other sums, and hand each other contested rows. Every holder gets the
            same prices, counts, value and gap, and z of its own rows.
        meter: counts what is copied.

    Raises:
        ValueError: capacities are negative or hold too few rows, or given prices are not finite.
        Unsettled: see there.
    """
    rows = count_rows(problem.scores, problem.mask, exchange)
    choice, table = _start(problem, given, rows, exchange, meter)
    if given is not None and np.isinf(least_radii(table)).any():  # prices that no longer fit
        choice, table = _start(problem, None, rows, exchange, meter)
    trips = _Trips(problem, choice, table, exchange, meter)
    while not trips.done.all():
        trips.step()
    assert trips.proof is not None
    return trips.proof


def count_rows(
    scores: Float[Tensor, "b n k"], mask: Bool[Tensor, "b n"] | None, exchange: Exchange
) -> Float[Tensor, "b"]:
    """Rows of all holders that are not masked, for each problem."""
    b, n, _ = scores.shape
    own = torch.full([b], n, dtype=torch.float64, device=scores.device) if mask is None else mask.sum(-1).double()
    return exchange.reduce(own)


class Table(NamedTuple):
    """What the host knows before it copies a row. b problems, 3 radii.

    Attributes:
        capacity: [b, k].
        prices: [b, k]; +inf for closed experts.
        rows: [b].
        radii: [b, 3].
        contested: [b, 3] rows within each radius.
        settled: [b, 3, k] rows that each expert has beyond each radius.
    """

    capacity: Floats
    prices: Floats
    rows: Floats
    radii: Floats
    contested: Floats
    settled: Floats


def _start(
    problem: Problem, given: Tensor | None, rows: Tensor, exchange: Exchange, meter: Meter
) -> tuple[Choice, Table]:
    """Finds prices, what rows take at these, and how many are contested; waits for the device once."""
    scores, mask, capacity, top_k = problem
    k = scores.shape[-1]
    # Nobody takes more than all rows, whatever the capacity.
    target = torch.minimum(capacity.double(), rows.unsqueeze(-1))
    free = (target.sum(-1) - top_k * rows).clamp_min(0.0)
    start = find_prices(scores, mask, target, free, top_k, given, exchange)
    choice, legal = settle_rows(problem, start)
    settled = [count_experts(choice.z, choice.lead > radius.unsqueeze(-1), k) for radius in choice.radii.unbind(-1)]
    settled = exchange.reduce(torch.stack([*settled, legal.unsqueeze(-1).expand(-1, k)], 1))
    parts = [capacity, start.prices, rows.unsqueeze(-1), choice.radii, settled.flatten(1)]
    if given is not None:
        parts.append(given)
    meter.passes += start.passes + 1
    read = meter.read_array(torch.cat([part.double() for part in parts], -1))
    sizes = np.cumsum([k, k, 1, 3, 4 * k])
    c, p, n, radii, settled, given_prices = np.split(read, sizes, 1)
    check_start(
        c.astype(np.int64), (top_k * n[:, 0]).astype(np.int64), given_prices if given is not None else None, top_k
    )
    settled = settled.reshape(-1, 4, k)
    if (settled[:, 3, 0] < n[:, 0]).any():
        raise Unsettled
    contested = n - settled[:, :3].sum(-1) / top_k
    return choice, Table(c, p, n[:, 0], radii, contested, settled[:, :3])


def settle_rows(problem: Problem, start: Start) -> tuple[Choice, Float[Tensor, "b"]]:
    """Lets rows take their best offers; returns that, and how many of this holder's rows are legal."""
    scores, mask, _, top_k = problem
    z, lead = best_experts(scores, start.prices, top_k)
    legal = ~lead.isnan() if mask is None else ~lead.isnan() & mask
    lead = lead if mask is None else lead.masked_fill(~mask, -torch.inf)
    return Choice(z, lead, torch.stack([part * start.radius for part in LADDER], -1)), legal.sum(-1).double()


def least_radii(table: Table) -> Floats:
    """The least radius of each problem that leaves experts room for settled rows; +inf: all rows are contested."""
    fits = (table.settled <= table.capacity[:, None]).all(-1)
    fits &= table.contested <= MOST_CONTESTED * table.rows[:, None]
    fits &= np.isfinite(table.radii)
    chosen = np.take_along_axis(table.radii, fits.argmax(-1)[:, None], 1)[:, 0]
    return np.where(fits.any(-1), chosen, np.inf)


class _Trips:
    """Problems on their way to a proof; a step solves contested rows on the host and looks at all rows again.

    Attributes:
        radius: [b] within which rows are contested.
        done: [b] which problems are solved and proved.
        proof: of the last step.
    """

    def __init__(self, problem: Problem, choice: Choice, table: Table, exchange: Exchange, meter: Meter) -> None:
        self.problem, self.choice, self.table, self.exchange, self.meter = problem, choice, table, exchange, meter
        self.radius, self.done = least_radii(table), np.zeros(len(table.rows), np.bool_)
        self.proof: Proof | None = None
        self._z, self._prices = choice.z, np.where(table.capacity > 0, table.prices, 0.0)
        self._better: Tensor | None = None  # settled rows that had a better offer: contested from then on
        self._trips = 0

    def step(self) -> None:
        """Solves contested rows, and proves the result or finds out which rows are to be contested as well."""
        self._trips += 1
        if self._trips > MOST_TRIPS:
            self.radius[~self.done] = np.inf
        contested, settled = self._contested()
        counts = self.exchange.reduce(count_experts(self._z, settled, self._prices.shape[1]))
        read = self.meter.read_array(torch.cat([counts, contested.sum(-1, keepdim=True)], -1))
        solved = self._solve(contested, self.table.capacity - read[:, :-1], int(read[:, -1].sum()))
        prices = self.meter.write(self._prices, self._z.device)
        scores, mask, capacity, _ = self.problem
        proof = self.proof = prove(scores, mask, self._z, prices, capacity, self.exchange)
        self.meter.passes += 1
        better = settled & (proof.missed > 0)
        number = self.exchange.reduce(better.sum(-1).double())
        gap, value, largest, rows = self.meter.read_array(torch.stack([proof.gap, proof.value, proof.largest, number]))
        proved = (gap <= ROUNDING * np.maximum(abs(value), largest)) | (rows == 0)
        if (solved & np.isinf(self.radius) & ~proved).any():
            raise Unsettled
        self.done |= solved & proved
        self._better = better if self._better is None else self._better | better

    def _contested(self) -> tuple[Tensor, Tensor]:
        """Marks contested and settled rows; all rows of problems that are done are settled."""
        lead = self.choice.lead
        radius = self.meter.write(np.where(self.done, -np.inf, self.radius), lead.device).unsqueeze(-1)
        contested, rows = lead <= radius, lead > -torch.inf
        if self._better is not None:
            contested = contested | (self._better & (radius > -torch.inf))
        return contested & rows, ~contested & rows

    def _solve(self, contested: Tensor, room: Floats, own: int) -> NDArray[np.bool_]:
        """Solves contested rows with the room that settled ones leave; returns for which problems it succeeded."""
        scores, _, _, top_k = self.problem
        b, n, k = scores.shape
        index = _positions(contested.flatten(), own)
        part = torch.cat([scores.reshape(b * n, k)[index], (index // n).to(scores.dtype).unsqueeze(-1)], -1)
        gathered, mine = self.exchange.gather(part)
        rows = self.meter.read(gathered)
        self.meter.trips += 1
        self.meter.rows += len(rows)
        which, z = rows[:, k].long(), torch.zeros([len(rows), top_k], dtype=torch.int64)
        solved = ~self.done
        for i in np.flatnonzero(solved):
            of_problem = which == int(i)
            try:
                z[of_problem] = self._solve_one(rows[of_problem, :k], room[i], int(i))
            except (ValueError, ArithmeticError):
                solved[i] = False
                self._widen(int(i))
                z[of_problem] = 0
        device = scores.device
        self._z = self._z.flatten(0, 1).index_copy(0, index, self.meter.write(z[mine], device)).unflatten(0, [b, n])
        return solved

    def _solve_one(self, rows: Tensor, room: Floats, i: int) -> Tensor:
        start = torch.from_numpy(self._prices[i])
        z, _, _, _, _, prices, _ = _compiled()(
            rows, torch.from_numpy(room.astype(np.int64)), None, start, self.problem.top_k
        )
        self._prices[i] = _merged(prices.numpy(), self._prices[i], room > 0, self.table.capacity[i] > 0)
        return z

    def _widen(self, i: int) -> None:
        """Takes the next radius of the ladder, or all rows; raises where those were contested already."""
        if np.isinf(self.radius[i]):
            raise Unsettled
        wider = self.table.radii[i][self.table.radii[i] > self.radius[i]]
        self.radius[i] = wider[0] if len(wider) else np.inf


def _merged(solved: Floats, before: Floats, with_room: NDArray[np.bool_], not_closed: NDArray[np.bool_]) -> Floats:
    """Final prices of one problem, from those that contested rows lead to.

    They say little about an expert that settled rows fill: only that no contested row prefers it. Such an expert keeps
    its distance from the others, unless contested rows ask for more.
    """
    shift = (solved - before)[with_room].mean() if with_room.any() else -before[not_closed].min(initial=np.inf)
    full = np.maximum(np.maximum(solved, before + shift), 0.0)
    return np.where(with_room, solved, np.where(not_closed, full, 0.0))


def _positions(marked: Bool[Tensor, "n"], number: int) -> Int[Tensor, "m"]:
    """Where so many marks are, in order: `nonzero` for those who know the number, which need not wait for it."""
    place = torch.where(marked, marked.cumsum(0) - 1, number)
    positions = torch.arange(len(marked), device=marked.device)
    return positions.new_zeros(number + 1).scatter_(0, place, positions)[:number]


@functools.cache
def _compiled() -> Callable[..., Solved]:
    # Imported here because importing Numba takes half a second, and because a device may never need it.
    from equipoise.assignment._primal_dual import primal_dual

    return primal_dual
