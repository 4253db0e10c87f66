# SPDX-License-Identifier: Apache-2.0
"""Gumbel-Matching (eq. 4) by brute force: its distribution, its marginals, and the conditional of one row.

The conditional is found here without the formula that the samplers use: the reduced problems are solved one by one, the
chance that one Gumbel variable beats the others is integrated numerically, and a second version redraws the noise.

Legend: n rows (datapoints), k columns (experts), m assignments.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_positive
from equipoise.assignment import assign
from equipoise.ops import draw_gumbel
from equipoise.reference._checks import check_row
from equipoise.reference._distribution import AssignmentDistribution
from equipoise.reference._enumeration import Capacity, best_assignment, enumerate_assignments, one_problem

# Draws that are solved at once: bounds the memory, changes nothing else.
CHUNK = 4096


@dataclass(frozen=True, slots=True, eq=False)
class MonteCarloMarginals:
    """Frequencies of z_i = j over independent draws.

    Attributes:
        frequencies: the estimate of the marginals.
        standard_errors: sqrt(f (1 - f) / num_draws), elementwise.
        num_draws: of the estimate.

    Example:
        >>> from equipoise import reference
        >>> estimate = reference.gumbel_matching_marginals(torch.zeros(4, 2), 1000)
        >>> estimate.frequencies.shape, estimate.num_draws
        (torch.Size([4, 2]), 1000)
    """

    frequencies: Float[Tensor, "n k"]
    standard_errors: Float[Tensor, "n k"]
    num_draws: int


def gumbel_matching_marginals(
    logits: Float[Tensor, "n k"],
    num_draws: int,
    *,
    temperature: float = 1.0,
    capacity: Capacity = None,
    generator: torch.Generator | None = None,
) -> MonteCarloMarginals:
    """Estimates P(z_i = j) under Gumbel-Matching, whose marginals have no closed form, with `equipoise.assign`.

    Args:
        logits: a.
        num_draws: how many assignments to draw.
        temperature: tau > 0.
        capacity: the most rows an expert takes; None means ceil(n / k).
        generator: of the noise; None means torch's global stream.

    Returns:
        Frequencies with their standard errors.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> estimate = reference.gumbel_matching_marginals(torch.zeros(4, 2), 1000)
        >>> bool(((estimate.frequencies - 0.5).abs() < 6 * estimate.standard_errors).all())
        True
    """
    check_positive("num_draws", num_draws)
    check_positive("temperature", temperature)
    logits, slots = one_problem("logits", logits.detach(), capacity)
    n, k = logits.shape
    counts = torch.zeros(n, k, dtype=torch.float64)
    for start in range(0, num_draws, CHUNK):
        draws = min(CHUNK, num_draws - start)
        noise = draw_gumbel([draws, n, k], generator=generator, dtype=torch.float64)
        z = assign(logits / temperature + noise, slots).z
        counts += torch.nn.functional.one_hot(z, k).sum(0)
    frequencies = counts / num_draws
    return MonteCarloMarginals(frequencies, (frequencies * (1 - frequencies) / num_draws).sqrt(), num_draws)


def gumbel_matching_distribution(
    logits: Float[Tensor, "n k"],
    gumbel: Float[Tensor, "draws n k"],
    *,
    temperature: float = 1.0,
    capacity: Capacity = None,
) -> AssignmentDistribution:
    """Counts how often each assignment solves eq. (4), over given draws of the noise.

    Args:
        logits: a.
        gumbel: standard Gumbel noise, one block [n, k] a draw.
        temperature: tau > 0.
        capacity: the most rows an expert takes; None means ceil(n / k).

    Returns:
        All assignments within capacity, in the order of `gibbs_distribution`, with their frequencies.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> noise = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]])
        >>> reference.gumbel_matching_distribution(torch.zeros(2, 2), noise).probability.tolist()
        [0.5, 0.5]
    """
    check_positive("temperature", temperature)
    logits, slots = one_problem("logits", logits.detach(), capacity)
    n, k = logits.shape
    z = enumerate_assignments(n, k, slots)
    one_hot = torch.nn.functional.one_hot(z, k).double().reshape(len(z), n * k)
    counts = torch.zeros(len(z), dtype=torch.float64)
    for noise in gumbel.double().split(CHUNK):
        values = (logits / temperature + noise).reshape(-1, n * k) @ one_hot.T
        counts += values.argmax(1).bincount(minlength=len(z))
    return AssignmentDistribution(z, counts / len(gumbel), k)


def gumbel_matching_conditional(
    logits: Float[Tensor, "n k"],
    gumbel: Float[Tensor, "n k"],
    row: int,
    *,
    temperature: float = 1.0,
    capacity: Capacity = None,
) -> Float[Tensor, " k"]:
    """Computes P(z_i = j) when only row i's noise is redrawn (App. D.4), by definition.

    Row i goes to j exactly when v_-ij + a_ij / tau + g_ij is the largest over j (eq. 8), where v_-ij is the value of
    the best assignment of the other rows with one slot of expert j taken. Each v_-ij is a problem of its own here,
    solved by enumeration; the chance that the j-th of k shifted Gumbel variables is largest is an integral over its
    value.

    Args:
        logits: a.
        gumbel: the noise; row i of it is not read.
        row: i.
        temperature: tau > 0.
        capacity: the most rows an expert takes; None means ceil(n / k).

    Returns:
        The k probabilities. They are not normalised: that they sum to 1 checks the computation.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> logits = torch.tensor([[3.0, 1.0], [1.0, 1.0]]).double().log()
        >>> q = reference.gumbel_matching_conditional(logits, torch.zeros(2, 2), 0)
        >>> [round(x, 12) for x in q.tolist()]
        [0.75, 0.25]
    """
    check_positive("temperature", temperature)
    logits, slots = one_problem("logits", logits.detach(), capacity)
    n, k = logits.shape
    check_row(row, n)
    others = torch.arange(n) != row
    scores = (logits / temperature + gumbel.double())[others]
    location = torch.full((k,), -torch.inf, dtype=torch.float64)
    for expert in range(k):
        if slots[expert] > 0:
            left = slots - torch.nn.functional.one_hot(torch.tensor(expert), k)
            location[expert] = best_assignment(scores, left)[0] + logits[row, expert] / temperature
    return _chance_to_be_largest(location)


def gumbel_matching_redraws(
    logits: Float[Tensor, "n k"],
    gumbel: Float[Tensor, "n k"],
    row: int,
    row_gumbel: Float[Tensor, "draws k"],
    *,
    temperature: float = 1.0,
    capacity: Capacity = None,
) -> Float[Tensor, " k"]:
    """Estimates the same as `gumbel_matching_conditional` by doing it: redraw row i's noise, solve again, count.

    Args:
        logits: a.
        gumbel: the noise of the other rows; row i of it is not read.
        row: i.
        row_gumbel: fresh standard Gumbel noise for row i, one row a draw.
        temperature: tau > 0.
        capacity: the most rows an expert takes; None means ceil(n / k).

    Returns:
        How often z_i = j, for each j.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> fresh = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> reference.gumbel_matching_redraws(torch.zeros(2, 2), torch.zeros(2, 2), 0, fresh).tolist()
        [0.5, 0.5]
    """
    check_row(row, len(logits))
    noise = gumbel.double().repeat(len(row_gumbel), 1, 1)
    noise[:, row] = row_gumbel.double()
    drawn = gumbel_matching_distribution(logits, noise, temperature=temperature, capacity=capacity)
    return drawn.marginals()[row]


def _chance_to_be_largest(location: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """Integrates P(location_j + g_j is the largest) = int f(x - location_j) prod_{j' != j} F(x - location_j') dx.

    F(x) = exp(-exp(-x)), f(x) = exp(-x) F(x). The integrand is smooth and decays on both sides, so the trapezoidal
    rule converges exponentially in 1 / step; the range leaves out less than 1e-16 on either side.
    """
    shifted = location - location.amax()
    step = 1 / 16
    x = torch.arange(-4.0, 40.0 + math.log(len(location)), step, dtype=torch.float64)
    log_all_below = -torch.exp(shifted - x[:, None]).sum(1, keepdim=True)
    return step * torch.exp(shifted - x[:, None] + log_all_below).sum(0)
