# SPDX-License-Identifier: Apache-2.0
"""Settle, solve what is left, prove: the same result as the compiled solver, and few rows that travel."""

import math
import threading
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import equipoise as eq
from equipoise.assignment import _price_steps, _settle, assign_with_traffic
from equipoise.assignment._exchange import Alone, Meter
from equipoise.assignment._proof import prove
from support.families import FAMILIES, draw_scores

N, K = 1500, 16


def same_result(scores: Tensor, *args: object, top_k: int | None = None, **options: object) -> eq.Assignment:
    """Solves by both ways, and compares what both must agree on."""
    expected = eq.assign(scores, *args, top_k=top_k, **options)  # pyright: ignore[reportArgumentType]
    found = eq.assign(scores, *args, top_k=top_k, method="settle", **options)  # pyright: ignore[reportArgumentType]
    largest = scores.double().where(scores.isfinite(), 0.0).abs().amax((-2, -1))
    scale = torch.maximum(expected.value.abs(), largest)
    assert bool(((found.value - expected.value).abs() <= 1e-12 * scale).all())
    assert bool((found.gap <= 1e-12 * scale).all()), found.gap
    assert bool((found.counts <= found.capacity).all())
    assert torch.equal(found.capacity, expected.capacity)
    assert torch.equal(found.mask, expected.mask)
    assert torch.equal(found.counts.sum(-1), expected.counts.sum(-1))
    assert bool((found.prices[found.counts < found.capacity] == 0).all())
    assert bool(((found.prices.amin(-1) == 0) & found.prices.isfinite().all(-1)).all())
    return found


@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, top_k: int, factor: float) -> None:
    scores = draw_scores(family, N, K, seed=top_k)
    if family == "forbidden":  # K experts that each row may always take
        shift = (torch.arange(K) - torch.arange(N)[:, None]) % K < top_k
        scores = torch.where(shift & ~scores.isfinite(), torch.tensor(-1.0), scores)
    found = same_result(scores, math.ceil(factor * top_k * N / K), top_k=top_k)
    order = found.z.sort(-1).values
    assert bool((order.diff(dim=-1) > 0).all()), "a row has an expert twice"
    offers = (scores.double() - found.prices).gather(-1, found.z)
    assert bool((offers.diff(dim=-1) <= 0).all()), "best offer first"


