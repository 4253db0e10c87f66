# SPDX-License-Identifier: Apache-2.0
"""Mixtures with a flat proposal: their probabilities, what they do not depend on, and the bound on the weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise import reference
from equipoise.assignment import assign, conditional_values
from equipoise.balancing import sinkhorn
from equipoise.ops import draw_gumbel
from equipoise.sampling import Sample, _proposal, sample_gumbel_matching, sample_independent, sample_skip

Problem = Callable[..., tuple[Tensor, Tensor]]
INF = float("inf")


def skip(logits: Tensor, gumbel: Tensor, **how: Any) -> Sample:
    return sample_skip(logits, gumbel, torch.linspace(0, 1, logits.shape[-2]).expand(logits.shape[:-1]), **how)


SAMPLERS = pytest.mark.parametrize("sampler", [sample_independent, skip, sample_gumbel_matching])


def uniform(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def flat_prices(proposal: Tensor, capacity: list[int], **how: Any) -> Tensor:
    return sinkhorn(proposal, torch.tensor(capacity), tolerance=1e-3, **how).prices


def by_definition(proposal: Tensor, gumbel: Tensor, drawn: Tensor, eps: float, capacity: list[int]) -> Tensor:
    """q_i for every row, from reduced problems solved by enumeration and a numerical integral over row i's noise."""
    prices = torch.where(proposal == -INF, -INF, flat_prices(proposal, capacity))
    used = torch.where(drawn[:, None], prices, proposal)
    q = []
    for i in range(len(proposal)):
        parts = []
        for own in (proposal, prices):
            logits = used.clone()
            logits[i] = own[i]
            parts.append(reference.gumbel_matching_conditional(logits, gumbel, i, capacity=capacity))
        q.append((1 - eps) * parts[0] + eps * parts[1])
    return torch.stack(q)


def assert_same(s: Sample, t: Sample) -> None:
    for a, b in ((s.z, t.z), (s.log_q, t.log_q), (s.kept, t.kept), (s.keep_weight, t.keep_weight)):
        assert torch.equal(a, b)


@SAMPLERS
@pytest.mark.parametrize("eps", [0, 0.0, torch.zeros(3), torch.zeros([])])
@pytest.mark.parametrize("temperature", [1.0, 0.5, torch.tensor([0.0, 1.0, 2.0])])
def test_nothing_mixed_in_changes_no_bit(
    sampler: Callable[..., Sample], problem: Problem, eps: object, temperature: object
) -> None:
    logits, gumbel = problem(3, 8, 2)
    mixed = sampler(logits, gumbel, temperature=temperature, eps=eps, coin=uniform(3, 8))
    assert_same(mixed, sampler(logits, gumbel, temperature=temperature))


@pytest.mark.parametrize("sampler", [sample_independent, skip])
@pytest.mark.parametrize("eps", [0.01, 0.2, 0.9])
def test_independent_rows_mix_with_the_uniform_distribution(
    sampler: Callable[..., Sample], problem: Problem, eps: float
) -> None:
    logits, gumbel = problem(3, 9, 4)
    logits[:, 2, 1] = logits[:, 5, 0] = logits[:, 5, 3] = -INF
    coin = uniform(3, 9)
    s = sampler(logits, gumbel, temperature=0.5, eps=eps, coin=coin)
    allowed = logits > -INF
    expected = (1 - eps) * (logits / 0.5).softmax(-1) + eps * allowed.double() / allowed.sum(-1, keepdim=True)
    torch.testing.assert_close(s.log_q.exp(), expected, rtol=1e-13, atol=0)
    flat = torch.where(allowed, gumbel, -INF).argmax(-1)
    assert torch.equal(s.z, torch.where(coin < eps, flat, (logits / 0.5 + gumbel).argmax(-1)))


@pytest.mark.parametrize(
    ("n", "k", "capacity"),
    [(4, 2, [2, 2]), (4, 2, [3, 3]), (5, 2, [1, 4]), (4, 3, [2, 1, 1]), (4, 3, [2, 2, 3]), (2, 2, [1, 1])],
)
@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_matching_against_its_definition(
    problem: Problem, n: int, k: int, capacity: list[int], temperature: float
) -> None:
    logits, gumbel = problem(n, k)
    coin = uniform(n)
    s = sample_gumbel_matching(logits, gumbel, temperature=temperature, capacity=capacity, eps=0.4, coin=coin)
    expected = by_definition(logits / temperature, gumbel, coin < 0.4, 0.4, capacity)
    torch.testing.assert_close(s.log_q.exp(), expected, rtol=0, atol=1e-12)


