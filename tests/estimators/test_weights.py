# SPDX-License-Identifier: Apache-2.0
"""Importance weights: what they are, and when there are none."""

import pytest
import torch
from torch import Tensor

from equipoise.estimators import STRATEGIES, importance_weight, over_batch, per_expert, probability_ratio
from equipoise.ops import draw_gumbel
from equipoise.sampling import Sample, sample_gumbel_matching, sample_independent, sample_skip


@pytest.fixture
def log_p(generator: torch.Generator) -> Tensor:
    return torch.randn(3, 8, 2, generator=generator, dtype=torch.float64).log_softmax(-1)


@pytest.fixture
def gumbel(generator: torch.Generator) -> Tensor:
    return draw_gumbel([3, 8, 2], generator=generator, dtype=torch.float64)


def test_on_policy_weights_are_one(log_p: Tensor, gumbel: Tensor) -> None:
    weight = importance_weight(log_p, sample_independent(log_p, gumbel))
    torch.testing.assert_close(weight, torch.ones(3, 8).double(), rtol=0, atol=1e-14)


def test_formula(log_p: Tensor, gumbel: Tensor, generator: torch.Generator) -> None:
    mask = torch.rand(3, 8, generator=generator) < 0.8
    s = sample_skip(log_p, gumbel, torch.rand(3, 8, generator=generator), temperature=0.4, capacity=2, mask=mask)
    weight = importance_weight(log_p, s)
    for b in range(3):
        for i in range(8):
            if not s.kept[b, i]:
                assert weight[b, i] == 0
                continue
            j = int(s.z[b, i])
            drew = int((s.z[b] == j).sum())
            expected = (log_p[b, i, j] - s.log_q[b, i, j]).exp() * drew / min(drew, 2)
            torch.testing.assert_close(weight[b, i], expected, rtol=1e-14, atol=0)


def test_a_proposal_with_logits_of_its_own(log_p: Tensor, gumbel: Tensor, generator: torch.Generator) -> None:
    other = torch.randn(3, 8, 2, generator=generator, dtype=torch.float64)
    s = sample_independent(other, gumbel)
    expected = s.at_z(log_p).exp() / s.at_z(other.softmax(-1))
    torch.testing.assert_close(importance_weight(log_p, s), expected, rtol=1e-13, atol=0)


def test_corrections(log_p: Tensor, gumbel: Tensor, generator: torch.Generator) -> None:
    mask = torch.tensor([[True] * 8, [True] * 5 + [False] * 3, [False] * 8])
    s = sample_skip(log_p, gumbel, torch.rand(3, 8, generator=generator), capacity=2, mask=mask)
    assert torch.equal(per_expert(s), torch.where(s.kept, s.keep_weight, 0.0))
    left = over_batch(s)
    torch.testing.assert_close(left.sum(-1), torch.tensor([8.0, 5.0, 0.0]).double())
    assert all(len(left[b][s.kept[b]].unique()) <= 1 for b in range(3))
    assert bool((left[~s.kept] == 0).all())


def test_corrections_keep_float64() -> None:
    mask = torch.tensor([True] * 7 + [False])
    s = Sample(
        torch.where(mask, 0, 2),
        torch.zeros(8, 2).double(),
        torch.tensor([True, True, True] + [False] * 5),
        mask.double(),
        mask,
    )
    assert float(over_batch(s)[0]) == 7 / 3


def test_weights_carry_no_gradient(log_p: Tensor, gumbel: Tensor) -> None:
    router = log_p.clone().requires_grad_()
    assert not importance_weight(router, sample_independent(router, gumbel, temperature=0.5)).requires_grad


def test_half_precision_is_weighed_in_float32(log_p: Tensor, gumbel: Tensor) -> None:
    half = log_p.bfloat16()
    assert importance_weight(half, sample_independent(half, gumbel.bfloat16())).dtype == torch.float32


def test_an_expert_that_the_router_forbids_has_weight_zero() -> None:
    log_p = torch.tensor([[0.0, -torch.inf]])
    s = sample_independent(torch.zeros(1, 2), torch.tensor([[0.0, 9.0]]))
    assert importance_weight(log_p, s).tolist() == [0.0]


@pytest.mark.parametrize("batch", [(), (2,)])
def test_an_impossible_sample_is_refused_and_named(batch: tuple[int, ...]) -> None:
    log_q = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]]).expand(*batch, 2, 2)
    z = torch.tensor([0, 0]).expand(*batch, 2)
    s = Sample(z, log_q, torch.ones_like(z, dtype=torch.bool), torch.ones_like(z, dtype=torch.float32))
    where = r"row 1 of problem \[0\]" if batch else "row 1"
    with pytest.raises(ValueError, match=rf"q > 0 at every sampled expert, got log_q = -inf at {where}: "):
        importance_weight(torch.full([*batch, 2, 2], 0.5).log(), s)


@pytest.mark.parametrize("temperature", [0.0, torch.tensor([0.0, 1.0, 1.0])])
@pytest.mark.parametrize("sampler", [sample_independent, sample_gumbel_matching])
def test_deterministic_samples_have_no_weights(log_p: Tensor, gumbel: Tensor, sampler, temperature) -> None:
    s = sampler(log_p, gumbel, temperature=temperature)
    with pytest.raises(ValueError, match=r"importance weights must have temperature > 0, got a sample drawn at temper"):
        importance_weight(log_p, s)


@pytest.mark.parametrize(("value", "said"), [(2.0, "2.0"), (float("nan"), "nan")])
def test_logits_beyond_the_rows_that_are_summed_are_refused(value: float, said: str) -> None:
    log_p = torch.full([40, 2], 0.5).log()
    log_p[1] = value
    s = sample_independent(torch.zeros(40, 2), torch.zeros(40, 2))
    with pytest.raises(
        ValueError, match=rf"log_p must hold log-probabilities .* got {said} at row 1: pass torch.log_soft"
    ):
        probability_ratio(log_p, s)


def test_a_weight_that_no_float_can_hold_is_refused(log_p: Tensor) -> None:
    strategy = STRATEGIES["gm"]
    noise = strategy.draw_noise(log_p.shape, generator=torch.Generator().manual_seed(0))
    message = r"importance weights must be finite, got log\(p/q\) = .* at row \d+ of problem .*: raise the temperature"
    with pytest.raises(ValueError, match=message):
        strategy.draw(log_p, noise, temperature=1e-6)
    s, weight = strategy.draw(log_p, noise, temperature=1e-6, importance=False)
    with pytest.raises(ValueError, match=message):
        importance_weight(log_p, s)
    assert float(probability_ratio(log_p, s).max()) == torch.inf  # for callers who look for themselves
    assert bool(weight.isfinite().all())


@pytest.mark.usefixtures("unchecked")
def test_log_p_must_have_the_shape_of_the_sample(log_p: Tensor, gumbel: Tensor) -> None:
    s = sample_independent(log_p, gumbel)
    with pytest.raises(ValueError, match=r"log_p must have shape \[3, 8, 2\] .*, got \[8, 2\]"):
        importance_weight(log_p[0], s)


def test_ratio_is_a_well_formed_operator() -> None:
    x = torch.tensor([-1.0, -2.0])
    for arguments in ((x, x, None, True), (x, x, torch.tensor([False]), False)):
        assert set(torch.library.opcheck(torch.ops.equipoise.checked_log_ratio, arguments).values()) == {"SUCCESS"}
