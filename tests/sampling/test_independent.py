# SPDX-License-Identifier: Apache-2.0
"""Independent sampling."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equipoise.balancing import sinkhorn
from equipoise.ops import draw_gumbel
from equipoise.sampling import sample_independent

Problem = Callable[..., tuple[Tensor, Tensor]]


def test_choice_and_probability(problem: Problem) -> None:
    logits, gumbel = problem(3, 5, 4)
    s = sample_independent(logits, gumbel, temperature=0.7)
    assert torch.equal(s.z, (logits / 0.7 + gumbel).argmax(-1))
    torch.testing.assert_close(s.log_q, torch.log_softmax(logits / 0.7, -1), rtol=0, atol=1e-14)
    assert bool(s.kept.all())
    assert bool((s.keep_weight == 1).all())
    assert torch.equal(s.counts.sum(-1), torch.full([3], 5))


@pytest.mark.parametrize("sinkhorn_first", [False, True])
def test_log_q_is_the_probability_with_which_experts_are_drawn(
    problem: Problem, redrawn_probability: Callable[..., Tensor], sinkhorn_first: bool
) -> None:
    logits, gumbel = problem(5, 2)

    def sampler(g: Tensor) -> object:
        return sample_independent(logits.expand_as(g), g, temperature=0.6, sinkhorn_first=sinkhorn_first)

    log_q = sample_independent(logits, gumbel, temperature=0.6, sinkhorn_first=sinkhorn_first).log_q
    torch.testing.assert_close(log_q.exp(), redrawn_probability(sampler, gumbel), rtol=0, atol=1e-12)


def test_sinkhorn_first_draws_from_balanced_probabilities(problem: Problem) -> None:
    logits, gumbel = problem(2, 8, 3)
    s = sample_independent(logits, gumbel, temperature=0.5, sinkhorn_first=True)
    expected = sinkhorn(logits / 0.5).log_p
    torch.testing.assert_close(s.log_q, expected, rtol=0, atol=1e-12)
    assert torch.equal(s.z, (expected + gumbel).argmax(-1))
    torch.testing.assert_close(s.log_q.exp().sum(-2), torch.full([2, 3], 8 / 3).double(), rtol=1e-5, atol=0)


def test_frequencies_are_the_probabilities(generator: torch.Generator) -> None:
    logits = torch.tensor([[0.0, 1.0, -2.0]])
    draws = 100_000
    s = sample_independent(logits.expand(draws, 1, 3), draw_gumbel([draws, 1, 3], generator=generator))
    p = torch.softmax(logits[0].double(), -1)
    z_scores = (s.counts.sum(0) - draws * p) / (draws * p * (1 - p)).sqrt()
    # Three normal scores exceed 5.1 with probability 1e-6 together.
    assert float(z_scores.abs().max()) < 5.1


def test_masked_rows_take_no_expert_and_may_hold_anything(problem: Problem) -> None:
    logits, gumbel = problem(2, 4, 3)
    mask = torch.tensor([[True, False, True, True], [False, False, True, True]])
    s = sample_independent(torch.where(mask[..., None], logits, torch.nan), gumbel, mask=mask)
    plain = sample_independent(logits, gumbel)
    assert torch.equal(s.z, torch.where(mask, plain.z, 3))
    assert torch.equal(s.log_q, torch.where(mask[..., None], plain.log_q, 0.0))
    assert torch.equal(s.kept, mask)
    assert torch.equal(s.keep_weight, mask.double())
    assert s.counts.sum(-1).tolist() == [3, 2]
    assert torch.equal(s.num_points, torch.tensor([3, 2]))


def test_forbidden_experts_are_never_drawn() -> None:
    logits = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
    s = sample_independent(logits, torch.tensor([[0.0, 30.0], [30.0, 0.0]]))
    assert s.z.tolist() == [0, 1]
    assert s.log_q.tolist() == [[0.0, -torch.inf], [-torch.inf, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_sampled_in_float32(dtype: torch.dtype, generator: torch.Generator) -> None:
    logits = torch.randn(6, 3, generator=generator).to(dtype)
    s = sample_independent(logits, draw_gumbel([6, 3], generator=generator, dtype=dtype))
    assert s.log_q.dtype == torch.float32
    torch.testing.assert_close(s.log_q, torch.log_softmax(logits.float(), -1))


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (2, 0, 2), (0, 4, 2)])
def test_empty_and_single(shape: tuple[int, ...]) -> None:
    s = sample_independent(torch.zeros(shape), torch.zeros(shape))
    assert s.z.shape == shape[:-1]
    assert s.log_q.shape == shape


def test_nothing_carries_a_gradient(problem: Problem) -> None:
    logits, gumbel = problem(4, 2)
    s = sample_independent(logits.requires_grad_(), gumbel)
    assert not s.log_q.requires_grad
    assert not s.keep_weight.requires_grad
