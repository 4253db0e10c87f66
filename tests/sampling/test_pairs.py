# SPDX-License-Identifier: Apache-2.0
"""Two experts on the CPU: the compiled samplers against the general ones, and what they leave to those."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import equipoise.sampling as sampling
from equipoise.sampling import Sample, _gumbel_matching, _pairs, _skip

Draw = Callable[[Tensor, Tensor, Tensor], Sample]

SAMPLERS: dict[str, Draw] = {
    "independent": lambda a, g, _: sampling.sample_independent(a, g, temperature=0.7),
    "a temperature each": lambda a, g, _: sampling.sample_independent(
        a, g, temperature=torch.linspace(0.1, 3.0, len(a)).to(a)
    ),
    "skip": lambda a, g, u: sampling.sample_skip(a, g, u, temperature=0.7),
    "skip, capacities": lambda a, g, u: sampling.sample_skip(a, g, u, capacity=[2, 9]),
    "skip, both crowded": lambda a, g, u: sampling.sample_skip(a, g, u, capacity=[3, 4]),
    "matching": lambda a, g, _: sampling.sample_gumbel_matching(a, g, temperature=0.7),
    "slack": lambda a, g, _: sampling.sample_gumbel_matching(a, g, capacity=9),
    "much slack": lambda a, g, _: sampling.sample_gumbel_matching(a, g, capacity=40),
    "capacities": lambda a, g, _: sampling.sample_gumbel_matching(a, g, capacity=[3, 12]),
    "one closed": lambda a, g, _: sampling.sample_gumbel_matching(a, g, capacity=[0, 13]),
    "sinkhorn first": lambda a, g, _: sampling.sample_gumbel_matching(a, g, sinkhorn_first=True),
    "sinkhorn's marginals": lambda a, g, _: sampling.sample_gumbel_matching(a, g, capacity=8, marginals="sinkhorn"),
    "the proposal": lambda a, g, _: sampling.sample_gumbel_matching(a, g, marginals="proposal"),
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Switches the compiled samplers off."""

    def switch_off() -> None:
        for module in (_pairs, _skip, _gumbel_matching):
            monkeypatch.setattr(module, "fits_pairs", lambda *_: False)

    return switch_off


def problem(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    logits = 2 * torch.randn(30, 13, 2, generator=generator, dtype=torch.float64)
    gumbel = -torch.rand(30, 13, 2, generator=generator, dtype=torch.float64).log().neg().log()
    priority = torch.rand(30, 13, generator=generator, dtype=torch.float64)
    priority[:, 5:9] = priority[:, 4:5]  # equal ones are kept in the order of the rows
    return logits.to(dtype), gumbel.to(dtype), priority.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_compiled_sample_is_the_general_one(
    name: str, dtype: torch.dtype, generator: torch.Generator, slow: Callable[[], None]
) -> None:
    given = problem(generator, dtype)
    fast = SAMPLERS[name](*given)
    slow()
    expected = SAMPLERS[name](*given)
    assert torch.equal(fast.z, expected.z)
    assert torch.equal(fast.kept, expected.kept)
    close = {"rtol": 1e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(fast.log_q, expected.log_q, **close)
    torch.testing.assert_close(fast.keep_weight, expected.keep_weight, **close)
    torch.testing.assert_close(fast.prices, expected.prices, rtol=1e-5, atol=1e-5) if fast.prices is not None else None
    assert (fast.capacity is None) == (expected.capacity is None)
    assert fast.log_q.dtype == expected.log_q.dtype == dtype


def test_the_conditional_is_unmoved_by_the_row_s_own_noise(generator: torch.Generator) -> None:
    logits, gumbel, _ = problem(generator, torch.float64)
    before = sampling.sample_gumbel_matching(logits, gumbel)
    gumbel[:, 3] = torch.tensor([4.0, -2.0])
    after = sampling.sample_gumbel_matching(logits, gumbel)
    torch.testing.assert_close(after.log_q[:, 3], before.log_q[:, 3], rtol=1e-11, atol=1e-11)
    assert not torch.equal(after.z, before.z)


def test_equal_scores_are_shared_out() -> None:
    s = sampling.sample_gumbel_matching(torch.zeros(6, 2), torch.zeros(6, 2))
    assert s.counts.tolist() == [3, 3]
    torch.testing.assert_close(s.log_q.exp(), torch.full([6, 2], 0.5))


def test_one_problem_and_many_batch_dimensions(generator: torch.Generator) -> None:
    logits, gumbel, priority = (x.unflatten(0, (5, 3, 2)) for x in problem(generator, torch.float32))
    many = sampling.sample_skip(logits, gumbel, priority)
    one = sampling.sample_skip(logits[2, 1, 0], gumbel[2, 1, 0], priority[2, 1, 0])
    assert torch.equal(many.z[2, 1, 0], one.z)
    assert torch.equal(many.kept[2, 1, 0], one.kept)


def test_what_is_unusual_takes_the_general_way() -> None:
    forbidden = torch.tensor([[0.0, -torch.inf], [0.0, 1.0]])
    assert sampling.sample_gumbel_matching(forbidden, torch.zeros(2, 2)).z.tolist() == [0, 1]
    with pytest.raises(ValueError, match="capacity"):
        sampling.sample_gumbel_matching(torch.zeros(4, 2), torch.zeros(4, 2), capacity=1)
    with pytest.raises(ValueError, match="capacity"):
        sampling.sample_gumbel_matching(torch.zeros(4, 2), torch.zeros(4, 2), capacity=[-1, 9])
    with pytest.raises(ValueError, match="NaN"):
        sampling.sample_independent(torch.full([2, 2], torch.nan), torch.zeros(2, 2))