def test_matching_with_forbidden_pairs_against_its_definition(problem: Problem) -> None:
    logits, gumbel = problem(5, 3)
    logits[0, 0] = logits[1, 2] = logits[1, 0] = -INF
    coin = torch.tensor([0.1, 0.1, 0.9, 0.9, 0.1]).double()
    s = sample_gumbel_matching(logits, gumbel, capacity=2, eps=0.3, coin=coin)
    torch.testing.assert_close(
        s.log_q.exp(), by_definition(logits, gumbel, coin < 0.3, 0.3, [2, 2, 2]), rtol=0, atol=1e-12
    )
    assert s.log_q[1].tolist() == [-INF, 0.0, -INF]


def test_matching_with_masked_rows_against_its_definition(problem: Problem) -> None:
    logits, gumbel = problem(6, 2)
    mask, coin = torch.tensor([True, False, True, True, False, True]), uniform(6)
    s = sample_gumbel_matching(torch.where(mask[:, None], logits, torch.nan), gumbel, mask=mask, eps=0.5, coin=coin)
    expected = by_definition(logits[mask], gumbel[mask], coin[mask] < 0.5, 0.5, [2, 2])
    torch.testing.assert_close(s.log_q[mask].exp(), expected, rtol=0, atol=1e-12)
    assert s.log_q[~mask].abs().sum() == 0
    assert torch.equal(s.kept, mask)


def test_matching_of_a_balanced_proposal_against_its_definition(problem: Problem) -> None:
    logits, gumbel = problem(4, 2)
    coin = uniform(4)
    s = sample_gumbel_matching(
        logits, gumbel, temperature=0.5, capacity=[1, 4], sinkhorn_first=True, eps=0.4, coin=coin
    )
    expected = by_definition(sinkhorn(logits / 0.5).log_p, gumbel, coin < 0.4, 0.4, [1, 4])
    torch.testing.assert_close(s.log_q.exp(), expected, rtol=0, atol=1e-12)


@SAMPLERS
def test_a_batch_of_weights_and_temperatures_is_each_on_its_own(
    sampler: Callable[..., Sample], problem: Problem
) -> None:
    logits, gumbel = problem(3, 2, 8, 3)
    eps, temperature, coin = torch.tensor([0.0, 0.3]).double(), torch.tensor([0.3, 1.0, 4.0]), uniform(3, 2, 8)
    capacity = {} if sampler is sample_independent else {"capacity": 4}
    s = sampler(logits, gumbel, temperature=temperature[:, None], eps=eps, coin=coin, **capacity)
    for i, tau in enumerate(temperature.tolist()):
        for j, weight in enumerate(eps.tolist()):
            t = sampler(logits[i, j], gumbel[i, j], temperature=tau, eps=weight, coin=coin[i, j], **capacity)
            assert torch.equal(s.z[i, j], t.z)
            torch.testing.assert_close(s.log_q[i, j], t.log_q, rtol=0, atol=1e-6)


