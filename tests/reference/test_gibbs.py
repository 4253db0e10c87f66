# SPDX-License-Identifier: Apache-2.0
"""The Gibbs distribution: dynamic programming against enumeration, permanents, and exact sampling."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equipoise import reference

Draw = Callable[..., Tensor]

SIZES = [(1, 1, None), (4, 2, None), (6, 3, None), (4, 4, None), (5, 2, None), (5, 3, [1, 4, 2]), (3, 2, [3, 0])]


@pytest.mark.parametrize("temperature", [1.0, 0.2])
@pytest.mark.parametrize(("n", "k", "capacity"), SIZES)
def test_normaliser_and_marginals_are_those_of_the_list(
    normal: Draw, n: int, k: int, capacity: list[int] | None, temperature: float
) -> None:
    logits = normal(n, k)
    gibbs = reference.gibbs_distribution(logits, temperature=temperature, capacity=capacity)
    values = reference.assignment_values(logits / temperature, gibbs.z)
    log_total = reference.log_normaliser(logits, temperature=temperature, capacity=capacity)
    torch.testing.assert_close(log_total, values.logsumexp(0), rtol=0, atol=1e-12)
    log_marginals = reference.gibbs_log_marginals(logits, temperature=temperature, capacity=capacity)
    torch.testing.assert_close(log_marginals.exp(), gibbs.marginals(), rtol=0, atol=1e-13)


def test_forty_rows_are_within_reach(normal: Draw) -> None:
    logits = normal(40, 2)
    log_marginals = reference.gibbs_log_marginals(logits)
    torch.testing.assert_close(log_marginals.logsumexp(1), torch.zeros(40).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(log_marginals.exp().sum(0), torch.full((2,), 20).double(), rtol=0, atol=1e-11)
    # The marginals are the derivative of the log-normaliser.
    bump = torch.zeros(40, 2).double()
    bump[17, 1] = 1e-4
    difference = reference.log_normaliser(logits + bump) - reference.log_normaliser(logits - bump)
    torch.testing.assert_close(difference / 2e-4, log_marginals[17, 1].exp(), rtol=0, atol=1e-8)


def test_normaliser_counts_assignments_when_all_are_alike() -> None:
    total = reference.log_normaliser(torch.zeros(40, 2)).exp().item()
    assert total == pytest.approx(math.comb(40, 20), rel=1e-12)


def test_nothing_overflows_or_underflows(normal: Draw) -> None:
    logits = 1e4 * normal(12, 3)
    assert reference.log_normaliser(logits).isfinite()
    marginals = reference.gibbs_log_marginals(logits).exp()
    # Differences of sums near 1e5, which double precision holds to 1.5e-11, through 12 rows each way.
    torch.testing.assert_close(marginals.sum(1), torch.ones(12).double(), rtol=0, atol=24 * 1.5e-11)
    _, z = reference.best_assignment(logits)
    assert torch.equal(marginals.round().argmax(1), z)


def test_forbidden_pair_has_probability_zero(normal: Draw) -> None:
    logits = normal(4, 2)
    logits[1, 0] = -torch.inf
    marginals = reference.gibbs_log_marginals(logits).exp()
    torch.testing.assert_close(marginals, reference.gibbs_distribution(logits).marginals(), rtol=0, atol=1e-14)
    assert marginals[1].tolist() == pytest.approx([0.0, 1.0], abs=1e-14)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_permanent_is_the_normaliser_with_one_slot_each(normal: Draw, n: int) -> None:
    logits = normal(n, n)
    torch.testing.assert_close(
        reference.permanent(logits.exp()).log(), reference.log_normaliser(logits, capacity=1), rtol=0, atol=1e-11
    )


@pytest.mark.parametrize("capacity", [[2, 2, 2], [1, 2, 3]])
def test_permanent_of_repeated_columns_is_the_normaliser(normal: Draw, capacity: list[int]) -> None:
    logits = normal(6, 3)
    repeated = logits.repeat_interleave(torch.tensor(capacity), 1)
    orders = sum(math.lgamma(c + 1) for c in capacity)
    found = reference.permanent(repeated.exp()).log() - orders
    torch.testing.assert_close(found, reference.log_normaliser(logits, capacity=capacity), rtol=0, atol=1e-11)


def test_permanent_of_ones_is_a_factorial_and_takes_any_sign() -> None:
    assert reference.permanent(torch.ones(7, 7)).item() == math.factorial(7)
    assert reference.permanent(torch.tensor([[1.0, -2.0], [3.0, 4.0]])).item() == -2


@pytest.mark.parametrize(("n", "k", "capacity"), [(4, 2, None), (3, 3, None), (4, 2, 3), (4, 3, [2, 1, 2])])
def test_samples_have_the_gibbs_distribution(
    normal: Draw, gumbel: Draw, p_value: Callable[..., float], n: int, k: int, capacity: int | None
) -> None:
    logits = 0.5 * normal(n, k)
    gibbs = reference.gibbs_distribution(logits, capacity=capacity)
    noise = gumbel(40_000, n, k)
    counts = _tally(reference.sample_gibbs(logits, noise, capacity=capacity), gibbs.z)
    # False-alarm rate 1e-6; the control, a temperature 15 % off, shows that the test can fail.
    assert p_value(counts, gibbs.probability) > 1e-6
    warmer = _tally(reference.sample_gibbs(logits, noise, temperature=1.15, capacity=capacity), gibbs.z)
    assert p_value(warmer, gibbs.probability) < 1e-6


def test_samples_at_forty_rows_have_the_exact_marginals(normal: Draw, gumbel: Draw) -> None:
    logits = normal(40, 2)
    z = reference.sample_gibbs(logits, gumbel(20_000, 40, 2))
    p = reference.gibbs_log_marginals(logits)[:, 1].exp()
    assert torch.equal(z.sum(1), torch.full((20_000,), 20))
    # 40 two-sided tests: |z| > 5.5 has probability 4e-8 each, below 1e-6 together with room for the normal limit.
    assert ((z.double().mean(0) - p) / (p * (1 - p) / 20_000).sqrt()).abs().max() < 5.5


def test_sample_is_a_function_of_the_noise_and_keeps_its_shape(normal: Draw, gumbel: Draw) -> None:
    logits, noise = normal(5, 3), gumbel(2, 4, 5, 3)
    z = reference.sample_gibbs(logits, noise)
    assert z.shape == (2, 4, 5)
    assert torch.equal(z[1, 2], reference.sample_gibbs(logits, noise[1, 2]))


def test_no_rows() -> None:
    empty = torch.zeros(0, 2)
    assert reference.log_normaliser(empty).item() == 0
    assert reference.gibbs_log_marginals(empty).shape == (0, 2)
    assert reference.sample_gibbs(empty, torch.zeros(3, 0, 2)).shape == (3, 0)


def test_bad_input_is_refused(normal: Draw) -> None:
    with pytest.raises(ValueError, match="temperature must be finite and > 0, got 0"):
        reference.log_normaliser(normal(2, 2), temperature=0.0)
    with pytest.raises(ValueError, match="counts times rows must number at most"):
        reference.log_normaliser(normal(60, 6))
    impossible = torch.tensor([[0.0, -torch.inf], [0.0, -torch.inf]])
    assert reference.log_normaliser(impossible).item() == -torch.inf
    with pytest.raises(ValueError, match="logits must leave an assignment within capacity, got none"):
        reference.gibbs_log_marginals(impossible)
    with pytest.raises(ValueError, match="rows must number at most 20"):
        reference.permanent(torch.ones(21, 21))


@pytest.mark.usefixtures("unchecked")
def test_permanent_is_of_square_matrices() -> None:
    with pytest.raises(ValueError, match=r"matrix must be square, got shape \[2, 3\]: repeat the column"):
        reference.permanent(torch.ones(2, 3))


def _tally(z: Tensor, listed: Tensor) -> Tensor:
    """Counts how often each listed assignment occurs; every z must be listed."""
    base = int(listed.max()) + 1
    digits = base ** torch.arange(listed.shape[1])
    index = torch.full((base ** listed.shape[1],), -1)
    index[listed @ digits] = torch.arange(len(listed))
    return index[z @ digits].bincount(minlength=len(listed)).double()
