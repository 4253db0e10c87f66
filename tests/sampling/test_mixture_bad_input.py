# SPDX-License-Identifier: Apache-2.0
"""What mixed and averaged proposals refuse, and what they say."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.sampling import Sample, sample_averaged, sample_gumbel_matching, sample_independent, sample_skip

pytestmark = pytest.mark.usefixtures("unchecked")
X, COIN, PICK = torch.zeros(2, 4, 2), torch.rand(2, 4), torch.rand(2)


def skip(logits: Tensor, gumbel: Tensor, **how: Any) -> Sample:
    return sample_skip(logits, gumbel, torch.rand(logits.shape[:-1]), **how)


def averaged(logits: Tensor, gumbel: Tensor, **how: Any) -> Sample:
    if how.get("coin") is not None:
        how["coin"] = how["coin"].unsqueeze(-2)
    return sample_averaged(logits, gumbel.unsqueeze(-3), torch.rand(logits.shape[:-2]), **how)


SAMPLERS = pytest.mark.parametrize("sampler", [sample_independent, skip, sample_gumbel_matching, averaged])


@SAMPLERS
@pytest.mark.parametrize("eps", [-0.1, 1.0, 1.5, float("nan"), torch.tensor([0.1, 1.0]), torch.tensor(-1.0)])
def test_eps_must_be_a_weight(sampler: Callable[..., Sample], eps: object) -> None:
    with pytest.raises(ValueError, match=r"eps must be in \[0, 1\), got (-?[0-9.]+|nan): 0 mixes nothing in"):
        sampler(X, X, eps=eps, coin=COIN)


@SAMPLERS
def test_eps_must_be_a_number(sampler: Callable[..., Sample]) -> None:
    with pytest.raises(ValueError, match=r"eps must be a number or a torch.Tensor, got 'a': wrap"):
        sampler(X, X, eps="a", coin=COIN)


@SAMPLERS
@pytest.mark.parametrize("eps", [0.2, torch.tensor(0.2), torch.tensor([0.0, 0.2])])
def test_mixing_needs_a_coin(sampler: Callable[..., Sample], eps: object) -> None:
    with pytest.raises(ValueError, match=r"coin must be given where eps > 0, or eps is a tensor, got None: draw uni"):
        sampler(X, X, eps=eps)


@SAMPLERS
def test_coin_must_be_one_number_a_row(sampler: Callable[..., Sample]) -> None:
    with pytest.raises(ValueError, match=r"coin must have shape \[2, (1, )?4\] \(one number a row\), got \[(1, )?4\]"):
        sampler(X, X, eps=0.2, coin=COIN[0])
    with pytest.raises(ValueError, match=r"coin must be floating point, got torch.int64"):
        sampler(X, X, eps=0.2, coin=COIN.long())


@SAMPLERS
def test_coin_must_not_be_nan(sampler: Callable[..., Sample]) -> None:
    with pytest.raises(ValueError, match=r"coin must not be NaN, got nan at index \[0, (0, )?0\]: pass uniform"):
        sampler(X, X, eps=0.2, coin=COIN + torch.nan)


@pytest.mark.parametrize("shape", [(3,), (2, 4), (1, 1, 2)])
def test_eps_must_broadcast_over_the_batch(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"eps must be a number or broadcast over the batch dimensions \[2\], got sh"):
        sample_gumbel_matching(X, X, eps=torch.zeros(shape), coin=COIN)


@SAMPLERS
@pytest.mark.parametrize("eps", [0.2, torch.tensor(0.2), torch.tensor([0.2, 0.0])])
@pytest.mark.parametrize("temperature", [0.0, 0, torch.tensor([0.0, 1.0])])
def test_nothing_is_mixed_in_at_temperature_zero(
    sampler: Callable[..., Sample], eps: object, temperature: object
) -> None:
    with pytest.raises(ValueError, match=r"eps must be 0 at temperature 0, got 0.2\d*: nothing is drawn there"):
        sampler(X, X, eps=eps, coin=COIN, temperature=temperature)


def test_weights_may_be_zero_where_temperatures_are() -> None:
    s = sample_gumbel_matching(X, X, eps=torch.tensor([0.0, 0.2]), coin=COIN, temperature=torch.tensor([0.0, 1.0]))
    assert torch.as_tensor(s.deterministic).tolist() == [True, False]


@SAMPLERS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_flat_row_hides_no_illegal_logit(sampler: Callable[..., Sample], value: float) -> None:
    logits = X.clone()
    logits[1, 2, 0] = value
    with pytest.raises(ValueError, match=r"must be (free of NaN|finite or -inf).*(nan|inf)"):
        sampler(logits, X, eps=0.5, coin=torch.zeros(2, 4))


def test_there_must_be_a_draw() -> None:
    with pytest.raises(ValueError, match=r"solves must be an integer >= 1, got 0: 1 averages nothing"):
        sample_averaged(X, torch.zeros(2, 0, 4, 2), PICK)


@pytest.mark.parametrize("shape", [(2, 4, 2), (4, 2), (3, 8, 4, 2), (2, 8, 4, 3), (2, 8, 5, 2), (2, 1, 8, 4, 2)])
def test_draws_must_have_a_dimension_of_their_own(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"gumbel must have shape \[2, 'm', 4, 2\] \(m solves for .*, got \["):
        sample_averaged(X, torch.zeros(shape), PICK)
    with pytest.raises(ValueError, match=r"gumbel must be a torch.Tensor, got float"):
        sample_averaged(X, 1.0, PICK)


def test_pick_must_be_one_number_a_problem() -> None:
    with pytest.raises(ValueError, match=r"pick must have shape \[2\] \(one number for each problem\), got \[\]"):
        sample_averaged(X, torch.zeros(2, 3, 4, 2), torch.rand([]))
    with pytest.raises(ValueError, match=r"pick must be floating point, got torch.int64"):
        sample_averaged(X, torch.zeros(2, 3, 4, 2), PICK.long())


def test_pick_must_not_be_nan() -> None:
    with pytest.raises(ValueError, match=r"pick must not be NaN, got nan at index \[0\]: pass uniform numbers"):
        sample_averaged(X, torch.zeros(2, 3, 4, 2), PICK + torch.nan)


def test_coins_must_be_given_for_each_draw() -> None:
    with pytest.raises(ValueError, match=r"coin must have shape \[2, 3, 4\] \(one number a row\), got \[2, 4\]"):
        sample_averaged(X, torch.zeros(2, 3, 4, 2), PICK, eps=0.2, coin=COIN)


def test_value_check_is_a_well_formed_operator() -> None:
    for deterministic in (None, torch.tensor([False, True])):
        found = torch.library.opcheck(torch.ops.equipoise.checked_eps, (torch.tensor([0.1, 0.0]), deterministic))
        assert set(found.values()) == {"SUCCESS"}
