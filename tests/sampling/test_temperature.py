# SPDX-License-Identifier: Apache-2.0
"""Temperatures: one for each problem of a batch, and zero."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equipoise.assignment import assign
from equipoise.sampling import Sample, sample_gumbel_matching, sample_independent, sample_skip

Problem = Callable[..., tuple[Tensor, Tensor]]


def skip(logits: Tensor, gumbel: Tensor, **how: object) -> Sample:
    priority = torch.rand(logits.shape[-2], generator=torch.Generator().manual_seed(1)).expand(logits.shape[:-1])
    return sample_skip(logits, gumbel, priority, **how)


SAMPLERS = pytest.mark.parametrize("sampler", [sample_independent, skip, sample_gumbel_matching])


def assert_same(s: Sample, t: Sample) -> None:
    for a, b in ((s.z, t.z), (s.log_q, t.log_q), (s.kept, t.kept), (s.keep_weight, t.keep_weight)):
        assert torch.equal(a, b)


@SAMPLERS
@pytest.mark.parametrize("sinkhorn_first", [False, True])
def test_a_batch_of_temperatures_is_each_on_its_own(
    sampler: Callable[..., Sample], problem: Problem, sinkhorn_first: bool
) -> None:
    logits, gumbel = problem(3, 2, 8, 2)
    temperature = torch.tensor([0.3, 1.0, 4.0])
    s = sampler(logits, gumbel, temperature=temperature[:, None], sinkhorn_first=sinkhorn_first)
    for i, tau in enumerate(temperature.tolist()):
        for j in range(2):
            t = sampler(logits[i, j], gumbel[i, j], temperature=tau, sinkhorn_first=sinkhorn_first)
            assert torch.equal(s.z[i, j], t.z)
            torch.testing.assert_close(s.log_q[i, j], t.log_q, rtol=0, atol=1e-6)


@SAMPLERS
@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0.0), torch.tensor([0.0, 0.0])])
def test_zero_is_the_deterministic_choice(sampler: Callable[..., Sample], problem: Problem, zero: object) -> None:
    logits, gumbel = problem(2, 6, 3)
    s = sampler(logits, gumbel, temperature=zero)
    expected = assign(logits).z if sampler is sample_gumbel_matching else logits.argmax(-1)
    assert torch.equal(s.z, expected)
    assert torch.equal(s.log_q.exp(), torch.nn.functional.one_hot(expected, 3).double())
    assert bool(torch.as_tensor(s.deterministic).all())


@SAMPLERS
def test_zero_for_some_problems_leaves_the_others_alone(sampler: Callable[..., Sample], problem: Problem) -> None:
    logits, gumbel = problem(3, 6, 3)
    mask = torch.tensor([True, True, True, True, True, False]).expand(3, 6)
    s = sampler(logits, gumbel, temperature=torch.tensor([0.0, 2.0, 0.5]), mask=mask)
    assert torch.as_tensor(s.deterministic).tolist() == [True, False, False]
    for i, tau in enumerate((0.0, 2.0, 0.5)):
        t = sampler(logits[i], gumbel[i], temperature=tau, mask=mask[i])
        assert torch.equal(s.z[i], t.z)
        torch.testing.assert_close(s.log_q[i], t.log_q, rtol=0, atol=1e-12)


@pytest.mark.parametrize("marginals", ["conditional", "sinkhorn", "proposal"])
def test_zero_gives_one_hot_marginals_by_any_name(problem: Problem, marginals: str) -> None:
    logits, gumbel = problem(6, 3)
    s = sample_gumbel_matching(logits, gumbel, temperature=0.0, marginals=marginals)
    assert torch.equal(s.log_q.exp(), torch.nn.functional.one_hot(s.z, 3).double())


@SAMPLERS
def test_small_temperatures_approach_zero(sampler: Callable[..., Sample], problem: Problem) -> None:
    logits, gumbel = problem(2, 6, 3)
    cold = sampler(logits, gumbel, temperature=1e-6)
    assert torch.equal(cold.z, sampler(logits, gumbel, temperature=0.0).z)


@SAMPLERS
def test_an_integer_will_do(sampler: Callable[..., Sample], problem: Problem) -> None:
    logits, gumbel = problem(2, 6, 2)
    assert_same(sampler(logits, gumbel, temperature=2), sampler(logits, gumbel, temperature=2.0))


@SAMPLERS
def test_one_is_the_default(sampler: Callable[..., Sample], problem: Problem) -> None:
    logits, gumbel = problem(2, 6, 2)
    assert_same(sampler(logits, gumbel), sampler(logits, gumbel, temperature=torch.ones(2).double()))


@SAMPLERS
def test_logits_may_be_shifted_by_a_number_for_each_row(sampler: Callable[..., Sample], problem: Problem) -> None:
    logits, gumbel = problem(2, 6, 2)
    shift = torch.arange(6.0, dtype=torch.float64)[:, None]
    s, t = sampler(logits, gumbel, temperature=0.5), sampler(logits + shift, gumbel, temperature=0.5)
    assert torch.equal(s.z, t.z)
    torch.testing.assert_close(s.log_q, t.log_q, rtol=0, atol=1e-12)
