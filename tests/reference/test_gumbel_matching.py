# SPDX-License-Identifier: Apache-2.0
"""Gumbel-Matching by brute force: appendix D's statements about it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equipoise import reference
from equipoise.balancing import sinkhorn

Draw = Callable[..., Tensor]

TIGHT = [(2, 2, None), (4, 2, None), (6, 2, None), (3, 3, None), (4, 4, None), (5, 2, [2, 3])]
ALL = [*TIGHT, (4, 2, 3), (5, 3, [4, 1, 2]), (3, 2, [3, 0])]


def distance(one: reference.AssignmentDistribution, other: reference.AssignmentDistribution) -> float:
    """Total variation distance of two distributions over the same list."""
    assert torch.equal(one.z, other.z)
    return float((one.probability - other.probability).abs().sum() / 2)


def two_by_two(odds: Tensor) -> Tensor:
    """P(z = (0, 1)) at n = k = 2, odds = a_00 + a_11 - a_01 - a_10: that two logistic variables sum to above -odds."""
    return odds.exp() * (odds.expm1() - odds) / odds.expm1() ** 2


def test_two_by_two_has_a_closed_form(gumbel: Draw) -> None:
    logits = torch.tensor([[1.5, 0.0], [0.3, 0.0]], dtype=torch.float64)
    p = two_by_two(torch.tensor(1.2).double())
    found = reference.gumbel_matching_distribution(logits, gumbel(100_000, 2, 2)).probability[0]
    # Two-sided false-alarm rate 1e-6.
    assert (found - p).abs() < 4.9 * (p * (1 - p) / 100_000).sqrt()
    # The Gibbs distribution is another one, and would be noticed.
    assert (found - torch.tensor(1.2).sigmoid()).abs() > 20 * (p * (1 - p) / 100_000).sqrt()


def test_two_by_two_is_never_far_from_gibbs() -> None:
    odds = torch.linspace(1e-3, 60, 60_000, dtype=torch.float64)
    gap = (two_by_two(odds) - odds.sigmoid()).abs()
    assert gap.max().item() == pytest.approx(0.0872, abs=1e-4)
    assert gap[0] < 1e-3
    assert gap[-1] < 1e-20


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize(("n", "k", "capacity"), TIGHT)
def test_approximates_gibbs(
    normal: Draw, gumbel: Draw, n: int, k: int, capacity: list[int] | None, temperature: float
) -> None:
    logits, noise = normal(n, k), gumbel(20_000, n, k)
    matching = reference.gumbel_matching_distribution(logits, noise, temperature=temperature, capacity=capacity)
    gibbs = reference.gibbs_distribution(logits, temperature=temperature, capacity=capacity)
    # Measured with 100,000 draws on 3 problems of each kind: 0.003 to 0.17. It is an approximation, and a coarse one.
    assert distance(matching, gibbs) < 0.25


@pytest.mark.parametrize(("n", "k", "capacity"), TIGHT)
def test_agrees_with_gibbs_at_infinite_temperature_without_slack(
    normal: Draw, gumbel: Draw, p_value: Callable[..., float], n: int, k: int, capacity: list[int] | None
) -> None:
    noise = gumbel(20_000, n, k)
    matching = reference.gumbel_matching_distribution(normal(n, k), noise, temperature=1e9, capacity=capacity)
    uniform = torch.full_like(matching.probability, 1 / len(matching.z))
    assert p_value(20_000 * matching.probability, uniform) > 1e-6


def test_differs_from_gibbs_at_infinite_temperature_with_slack(gumbel: Draw, p_value: Callable[..., float]) -> None:
    # Rows can then be exchanged, but not counts: (2, 2) and (3, 1) are not alike.
    matching = reference.gumbel_matching_distribution(torch.zeros(4, 2), gumbel(20_000, 4, 2), capacity=3)
    uniform = torch.full_like(matching.probability, 1 / len(matching.z))
    assert p_value(20_000 * matching.probability, uniform) < 1e-6


@pytest.mark.parametrize(("n", "k", "capacity"), ALL)
def test_both_become_the_best_assignment_at_temperature_zero(
    normal: Draw, gumbel: Draw, n: int, k: int, capacity: list[int] | None
) -> None:
    logits = normal(n, k)
    _, z = reference.best_assignment(logits, capacity)
    noise = gumbel(1000, n, k)
    for joint in (
        reference.gumbel_matching_distribution(logits, noise, temperature=1e-6, capacity=capacity),
        reference.gibbs_distribution(logits, temperature=1e-6, capacity=capacity),
    ):
        assert torch.equal(joint.z[joint.probability.argmax()], z)
        assert joint.probability.max().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("n", "k"), [(4, 2), (6, 3), (4, 4)])
def test_is_invariant_to_sinkhorn_without_slack(normal: Draw, gumbel: Draw, n: int, k: int) -> None:
    logits, noise = normal(n, k), gumbel(2000, n, k)
    plain = reference.gumbel_matching_distribution(logits, noise)
    for same in (logits + normal(n, 1) + normal(k), sinkhorn(logits, tolerance=1e-12).log_p):
        assert distance(plain, reference.gumbel_matching_distribution(same, noise)) == 0
    # With slack a column's constant matters: it decides who is left with free slots.
    moved = logits + torch.arange(k)
    roomy = [reference.gumbel_matching_distribution(a, noise, capacity=n - 1) for a in (logits, moved)]
    assert distance(*roomy) > 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize(("n", "k", "capacity"), ALL)
def test_conditional_is_what_redrawing_a_row_gives(
    normal: Draw,
    gumbel: Draw,
    p_value: Callable[..., float],
    n: int,
    k: int,
    capacity: list[int] | None,
    temperature: float,
) -> None:
    logits, noise = normal(n, k), gumbel(n, k)
    q = reference.gumbel_matching_conditional(logits, noise, n - 1, temperature=temperature, capacity=capacity)
    assert q.sum().item() == pytest.approx(1, abs=1e-13)
    draws = 20_000
    redrawn = reference.gumbel_matching_redraws(
        logits, noise, n - 1, gumbel(draws, k), temperature=temperature, capacity=capacity
    )
    rare = q * draws <= 100
    # What is too rare for the chi-square test must be about as rare among the draws: below 100, never 160 (1e-8).
    assert (redrawn[rare] * draws).sum() < 160 * max(1, int(rare.sum()))
    if int((~rare).sum()) > 1:
        assert p_value(redrawn[~rare] * draws, q[~rare] / q[~rare].sum()) > 1e-6


@pytest.mark.parametrize(("n", "k", "capacity"), ALL)
def test_conditional_is_the_softmax_of_the_reduced_values(
    normal: Draw, gumbel: Draw, n: int, k: int, capacity: list[int] | None
) -> None:
    # Appendix D.4's last line, with the conditional values of the whole problem instead of the reduced ones.
    logits, noise = normal(n, k), gumbel(n, k)
    values = reference.conditional_values(logits + noise, capacity)
    formula = (values - noise).softmax(1)
    for row in range(n):
        found = reference.gumbel_matching_conditional(logits, noise, row, capacity=capacity)
        torch.testing.assert_close(found, formula[row], rtol=0, atol=1e-12)


def test_conditional_does_not_read_the_noise_of_its_row(normal: Draw, gumbel: Draw) -> None:
    logits, noise = normal(4, 2), gumbel(4, 2)
    before = reference.gumbel_matching_conditional(logits, noise, 2)
    noise[2] = torch.nan
    assert torch.equal(reference.gumbel_matching_conditional(logits, noise, 2), before)


@pytest.mark.parametrize(("n", "k", "capacity"), [(4, 2, None), (6, 3, None), (5, 3, [4, 1, 2])])
def test_marginals_of_the_solver_are_those_of_the_list(
    normal: Draw, gumbel: Draw, generator: torch.Generator, n: int, k: int, capacity: list[int] | None
) -> None:
    logits = normal(n, k)
    solved = reference.gumbel_matching_marginals(
        logits, 10_000, temperature=0.7, capacity=capacity, generator=generator
    )
    listed = reference.gumbel_matching_distribution(logits, gumbel(40_000, n, k), temperature=0.7, capacity=capacity)
    p = listed.marginals()
    assert solved.num_draws == 10_000
    torch.testing.assert_close(solved.frequencies.sum(1), torch.ones(n).double(), rtol=0, atol=1e-12)
    # n k comparisons, each at 6 standard errors of the difference: 4e-8 together.
    error = (p * (1 - p) * (1 / 10_000 + 1 / 40_000)).sqrt()
    assert ((solved.frequencies - p).abs() <= 6 * error + 1e-12).all()
    torch.testing.assert_close(solved.standard_errors, (p * (1 - p) / 10_000).sqrt(), rtol=0.2, atol=1e-3)


def test_draws_come_from_the_generator_or_the_global_stream(normal: Draw) -> None:
    logits = normal(4, 2)

    def seeded() -> Tensor:
        return reference.gumbel_matching_marginals(logits, 50, generator=torch.Generator().manual_seed(3)).frequencies

    state = torch.get_rng_state()
    assert torch.equal(seeded(), seeded())
    assert torch.equal(torch.get_rng_state(), state)
    reference.gumbel_matching_marginals(logits, 50)
    assert not torch.equal(torch.get_rng_state(), state)


def test_bad_input_is_refused(normal: Draw, gumbel: Draw) -> None:
    logits, noise = normal(3, 2), gumbel(3, 2)
    with pytest.raises(ValueError, match="row must be one of the 3 rows, 0 <= row < 3, got 3"):
        reference.gumbel_matching_conditional(logits, noise, 3)
    with pytest.raises(ValueError, match="num_draws must be finite and > 0, got 0"):
        reference.gumbel_matching_marginals(logits, 0)
    with pytest.raises(ValueError, match="temperature must be finite and > 0, got nan"):
        reference.gumbel_matching_conditional(logits, noise, 0, temperature=float("nan"))