def test_named_marginals_are_mixed_too(problem: Problem) -> None:
    logits, gumbel = problem(2, 8, 2)
    how: dict[str, Any] = {"temperature": 0.5, "capacity": 5, "eps": 0.3, "coin": uniform(2, 8)}
    a, prices = logits / 0.5, flat_prices(logits / 0.5, [5, 5])[:, None]
    expected = {
        "sinkhorn": 0.7 * (a - prices).softmax(-1) + 0.3 / 2,
        "proposal": 0.7 * a.softmax(-1) + 0.3 * prices.softmax(-1),
    }
    for name, q in expected.items():
        s = sample_gumbel_matching(logits, gumbel, marginals=name, **how)
        torch.testing.assert_close(s.log_q.exp(), q.expand_as(a), rtol=0, atol=1e-12)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32), n=st.integers(1, 16), k=st.integers(1, 4), room=st.integers(0, 3), masked=st.booleans()
)
def test_properties(seed: int, n: int, k: int, room: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, n, k, generator=generator, dtype=torch.float64)
    gumbel = draw_gumbel([2, n, k], generator=generator, dtype=torch.float64)
    coin = torch.rand(2, n, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, n, generator=generator) < 0.8 if masked else None
    capacity = -(-n // k) + room
    how: dict[str, Any] = {"capacity": capacity, "mask": mask, "eps": 0.5}
    s = sample_gumbel_matching(logits, gumbel, coin=coin, **how)
    real = torch.ones(2, n, dtype=torch.bool) if mask is None else mask
    assert bool((s.counts <= capacity).all())
    assert torch.equal(s.counts.sum(-1), real.sum(-1))
    # Sums to 1, so that E[p/q] = 1 for every row, given the others.
    total = s.log_q.exp().sum(-1)
    torch.testing.assert_close(total[real], torch.ones_like(total[real]), rtol=0, atol=1e-12)
    # Depends neither on the row's own noise nor on its coin.
    row = int(torch.randint(0, n, (), generator=generator))
    redrawn, tossed = gumbel.clone(), coin.clone()
    redrawn[:, row] = draw_gumbel([2, k], generator=generator, dtype=torch.float64)
    tossed[:, row] = 1 - tossed[:, row]
    other = sample_gumbel_matching(logits, redrawn, coin=tossed, **how)
    torch.testing.assert_close(other.log_q[:, row], s.log_q[:, row], rtol=0, atol=1e-11)


def solved_prices(gumbel: Tensor) -> Callable[..., Tensor]:
    """What the flat component must not use: prices of the assignment that was solved, which know every row's noise."""
    return lambda logits, slots, mask, scope: assign(logits + gumbel, slots, mask=mask).prices.unsqueeze(-2)


def test_prices_of_the_solved_assignment_depend_on_a_rows_own_noise(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, gumbel = problem(4, 2)
    coin, moved = torch.zeros(4).double(), []
    for row in range(4):
        q = []
        for own in (-3.0, 3.0):
            redrawn = gumbel.clone()
            redrawn[row, 0] = own
            monkeypatch.setattr(_proposal, "_prices", solved_prices(redrawn))
            q.append(sample_gumbel_matching(logits, redrawn, eps=0.5, coin=coin).log_q[row, 0].exp())
        moved.append(float((q[0] - q[1]).abs()))
    assert max(moved) > 0.01


@pytest.mark.parametrize("row", [0, 3])
def test_frequencies_over_a_rows_own_noise_and_coin(row: int, generator: torch.Generator) -> None:
    draws, n, k, eps = 15_000, 5, 3, 0.4
    logits = 2 * torch.randn(n, k, generator=generator, dtype=torch.float64)
    gumbel = draw_gumbel([n, k], generator=generator, dtype=torch.float64).repeat(draws, 1, 1)
    coin = torch.tensor([0.9, 0.1, 0.9, 0.1, 0.9]).double().repeat(draws, 1)
    gumbel[:, row] = draw_gumbel([draws, k], generator=generator, dtype=torch.float64)
    coin[:, row] = torch.rand(draws, generator=generator, dtype=torch.float64)
    s = sample_gumbel_matching(logits.expand(draws, n, k), gumbel, capacity=2, temperature=0.6, eps=eps, coin=coin)
    seen = torch.bincount(s.z[:, row], minlength=k).double()

    def chi_square(q: Tensor) -> float:
        return float(((seen - draws * q) ** 2 / (draws * q)).sum())

    # With two degrees of freedom P(chi-square > x) = exp(-x / 2), which is 1e-6 here.
    assert chi_square(s.log_q[0, row].exp()) < 27.6
    # The main component alone, and a uniform flat one, are rejected.
    plain = sample_gumbel_matching(logits, gumbel[0], capacity=2, temperature=0.6).log_q[row].exp()
    assert chi_square(plain) > 27.6
    assert chi_square((1 - eps) * (logits[row] / 0.6).softmax(-1) + eps / k) > 27.6


@pytest.mark.parametrize("eps", [0.05, 0.2, 0.8])
@pytest.mark.parametrize("sampler", [sample_independent, skip])
def test_weights_of_independent_rows_are_bounded(sampler: Callable[..., Sample], problem: Problem, eps: float) -> None:
    logits, gumbel = problem(4, 50, 3)
    s = sampler(20 * logits, gumbel, eps=eps, coin=uniform(4, 50))
    assert bool((-s.log_q <= torch.tensor(3 / eps).double().log() + 1e-15).all())
    # Attained, as p may be 1 where the proposal's main component is 0.
    assert float((-s.log_q).max()) > 0.999 * float(torch.tensor(3 / eps).log())


def spread_of_costs(scores: Tensor, capacity: int, prices: Tensor) -> Tensor:
    """D_i: the range over j of v_-ij + prices_j, with v_-ij from the conditional values."""
    v = conditional_values(scores, assign(scores, capacity)) - scores + prices
    return v.amax(-1) - v.amin(-1)


@pytest.mark.parametrize("capacity", [20, 25])
def test_weights_of_matching_are_bounded(problem: Problem, capacity: int) -> None:
    logits, gumbel = problem(8, 60, 3)
    logits = 6 * logits + torch.tensor([8.0, 0.0, 0.0])
    coin, eps = uniform(8, 60), 0.2
    s = sample_gumbel_matching(logits, gumbel, capacity=capacity, eps=eps, coin=coin)
    prices = flat_prices(logits, [capacity] * 3)[:, None]
    scores = torch.where(coin.unsqueeze(-1) < eps, prices, logits) + gumbel
    bound = spread_of_costs(scores, capacity, prices) + torch.tensor(3 / eps).double().log()
    over = -s.log_q - bound.unsqueeze(-1)
    assert float(over.max()) <= 1e-9
    # Attained but for the k in it: some expert has the whole range against it.
    assert float(over.max()) > -torch.tensor(3.0).log()
    # Nothing bounds the weights of the same draws without the mixture.
    plain = sample_gumbel_matching(logits, gumbel, capacity=capacity)
    assert float((-plain.log_q).max()) > 2 * float(bound.max())


@pytest.mark.parametrize("capacity", [50, 63, 100])
def test_flat_rows_are_indifferent_with_and_without_slack(problem: Problem, capacity: int) -> None:
    logits, gumbel = problem(4, 200, 4)
    logits = 2 * logits + torch.tensor([8.0, 4.0, 0.0, 0.0])
    coin = torch.ones(4, 200).double()
    prices = flat_prices(logits, [capacity] * 4)[:, None]
    with_prices = spread_of_costs(logits + gumbel, capacity, prices)
    without = spread_of_costs(logits + gumbel, capacity, torch.zeros_like(prices))
    assert float(prices.amax()) > 2
    assert float(with_prices.mean()) < float(without.mean()) / 4
    # So a flat row is about as likely to go anywhere.
    s = sample_gumbel_matching(logits, gumbel, capacity=capacity, eps=0.5, coin=coin, temperature=1.0)
    main = sample_gumbel_matching(logits, gumbel, capacity=capacity).log_q.exp()
    flat = 2 * s.log_q.exp() - main
    assert float((flat.mean((0, 1)) - 0.25).abs().max()) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("huge", [-1e9, -1e37])
def test_huge_scores_cost_no_digits(problem: Problem, dtype: torch.dtype, huge: float) -> None:
    logits, gumbel = problem(4, 3)
    logits[0, 1] = logits[2, 0] = huge
    coin = torch.tensor([0.9, 0.1, 0.9, 0.1]).double()
    s = sample_gumbel_matching(
        logits.to(dtype), gumbel.to(dtype), capacity=2, temperature=0.5, eps=0.3, coin=coin.to(dtype)
    )
    # A score that is never worth it is like one that is forbidden to the main component, and only to that.
    a, slots = logits / 0.5, [2, 2, 2]
    prices = flat_prices(a.to(dtype), slots).double()
    used = torch.where(coin[:, None] < 0.3, prices, torch.where(a < -1e8, -INF, a))
    for i in range(4):
        q = torch.zeros(3).double()
        for own, weight in ((torch.where(a[i] < -1e8, -INF, a[i]), 0.7), (prices, 0.3)):
            one = used.clone()
            one[i] = own
            q += weight * reference.gumbel_matching_conditional(one, gumbel, i, capacity=slots)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(s.log_q[i].double().exp(), q, rtol=0, atol=tolerance)


@SAMPLERS
def test_rows_with_one_expert_left_are_no_nan(sampler: Callable[..., Sample], problem: Problem) -> None:
    logits, gumbel = problem(6, 3)
    logits[0, 1:] = logits[1, :2] = -INF
    for toss in (0.0, 0.99):
        s = sampler(logits, gumbel, eps=0.5, coin=torch.full([6], toss).double())
        assert not bool(s.log_q.isnan().any())
        assert s.z[:2].tolist() == [0, 2]
        assert s.log_q[0].tolist() == [0.0, -INF, -INF]


def test_closed_experts_and_empty_problems(problem: Problem) -> None:
    logits, gumbel = problem(2, 4, 3)
    mask = torch.tensor([[True] * 4, [False] * 4])
    how: dict[str, Any] = {"eps": 0.5, "coin": torch.zeros(2, 4).double(), "mask": mask}
    s = sample_gumbel_matching(logits, gumbel, **how)
    assert bool((s.log_q[1] == 0).all())
    t = sample_gumbel_matching(logits, gumbel, capacity=[0, 2, 2], **how)
    assert bool((t.log_q[0, :, 0] == -INF).all())
    assert sorted(t.z[0].tolist()) == [1, 1, 2, 2]


def test_slack_raises_the_effective_sample_size_of_a_sharp_router(generator: torch.Generator) -> None:
    """Capacity factor 1, 1.25 and 2 at n = 64, k = 4, a router that prefers some experts."""
    draws, n, k = 200, 64, 4
    preference = torch.tensor([2.0, 1.0, 0.0, 0.0]).double()
    logits = 3 * torch.randn(draws, n, k, generator=generator, dtype=torch.float64) + preference
    gumbel = draw_gumbel([draws, n, k], generator=generator, dtype=torch.float64)
    sizes = []
    for capacity in (16, 20, 32):
        s = sample_gumbel_matching(logits, gumbel, capacity=capacity)
        w = s.at_z(logits.log_softmax(-1) - s.log_q).exp()
        sizes.append(float((w.sum(-1) ** 2 / (n * (w**2).sum(-1))).mean()))
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[1] > 1.2 * sizes[0]
