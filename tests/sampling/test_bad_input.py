# SPDX-License-Identifier: Apache-2.0
"""What the samplers refuse, and what they say."""

from collections.abc import Callable

import pytest
import torch

from equipoise.sampling import Sample, sample_gumbel_matching, sample_independent, sample_skip

pytestmark = pytest.mark.usefixtures("unchecked")


def skip(logits: torch.Tensor, gumbel: torch.Tensor, **how: object) -> Sample:
    return sample_skip(logits, gumbel, torch.rand(logits.shape[:-1]), **how)


SAMPLERS = pytest.mark.parametrize("sampler", [sample_independent, skip, sample_gumbel_matching])
X = torch.zeros(2, 4, 2)


@SAMPLERS
@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), torch.tensor([1.0, -1.0])])
def test_temperature_must_be_finite_and_not_negative(sampler: Callable[..., Sample], temperature: object) -> None:
    with pytest.raises(
        ValueError, match=r"temperature must be finite and >= 0, got (-1.0|nan|inf): give a temperature"
    ):
        sampler(X, X, temperature=temperature)


@SAMPLERS
@pytest.mark.parametrize("temperature", [None, "1", [1.0, 2.0]])
def test_temperature_must_be_a_number(sampler: Callable[..., Sample], temperature: object) -> None:
    with pytest.raises(
        ValueError, match=r"temperature must be a number or a torch.Tensor, got (None|'1'|\[1.0, 2.0\]):"
    ):
        sampler(X, X, temperature=temperature)


@pytest.mark.parametrize("temperature", [float("nan"), float("inf")])
def test_one_temperature_of_several_is_looked_at(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature must be finite and >= 0, got (nan|inf)"):
        sample_independent(X, X, temperature=torch.tensor([1.0, temperature]))


@pytest.mark.parametrize("shape", [(3,), (2, 4), (1, 1, 2)])
def test_temperature_must_broadcast_over_the_batch(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"temperature must be a number or broadcast over the batch dimensions \[2\]"):
        sample_independent(X, X, temperature=torch.ones(shape))


@SAMPLERS
@pytest.mark.parametrize("temperature", [0.0, torch.tensor([0.0, 1.0])])
def test_balancing_first_needs_a_temperature(sampler: Callable[..., Sample], temperature: object) -> None:
    with pytest.raises(ValueError, match=r"temperature must be finite and > 0 with sinkhorn_first, got 0.0"):
        sampler(X, X, temperature=temperature, sinkhorn_first=True)


@SAMPLERS
def test_noise_must_have_the_shape_of_the_logits(sampler: Callable[..., Sample]) -> None:
    with pytest.raises(ValueError, match=r"gumbel must have shape \[2, 4, 2\] .*, got \[4, 2\]"):
        sampler(X, X[0])


def test_noise_must_be_a_floating_point_tensor() -> None:
    with pytest.raises(ValueError, match=r"gumbel must be floating point, got torch.int64"):
        sample_independent(X, X.long())
    with pytest.raises(ValueError, match=r"gumbel must be a torch.Tensor, got float"):
        sample_independent(X, 1.0)


@SAMPLERS
def test_logits_must_be_a_floating_point_matrix(sampler: Callable[..., Sample]) -> None:
    with pytest.raises(ValueError, match=r"logits must be floating point"):
        sampler(X.long(), X)
    with pytest.raises(ValueError, match=r"logits must have shape \[..., n, k\]"):
        sampler(X[0, 0], X[0, 0])


def test_mask_must_fit() -> None:
    with pytest.raises(ValueError, match=r"mask must have shape \[2, 4\]"):
        sample_independent(X, X, mask=torch.ones(4, dtype=torch.bool))


def test_priority_must_be_one_number_a_row() -> None:
    with pytest.raises(ValueError, match=r"priority must have shape \[2, 4\] \(one number a row\), got \[4\]"):
        sample_skip(X, X, torch.rand(4))
    with pytest.raises(ValueError, match=r"priority must be floating point, got torch.int64"):
        sample_skip(X, X, torch.zeros(2, 4, dtype=torch.int64))


@pytest.mark.parametrize("k", [2, 3])
def test_priority_must_not_be_nan(k: int) -> None:
    priority = torch.tensor([0.81, 0.07, float("nan"), 0.48, 0.95, 0.14])
    with pytest.raises(ValueError, match=r"priority must not be NaN, got nan at index \[2\]: .* torch.rand\(\[6\]\)"):
        sample_skip(torch.zeros(6, k), torch.zeros(6, k), priority, capacity=1)


@pytest.mark.parametrize("capacity", [0, [1, 0], torch.tensor([0, 3])])
def test_skipping_needs_a_slot_for_every_expert(capacity: object) -> None:
    with pytest.raises(ValueError, match=r"capacity must be >= 1 for every expert where rows are skipped, got 0"):
        skip(X, X, capacity=capacity)


def test_matching_needs_a_slot_for_every_row() -> None:
    with pytest.raises(ValueError, match=r"capacity must sum to at least the number of rows, 4"):
        sample_gumbel_matching(X, X, capacity=1)


@pytest.mark.parametrize("sampler", [sample_independent, skip])
@pytest.mark.parametrize(("value", "said"), [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf")])
def test_logits_that_leave_a_row_no_expert(sampler: Callable[..., Sample], value: float, said: str) -> None:
    logits = X.clone()
    logits[1, 2] = value
    with pytest.raises(
        ValueError, match=rf"logits must be free of NaN .* got {said} as the maximum of row 2 of problem \[1\]"
    ):
        sampler(logits, X)
    with pytest.raises(ValueError, match=r"as the maximum of row 2: mask"):
        sampler(logits[1], X[1])


def test_matching_refuses_nan() -> None:
    with pytest.raises(ValueError, match=r"NaN|nan"):
        sample_gumbel_matching(X + torch.nan, X)


def test_marginals_have_names() -> None:
    with pytest.raises(
        ValueError, match=r"marginals must be one of 'conditional', 'sinkhorn', 'proposal', got 'exact'"
    ):
        sample_gumbel_matching(X, X, marginals="exact")


def test_value_checks_are_well_formed_operators() -> None:
    for operator, arguments in (
        (torch.ops.equipoise.checked_temperature, (torch.tensor([1.0, 0.0]), False)),
        (torch.ops.equipoise.checked_choice, (torch.tensor([1, 0]), torch.tensor([1.0, 0.0]))),
        (torch.ops.equipoise.checked_slots, (torch.tensor([1, 2]),)),
        (torch.ops.equipoise.checked_draws, (torch.tensor([0.5, 0.1]), "priority")),
    ):
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}
