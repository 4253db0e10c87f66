# SPDX-License-Identifier: Apache-2.0
"""What must hold for every problem, on problems that hypothesis makes up."""

import math
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.balancing import sinkhorn


@dataclass(frozen=True)
class Case:
    """A problem that has a solution: the forbidden pairs leave a diagonal that fits the capacity."""

    logits: Tensor
    capacity: list[int]
    mask: Tensor
    seed: int

    @property
    def rows(self) -> int:
        return int(self.mask.sum())

    @property
    def tight(self) -> bool:
        return sum(self.capacity) == self.rows


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n, k = draw(st.integers(1, 24)), draw(st.integers(1, 20))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    logits = draw(st.sampled_from([0.1, 1.0, 10.0, 100.0])) * torch.randn(n, k, generator=generator).double()
    if draw(st.booleans()):
        logits = logits.round()
    home = torch.randint(0, k, (n,), generator=generator)
    if draw(st.booleans()):
        forbidden = torch.rand(n, k, generator=generator) < 0.4
        forbidden[torch.arange(n), home] = False
        logits = logits.masked_fill(forbidden, -math.inf)
    mask = torch.rand(n, generator=generator) < draw(st.sampled_from([0.5, 1.0]))
    needed = torch.bincount(home[mask], minlength=k)
    spare = torch.randint(0, 3, (k,), generator=generator) * draw(st.integers(0, 1))
    return Case(logits, (needed + spare).tolist(), mask, seed)


@given(cases())
@settings(max_examples=150)
def test_result_is_feasible_and_complementary(case: Case) -> None:
    balanced = sinkhorn(case.logits, case.capacity, mask=case.mask)
    p = balanced.log_p.exp() * case.mask[:, None]
    capacity = torch.tensor(case.capacity, dtype=torch.float64)
    assert balanced.converged
    assert (balanced.prices >= 0).all()
    torch.testing.assert_close(p.sum(1), case.mask.double(), rtol=0, atol=1e-12)
    assert (p.sum(0) <= capacity * (1 + 2e-6)).all()
    met = (p.sum(0) - capacity).abs() <= 2e-6 * capacity
    assert met[(balanced.prices > 0) | case.tight].all()


@given(cases())
@settings(max_examples=60)
def test_permuting_rows_and_experts_permutes_the_result(case: Case) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    n, k = case.logits.shape
    rows, columns = torch.randperm(n, generator=generator), torch.randperm(k, generator=generator)
    capacity = torch.tensor(case.capacity)
    p = sinkhorn(case.logits, capacity, mask=case.mask, tolerance=1e-9).log_p.exp()
    permuted = sinkhorn(case.logits[rows][:, columns], capacity[columns], mask=case.mask[rows], tolerance=1e-9)
    torch.testing.assert_close(permuted.log_p.exp(), p[rows][:, columns], rtol=0, atol=1e-5)


@given(cases())
@settings(max_examples=60)
def test_row_constants_never_matter(case: Case) -> None:
    offset = 10 * torch.randn(case.logits.shape[0], 1, generator=torch.Generator().manual_seed(case.seed)).double()
    p = sinkhorn(case.logits, case.capacity, mask=case.mask, tolerance=1e-9).log_p.exp()
    shifted = sinkhorn(case.logits + offset, case.capacity, mask=case.mask, tolerance=1e-9).log_p.exp()
    torch.testing.assert_close(shifted, p, rtol=0, atol=1e-5)


@given(st.integers(1, 20), st.integers(1, 12), st.sampled_from([0.1, 1.0, 10.0]), st.integers(0, 2**31))
@settings(max_examples=60)
def test_column_constants_go_into_the_prices_when_tight(n: int, k: int, sd: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = sd * torch.randn(n, k, generator=generator).double()
    offset = 10 * torch.randn(k, generator=generator).double()
    balanced, shifted = (sinkhorn(x, tolerance=1e-10) for x in (logits, logits + offset))
    torch.testing.assert_close(shifted.log_p.exp(), balanced.log_p.exp(), rtol=0, atol=1e-6)
    # Balancing what is balanced already leaves it alone.
    again = sinkhorn(balanced.log_p, tolerance=1e-10)
    torch.testing.assert_close(again.log_p.exp(), balanced.log_p.exp(), rtol=0, atol=1e-8)