@pytest.mark.parametrize("top_k", [1, 3])
def test_masks_batches_and_unequal_capacities(top_k: int, check_certified: Callable[..., None]) -> None:
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 2, N, K, generator=g)
    mask = torch.rand(2, 2, N, generator=g) < 0.7
    scores[~mask] = math.nan
    capacity = torch.randint(top_k * N // K, 3 * top_k * N // K, (2, 2, K), generator=g)
    capacity[..., 3] = 0
    found = same_result(scores, capacity, top_k=top_k, mask=mask)
    assert bool((found.z[~mask] == K).all())
    if top_k == 1:
        one = eq.assign(scores, capacity, mask=mask, method="settle")
        check_certified(scores.nan_to_num(), one)
    same_result(scores, top_k=top_k, mask=mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype(dtype: torch.dtype) -> None:
    same_result(draw_scores("gumbel", N, K, seed=1).to(dtype))
    same_result(draw_scores("gumbel", N, K, seed=2).to(dtype), top_k=2)


@pytest.mark.parametrize("off", [0.0, 1e-3, 10.0])
def test_warm_start_near_and_far(off: float) -> None:
    scores = draw_scores("gumbel", N, K, seed=3) + torch.linspace(0, 2, K)
    prices = eq.assign(scores).prices
    _, cold = assign_with_traffic(scores)
    a, warm = assign_with_traffic(scores, prices=prices + off * torch.arange(K))
    assert float((a.value - eq.assign(scores).value).abs()) <= 1e-12 * float(a.value)
    assert off > 1 or warm.bytes_copied < cold.bytes_copied


@pytest.mark.parametrize(("popularity", "factor"), [(0.0, 1.0), (1.0, 1.0), (1.0, 1.25)])
def test_few_rows_travel(popularity: float, factor: float) -> None:
    """65,536 x 64 with Gumbel noise: at most 5% of the bytes and 8 waits."""
    g = torch.Generator().manual_seed(5)
    scores = torch.randn(65536, 64, generator=g) + popularity * torch.randn(64, generator=g)
    scores = scores - torch.empty_like(scores).exponential_(generator=g).log()
    a, traffic = assign_with_traffic(scores, int(factor * 1024))
    assert float(a.gap) <= 1e-13 * float(a.value)
    assert traffic.bytes_copied <= 0.05 * scores.numel() * scores.element_size()
    assert traffic.waits <= 8
    assert 64 <= traffic.rows_copied <= 0.04 * 65536
    assert traffic.passes <= 10


def test_more_rows_are_contested_where_there_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps end at prices that are wrong for one expert, at first: only the proof sees it."""
    step, calls = _price_steps.step_prices, []

    def wrong(*args: Any) -> Tensor:
        calls.append(args)
        return step(*args) + (0.5 if len(calls) == 1 else 0.0) * (torch.arange(16) == 5)

    monkeypatch.setattr(_settle, "step_prices", wrong)
    scores = draw_scores("gumbel", 12000, K, seed=6)
    a, traffic = assign_with_traffic(scores)
    assert float(a.value) == pytest.approx(float(eq.assign(scores).value), rel=1e-12)
    assert float(a.gap) <= 1e-13 * float(a.value)
    assert len(calls) == 2
    assert traffic.trips == 3
    assert traffic.rows_copied < 2000


def test_one_of_a_batch_that_needs_all_its_rows() -> None:
    """Of the other problems no more rows travel for it."""
    scores = torch.stack([draw_scores(family, N, K, seed=4) for family in ("gumbel", "equal", "popular")])
    a, traffic = assign_with_traffic(scores)
    _, alone = assign_with_traffic(scores[1])
    assert torch.allclose(a.value, eq.assign(scores).value, rtol=1e-12)
    assert alone.rows_copied >= N
    assert traffic.rows_copied - alone.rows_copied <= N


@pytest.mark.parametrize("top_k", [1, 3])
def test_gap_is_dual_value_less_value(top_k: int) -> None:
    """At any prices, for any feasible assignment, with free slots that cost something."""
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 50, 6, generator=g, dtype=torch.float64)
    z = torch.rand(1, 50, 6, generator=g).topk(top_k, -1).indices
    prices, mask = torch.rand(1, 6, generator=g, dtype=torch.float64), torch.rand(1, 50, generator=g) < 0.8
    capacity = torch.randint(40, 60, (1, 6), generator=g)
    proof = prove(scores, mask, z, prices, capacity, Alone())
    best = (scores - prices).topk(top_k, -1).values.sum(-1)
    dual = float((best * mask).sum() + (capacity * prices).sum())
    value = float((scores.gather(-1, z).sum(-1) * mask).sum())
    assert float(proof.value) == pytest.approx(value, rel=1e-12)
    assert float(proof.gap) == pytest.approx(dual - value, rel=1e-12)
    assert torch.equal(proof.counts[0], torch.bincount(z[mask].flatten(), minlength=6))


@pytest.mark.parametrize("top_k", [1, 3])
def test_density_is_the_derivative_of_counts(top_k: int) -> None:
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 40000, 8, generator=g, dtype=torch.float64)
    mask = torch.rand(1, 40000, generator=g) < 0.8
    prices = torch.rand(1, 8, generator=g, dtype=torch.float64)
    ranked, lead = _price_steps.rank_offers(scores, mask, prices, top_k)
    density, width = _price_steps._density(ranked, lead, top_k, 8, 0.05)
    assert float((lead <= width).sum() / mask.sum()) == pytest.approx(0.05, rel=0.01)

    def counts(prices: Tensor) -> Tensor:
        ranked, _ = _price_steps.rank_offers(scores, mask, prices, top_k)
        return _price_steps.count_experts(ranked[..., :top_k], mask, 8)[0]

    for j in range(8):
        step = width * (torch.arange(8) == j)
        slope = (counts(prices + step) - counts(prices - step)) / (2 * float(width))
        others = torch.arange(8) != j
        assert torch.allclose(slope[others], density[0, j, others], rtol=0.2, atol=0.02 * float(density.max()))


def test_proof_sees_a_row_that_is_misplaced() -> None:
    """Exchanging two rows that are not tied must show in the gap by what it costs."""
    scores = draw_scores("gumbel", N, K, seed=7).double()
    a = eq.assign(scores)
    z = a.z.clone()
    i, j = 0, int((z != z[0]).nonzero()[0])
    z[[i, j]] = z[[j, i]]
    loss = float(a.value - scores.gather(-1, z[:, None]).sum())
    capacity = a.capacity[None]
    proof = prove(scores[None], None, z[None, :, None], a.prices[None], capacity, Alone())
    assert float(proof.gap) == pytest.approx(loss, rel=1e-9)
    rounding = 1e-14  # by which a row that is tied at these prices may seem to miss something
    assert (proof.missed[0] > rounding).nonzero().flatten().tolist() in ([i, j], [i], [j])


def test_hidden_illegal_scores_are_found() -> None:
    """Also in a row that nobody would copy."""
    for bad, words in [
        (math.nan, "NaN in row 1499"),
        (math.inf, r"\+inf in row 1499"),
        (-math.inf, "row 1499 is -inf"),
    ]:
        scores = draw_scores("gumbel", N, K, seed=8)
        scores[-1] = bad
        with pytest.raises(ValueError, match=words):
            eq.assign(scores, method="settle")
    scores = draw_scores("gumbel", N, K, seed=8)
    scores[: N // 2, 2:] = -math.inf
    with pytest.raises(ValueError, match=r"-inf confines 750 rows, among them row 0, to experts 0, 1, which hold 188"):
        eq.assign(scores, method="settle")
    with pytest.raises(ValueError, match="prices must be finite, got a NaN"):
        eq.assign(draw_scores("gumbel", N, K, seed=8), prices=torch.full([K], math.nan), method="settle")
    with pytest.raises(ValueError, match="capacity must sum to at least the number of rows, 1500, got 160"):
        eq.assign(draw_scores("gumbel", N, K, seed=8), 10, method="settle")


class Half:
    """One of two holders of rows, each in a thread of its own."""

    def __init__(self, index: int, board: list[Tensor], barrier: threading.Barrier) -> None:
        self.index, self.board, self.barrier = index, board, barrier

    def _both(self, x: Tensor) -> list[Tensor]:
        self.board[self.index] = x
        self.barrier.wait()
        both = list(self.board)
        self.barrier.wait()
        return both

    def reduce(self, x: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        first, second = self._both(x)
        return first + second if op == "sum" else torch.maximum(first, second)

    def gather(self, rows: Tensor) -> tuple[Tensor, slice]:
        first, second = self._both(rows)
        begin = self.index * first.shape[-2]
        return torch.cat([first, second], -2), slice(begin, begin + rows.shape[-2])

    def total(self, number: int) -> int:
        return int(self.reduce(torch.tensor(number)))


@pytest.mark.parametrize(("top_k", "slots"), [(1, None), (1, 120), (2, None)])
def test_rows_of_two_holders(top_k: int, slots: int | None) -> None:
    """Each holds a part of the rows, and both end with the same prices and the best assignment of all rows."""
    scores = draw_scores("favourite", N, K, seed=9)[None]
    parts, board, barrier = scores.split([500, 1000], 1), [Tensor(), Tensor()], threading.Barrier(2, timeout=60)
    proofs: list[_settle.Proof | None] = [None, None]

    def solve(index: int) -> None:
        exchange = Half(index, board, barrier)
        part = parts[index].contiguous()
        capacity = torch.full([1, K], slots or -(-top_k * N // K))
        proofs[index] = _settle.settle(_settle.Problem(part, None, capacity, top_k), None, exchange, Meter())

    threads = [threading.Thread(target=solve, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = proofs
    assert first is not None
    assert second is not None
    whole = eq.assign(scores[0], slots, top_k=top_k)
    assert torch.equal(first.prices, second.prices)
    assert torch.equal(first.counts, second.counts)
    z = torch.cat([first.z, second.z], 1)[0]
    assert torch.equal(torch.bincount(z.flatten(), minlength=K), first.counts[0])
    value = float(scores[0].double().gather(-1, z).sum())
    assert value == pytest.approx(float(whole.value), rel=1e-12)
    assert float(first.value) == pytest.approx(value, rel=1e-12)
    assert float(first.gap) <= 1e-12 * value
