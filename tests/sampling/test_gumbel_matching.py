# SPDX-License-Identifier: Apache-2.0
"""Gumbel-Matching: balanced samples, and the probability of each row's expert given the other rows' noise."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.assignment import assign
from equipoise.balancing import sinkhorn
from equipoise.ops import draw_gumbel
from equipoise.sampling import Sample, sample_gumbel_matching, sample_independent

Problem = Callable[..., tuple[Tensor, Tensor]]
CAPACITIES = [(4, 2, [2, 2]), (4, 2, [3, 3]), (5, 2, [1, 4]), (4, 3, [2, 1, 1]), (4, 3, [2, 2, 3]), (2, 2, [1, 1])]


@pytest.mark.parametrize(("n", "k", "capacity"), CAPACITIES)
@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_log_q_against_enumeration_of_the_other_rows(
    problem: Problem,
    reduced_probability: Callable[..., Tensor],
    n: int,
    k: int,
    capacity: list[int],
    temperature: float,
) -> None:
    logits, gumbel = problem(n, k)
    s = sample_gumbel_matching(logits, gumbel, temperature=temperature, capacity=capacity)
    expected = reduced_probability(logits / temperature, gumbel, capacity)
    torch.testing.assert_close(s.log_q.exp(), expected, rtol=0, atol=1e-12)


def test_log_q_with_masked_rows_against_enumeration(
    problem: Problem, reduced_probability: Callable[..., Tensor]
) -> None:
    logits, gumbel = problem(6, 2)
    mask = torch.tensor([True, False, True, True, False, True])
    s = sample_gumbel_matching(torch.where(mask[:, None], logits, torch.nan), gumbel, mask=mask)
    expected = reduced_probability(logits, gumbel, [2, 2], mask)
    torch.testing.assert_close(s.log_q[mask].exp(), expected[mask], rtol=0, atol=1e-12)
    assert s.log_q[~mask].abs().sum() == 0
    assert s.z[~mask].tolist() == [2, 2]
    assert torch.equal(s.kept, mask)
    assert torch.equal(s.keep_weight, mask.double())


@pytest.mark.parametrize("capacity", [[3, 3], [2, 5], [4, 4]])
@pytest.mark.parametrize("sinkhorn_first", [False, True])
def test_log_q_against_redrawing_one_row(
    problem: Problem, redrawn_probability: Callable[..., Tensor], capacity: list[int], sinkhorn_first: bool
) -> None:
    logits, gumbel = problem(6, 2)

    def sampler(g: Tensor) -> Sample:
        return sample_gumbel_matching(
            logits.expand_as(g), g, temperature=0.8, capacity=capacity, sinkhorn_first=sinkhorn_first
        )

    expected = redrawn_probability(sampler, gumbel)
    torch.testing.assert_close(sampler(gumbel).log_q.exp(), expected, rtol=0, atol=1e-12)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32), n=st.integers(1, 24), k=st.integers(1, 5), room=st.integers(0, 3), masked=st.booleans()
)
def test_properties(seed: int, n: int, k: int, room: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, n, k, generator=generator, dtype=torch.float64)
    gumbel = draw_gumbel([2, n, k], generator=generator, dtype=torch.float64)
    mask = torch.rand(2, n, generator=generator) < 0.8 if masked else None
    capacity = -(-n // k) + room
    s = sample_gumbel_matching(logits, gumbel, capacity=capacity, mask=mask)
    real = torch.ones(2, n, dtype=torch.bool) if mask is None else mask
    assert bool((s.counts <= capacity).all())
    assert torch.equal(s.counts.sum(-1), real.sum(-1))
    total = s.log_q.exp().sum(-1)
    torch.testing.assert_close(total[real], torch.ones_like(total[real]), rtol=0, atol=1e-12)
    # The probability of a row's expert does not depend on the row's own noise.
    row = int(torch.randint(0, n, (), generator=generator))
    redrawn = gumbel.clone()
    redrawn[:, row] = draw_gumbel([2, k], generator=generator, dtype=torch.float64)
    other = sample_gumbel_matching(logits, redrawn, capacity=capacity, mask=mask)
    torch.testing.assert_close(other.log_q[:, row], s.log_q[:, row], rtol=0, atol=1e-11)
    # Rows and experts may be permuted.
    rows, experts = torch.randperm(n, generator=generator), torch.randperm(k, generator=generator)
    t = sample_gumbel_matching(
        logits[:, rows][..., experts],
        gumbel[:, rows][..., experts],
        capacity=capacity,
        mask=None if mask is None else mask[:, rows],
    )
    torch.testing.assert_close(t.log_q, s.log_q[:, rows][..., experts], rtol=0, atol=1e-11)


def test_sample_is_the_best_assignment_of_perturbed_logits(problem: Problem) -> None:
    logits, gumbel = problem(3, 12, 4)
    s = sample_gumbel_matching(logits, gumbel, temperature=0.5)
    assert torch.equal(s.z, assign(logits / 0.5 + gumbel).z)
    assert s.respects_capacity
    assert s.assigns_all
    assert s.capacity is not None
    assert s.capacity.tolist() == [[3, 3, 3, 3]] * 3


def test_with_room_for_all_it_is_independent_sampling(problem: Problem) -> None:
    logits, gumbel = problem(3, 7, 4)
    s, t = sample_gumbel_matching(logits, gumbel, capacity=7), sample_independent(logits, gumbel)
    assert torch.equal(s.z, t.z)
    torch.testing.assert_close(s.log_q, t.log_q, rtol=0, atol=1e-12)


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_sinkhorn_first_changes_nothing_when_tight(problem: Problem, temperature: float) -> None:
    logits, gumbel = problem(4, 12, 3)
    plain = sample_gumbel_matching(logits, gumbel, temperature=temperature)
    first = sample_gumbel_matching(logits, gumbel, temperature=temperature, sinkhorn_first=True)
    assert torch.equal(plain.z, first.z)
    torch.testing.assert_close(plain.log_q, first.log_q, rtol=0, atol=1e-10)


def test_named_marginals(problem: Problem) -> None:
    logits, gumbel = problem(2, 8, 2)
    samples = {
        name: sample_gumbel_matching(logits, gumbel, temperature=0.5, capacity=5, marginals=name)
        for name in ("conditional", "sinkhorn", "proposal")
    }
    torch.testing.assert_close(samples["sinkhorn"].log_q, sinkhorn(logits / 0.5, 5).log_p, rtol=0, atol=1e-12)
    torch.testing.assert_close(samples["proposal"].log_q, (logits / 0.5).log_softmax(-1), rtol=0, atol=1e-14)
    assert all(torch.equal(s.z, samples["conditional"].z) for s in samples.values())


@pytest.mark.parametrize("capacity", [None, 4, 5])
def test_sinkhorn_marginals_of_a_balanced_proposal(problem: Problem, capacity: int | None) -> None:
    logits, gumbel = problem(2, 8, 2)
    s = sample_gumbel_matching(logits, gumbel, capacity=capacity, sinkhorn_first=True, marginals="sinkhorn")
    torch.testing.assert_close(s.log_q, sinkhorn(sinkhorn(logits).log_p, capacity).log_p, rtol=0, atol=1e-5)


def test_conditionals_average_to_the_frequencies(generator: torch.Generator) -> None:
    logits = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.5, 0.0], [0.0, 0.3]], dtype=torch.float64)
    draws = 20_000
    gumbel = draw_gumbel([draws, 4, 2], generator=generator, dtype=torch.float64)
    s = sample_gumbel_matching(logits.expand(draws, 4, 2), gumbel)
    excess = (s.z == 0).double() - s.log_q[..., 0].exp()
    z_scores = excess.mean(0) / (excess.std(0) / draws**0.5)
    # Four normal scores exceed 5.2 with probability 1e-6 together.
    assert float(z_scores.abs().max()) < 5.2
    # The test has the power to reject the probabilities of a router that is not balanced.
    wrong = (s.z == 0).double() - logits.softmax(-1)[:, 0]
    assert float((wrong.mean(0) / (wrong.std(0) / draws**0.5)).abs().max()) > 10


def test_forbidden_pairs(reduced_probability: Callable[..., Tensor], problem: Problem) -> None:
    logits, gumbel = problem(4, 3)
    logits[0, 0] = logits[1, 2] = -torch.inf
    s = sample_gumbel_matching(logits, gumbel, capacity=2)
    torch.testing.assert_close(s.log_q.exp(), reduced_probability(logits, gumbel, [2, 2, 2]), rtol=0, atol=1e-12)


def test_float32_agrees_with_float64(problem: Problem) -> None:
    logits, gumbel = problem(64, 4)
    logits, gumbel = logits.float(), gumbel.float()
    narrow, wide = sample_gumbel_matching(logits, gumbel), sample_gumbel_matching(logits.double(), gumbel.double())
    assert narrow.log_q.dtype == torch.float32
    assert torch.equal(narrow.z, wide.z)
    torch.testing.assert_close(narrow.log_q.double(), wide.log_q, rtol=1e-5, atol=1e-4)
