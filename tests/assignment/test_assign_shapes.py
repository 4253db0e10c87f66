# SPDX-License-Identifier: Apache-2.0
"""Sizes at the edge, batches of any shape, capacities of every kind, and tensors that are not plain."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch

import equipoise as eq
from support.families import draw_scores
from support.methods import EXACT, METHODS

FIELDS = ("z", "counts", "capacity", "mask", "value", "prices", "gap")
Check = Callable[[torch.Tensor, eq.Assignment], None]


def check_equal(a: eq.Assignment, b: eq.Assignment) -> None:
    for field in FIELDS:
        assert torch.equal(getattr(a, field), getattr(b, field)), field


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "shape",
    [(0, 3), (5, 1), (1, 1), (2, 9), (10, 3), (0, 3, 2), (2, 0, 3), (0, 0, 1), (2, 3, 5, 2), (2, 0, 5, 2)],
    ids=str,
)
def test_legal_sizes(shape: tuple[int, ...], method: str, check_certified: Check, generator: torch.Generator) -> None:
    *batch, n, k = shape
    scores = torch.randn(shape, generator=generator)
    a = eq.assign(scores, method=method)
    assert (list(a.z.shape), list(a.counts.shape), list(a.prices.shape)) == ([*batch, n], [*batch, k], [*batch, k])
    assert list(a.value.shape) == list(a.gap.shape) == batch
    assert bool((a.capacity == math.ceil(n / k)).all())
    assert bool((a.counts.sum(-1) == n).all())
    if method != "auction":
        check_certified(scores, a)


def test_no_rows_is_worth_nothing() -> None:
    a = eq.assign(torch.empty(0, 3))
    assert (a.counts.tolist(), a.value.item(), a.prices.tolist(), a.gap.item()) == ([0] * 3, 0.0, [0.0] * 3, 0.0)


def test_one_expert_takes_all() -> None:
    a = eq.assign(torch.tensor([[1.0], [-2.0], [4.0]]))
    assert (a.z.tolist(), a.value.item(), a.prices.tolist()) == ([0, 0, 0], 3.0, [0.0])


@pytest.mark.parametrize("method", METHODS)
def test_all_rows_masked(method: str) -> None:
    a = eq.assign(torch.full((4, 2), math.nan), mask=torch.zeros(4, dtype=torch.bool), method=method)
    assert (a.z.tolist(), a.counts.tolist(), a.value.item(), a.gap.item()) == ([2] * 4, [0, 0], 0.0, 0.0)


@pytest.mark.parametrize("n", [30, 3000])
def test_default_capacity_counts_rows_that_are_not_masked(
    n: int, check_certified: Check, generator: torch.Generator
) -> None:
    scores = torch.randn(3, n, 5, generator=generator)
    mask = torch.rand(3, n, generator=generator) < torch.tensor([[0.3], [0.6], [0.9]])
    a = eq.assign(scores, mask=mask)
    assert torch.equal(a.mask, mask)
    assert a.capacity.tolist() == [[math.ceil(int(m.sum()) / 5)] * 5 for m in mask]
    check_certified(scores, a)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_capacity_in_every_form(method: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    scores = torch.randn(2, 3, 12, 4, generator=generator)
    forms = [4, torch.tensor(4, dtype=dtype), [4] * 4, (4,) * 4, torch.full([4], 4, dtype=dtype)]
    forms.append(torch.full([2, 3, 4], 4, dtype=dtype))
    results = [eq.assign(scores, form, method=method) for form in forms]
    for a in results:
        assert torch.equal(a.capacity, torch.full([2, 3, 4], 4))
        check_equal(a, results[0])


@pytest.mark.usefixtures("unchecked")  # jaxtyping's Int is signed
def test_capacity_without_a_sign(generator: torch.Generator) -> None:
    scores = torch.randn(600, 4, generator=generator)
    check_equal(eq.assign(scores, torch.full([4], 200, dtype=torch.uint8)), eq.assign(scores, 200))


@pytest.mark.parametrize("shape", [(2, 3, 40, 4), (2, 2, 900, 12)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_solved_as_its_problems_are(
    method: str, shape: tuple[int, int, int, int], check_certified: Check, generator: torch.Generator
) -> None:
    # Capacities, padding and starting prices of each problem's own.
    b, c, n, k = shape
    scores = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, c)[:, None, None]
    capacity = torch.randint(n // k, 2 * n // k, (b, c, k), generator=generator)
    capacity[0, 0, 1] = 0
    mask = torch.rand(b, c, n, generator=generator) < 0.8
    prices = torch.rand(b, c, k, generator=generator).double()
    for start in (None, prices):
        together = eq.assign(scores, capacity, mask=mask, prices=start, method=method)
        if method != "auction":
            check_certified(scores, together)
        for i, j in itertools.product(range(b), range(c)):
            alone = eq.assign(
                scores[i, j],
                capacity[i, j],
                mask=mask[i, j],
                prices=None if start is None else start[i, j],
                method=method,
            )
            for field in FIELDS:
                assert torch.equal(getattr(together, field)[i, j], getattr(alone, field)), (field, i, j)


@pytest.mark.parametrize("n", [12, 1200])
@pytest.mark.parametrize("method", METHODS)
def test_strides_do_not_matter(method: str, n: int, generator: torch.Generator) -> None:
    wide = torch.randn(2 * n, 2, 24, generator=generator)
    mask = torch.rand(n, 2, generator=generator) < 0.9
    capacity = torch.full([12, 2], n // 8)
    strided = wide[::2, :, ::2].transpose(0, 1)
    a = eq.assign(strided, capacity.T, mask=mask.T, method=method)
    check_equal(a, eq.assign(strided.contiguous(), capacity.T.contiguous(), mask=mask.T.contiguous(), method=method))
    expanded = strided[:1].expand(3, n, 12)
    check_equal(
        eq.assign(expanded, n, mask=mask.T[:1].expand(3, n), method=method),
        eq.assign(expanded.contiguous(), n, mask=mask.T[:1].repeat(3, 1), method=method),
    )


@pytest.mark.parametrize("method", METHODS)
def test_scores_that_require_grad(method: str, generator: torch.Generator) -> None:
    scores = torch.randn(30, 4, generator=generator, requires_grad=True)
    prices = torch.rand(4, generator=generator, requires_grad=True)
    a = eq.assign(scores, prices=prices, method=method)
    assert {field for field in FIELDS if getattr(a, field).requires_grad} == {"value"}
    check_equal(a, eq.assign(scores.detach(), prices=prices.detach(), method=method))


@pytest.mark.parametrize("n", [30, 3000])
@pytest.mark.parametrize("method", METHODS)
def test_arguments_are_left_alone(method: str, n: int, generator: torch.Generator) -> None:
    if method in ("cycle-cancelling", "auction") and n > 1000:
        pytest.skip("same code at any size, and slow")
    scores = torch.randn(n, 6, generator=generator)
    prices = 3 * torch.rand(6, generator=generator).double()
    capacity, mask = torch.full([6], n), torch.rand(n, generator=generator) < 0.5
    arguments = (scores, prices, capacity, mask)
    before = [x.clone() for x in arguments]
    a = eq.assign(scores, capacity, prices=prices, mask=mask, method=method)
    assert all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True))
    addresses = {x.data_ptr() for x in arguments}
    assert not addresses & {x.data_ptr() for x in (a.z, a.counts, a.value, a.prices, a.gap)}


@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize(("n", "k"), [(200, 8), (2000, 16)])
@pytest.mark.parametrize("method", EXACT)
class TestWarmStart:
    def test_from_any_prices(
        self, method: str, n: int, k: int, factor: float, check_certified: Check, generator: torch.Generator
    ) -> None:
        if method == "cycle-cancelling" and n > 1000:
            pytest.skip("same code at any size, and slow")
        scores, capacity = draw_scores("gumbel", n, k, seed=1), math.ceil(n * factor / k)
        cold = eq.assign(scores, capacity, method=method)
        starts = [
            cold.prices,
            cold.prices.float(),
            cold.prices.bfloat16(),
            eq.assign(draw_scores("gumbel", n, k, seed=2), capacity).prices,
            40 * torch.rand(k, generator=generator, dtype=torch.float64) - 20,
            torch.full([k], 1e30, dtype=torch.float64),
            torch.linspace(0, 1e9, k, dtype=torch.float64),
        ]
        for prices in starts:
            warm = eq.assign(scores, capacity, prices=prices, method=method)
            check_certified(scores, warm)
            assert float(warm.value) == pytest.approx(float(cold.value), rel=2e-9)
