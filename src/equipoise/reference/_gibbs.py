# SPDX-License-Identifier: Apache-2.0
"""The Gibbs distribution over assignments within capacity, p(z) ~ exp((1/tau) sum_i a_{i, z_i}) (eq. 5).

Written out for small problems, and by dynamic programming for larger ones. How the rows before i were assigned matters
to the rows after it only through how many slots of each expert are used. So the state is that vector of counts, the
sum over assignments is a sum over paths through prod_j (c_j + 1) states, and n = 40 rows at k = 2 experts, 1.4e11
assignments, take 441 states.

Legend: n rows (datapoints), k columns (experts), m assignments.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equipoise._core import check_positive
from equipoise.reference._checks import check_possible, check_small_enough
from equipoise.reference._distribution import AssignmentDistribution
from equipoise.reference._enumeration import Capacity, assignment_values, enumerate_assignments, one_problem

MAX_STATES = 2**24


def gibbs_distribution(
    logits: Float[Tensor, "n k"], *, temperature: float = 1.0, capacity: Capacity = None
) -> AssignmentDistribution:
    """Writes out eq. (5): every assignment within capacity, with its probability.

    Args:
        logits: a; -inf forbids a pair.
        temperature: tau > 0.
        capacity: the most rows an expert takes; None means ceil(n / k).

    Returns:
        The distribution, as a list.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> gibbs = reference.gibbs_distribution(torch.tensor([[3.0, 1.0], [1.0, 3.0]]).double().log())
        >>> [round(p, 12) for p in gibbs.probability.tolist()]
        [0.9, 0.1]
    """
    potentials, slots = _potentials(logits, temperature, capacity)
    n, k = potentials.shape
    z = enumerate_assignments(n, k, slots)
    values = assignment_values(potentials, z)
    check_possible("logits", values.logsumexp(0))
    return AssignmentDistribution(z, values.softmax(0), k)


def log_normaliser(
    logits: Float[Tensor, "n k"], *, temperature: float = 1.0, capacity: Capacity = None
) -> Float[Tensor, ""]:
    """Computes log sum_z exp((1/tau) sum_i a_{i, z_i}) over the assignments within capacity.

    This is the permanent's generalisation to n x k (App. D.5): with n = k and capacity 1 it is the log permanent of
    exp(a / tau), and without slack it is that of the matrix with column j repeated c_j times, less sum_j log(c_j!).

    Args:
        logits: a; -inf forbids a pair.
        temperature: tau > 0.
        capacity: the most rows an expert takes; None means ceil(n / k).

    Returns:
        The log of the sum; -inf if the forbidden pairs leave no assignment.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> reference.log_normaliser(torch.zeros(40, 2)).exp().round().item()  # 40 choose 20
        137846528820.0
    """
    potentials, slots = _potentials(logits, temperature, capacity)
    return _completions(potentials, _states(slots, len(potentials))[0])[0][0]


def gibbs_log_marginals(
    logits: Float[Tensor, "n k"], *, temperature: float = 1.0, capacity: Capacity = None
) -> Float[Tensor, "n k"]:
    """Computes log P(z_i = j) under eq. (5), by dynamic programming over counts.

    Args:
        logits: a; -inf forbids a pair.
        temperature: tau > 0.
        capacity: the most rows an expert takes; None means ceil(n / k).

    Returns:
        The log-marginals; each row's exponentials sum to 1.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> logits = torch.tensor([[3.0, 1.0], [1.0, 3.0]]).double().log()
        >>> [round(p, 12) for p in reference.gibbs_log_marginals(logits)[0].exp().tolist()]
        [0.9, 0.1]
    """
    potentials, slots = _potentials(logits, temperature, capacity)
    following, preceding = _states(slots, len(potentials))
    after = _completions(potentials, following)
    check_possible("logits", after[0][0])
    before = torch.full_like(after[0], -torch.inf)
    before[0] = 0.0
    marginals = torch.empty_like(potentials)
    for i, row in enumerate(potentials):
        marginals[i] = (before[:, None] + row + after[i + 1][following]).logsumexp(0)
        before = (before[preceding] + row).logsumexp(1)
    return marginals - after[0][0]


def sample_gibbs(
    logits: Float[Tensor, "n k"],
    gumbel: Float[Tensor, "*draws n k"],
    *,
    temperature: float = 1.0,
    capacity: Capacity = None,
) -> Int[Tensor, "*draws n"]:
    """Draws exactly from eq. (5): filters backward over counts, then samples row after row.

    Given the rows before it, row i takes expert j with probability proportional to exp(a_ij / tau) times the weight of
    all completions from the counts that this leaves; the Gumbel-Max trick turns the noise into that choice.

    Args:
        logits: a; -inf forbids a pair.
        gumbel: standard Gumbel noise, one block [n, k] a draw.
        temperature: tau > 0.
        capacity: the most rows an expert takes; None means ceil(n / k).

    Returns:
        z, one assignment a draw, a pure function of the noise.

    Example:
        >>> import torch
        >>> from equipoise import reference
        >>> noise = -torch.empty(100, 4, 2).exponential_().log()
        >>> z = reference.sample_gibbs(torch.randn(4, 2), noise)
        >>> z.sum(1).unique().tolist()  # two of the four rows at expert 1, every time
        [2]
    """
    potentials, slots = _potentials(logits, temperature, capacity)
    n, k = potentials.shape
    following, _ = _states(slots, n)
    after = _completions(potentials, following)
    check_possible("logits", after[0][0])
    noise = gumbel.reshape(math.prod(gumbel.shape[:-2]), n, k).double()
    state = torch.zeros(len(noise), dtype=torch.int64)
    z = torch.empty(len(noise), n, dtype=torch.int64)
    for i in range(n):
        log_weight = potentials[i] + after[i + 1][following[state]]
        z[:, i] = (log_weight + noise[:, i]).argmax(1)
        state = following[state, z[:, i]]
    return z.reshape(gumbel.shape[:-1])


def _potentials(
    logits: Float[Tensor, "n k"], temperature: float, capacity: Capacity
) -> tuple[Float[Tensor, "n k"], Int[Tensor, " k"]]:
    """Checks a problem; returns a / tau in float64 and its capacities."""
    check_positive("temperature", temperature)
    logits, slots = one_problem("logits", logits.detach(), capacity)
    return logits / temperature, slots


def _states(slots: Int[Tensor, " k"], num_points: int) -> tuple[Int[Tensor, "s k"], Int[Tensor, "s k"]]:
    """Numbers the vectors of counts within capacity, none used first, and links those that differ by one slot.

    Returns, for each state and expert, the state with one row more at the expert and the one with one row less. Where
    there is none they name the last state, which stands for all that cannot be and leads only to itself.
    """
    size = math.prod(slots.add(1).tolist())
    check_small_enough("counts times rows", (num_points + 1) * size, MAX_STATES)
    stride = torch.tensor([math.prod(slots[j + 1 :].add(1).tolist()) for j in range(len(slots))])
    state = torch.arange(size + 1)[:, None]
    counts = state // stride % (slots + 1)
    real = state < size
    following = torch.where(real & (counts < slots), state + stride, size)
    return following, torch.where(real & (counts > 0), state - stride, size)


def _completions(potentials: Float[Tensor, "n k"], following: Int[Tensor, "s k"]) -> list[Float[Tensor, " s"]]:
    """Sums over the ways to finish: entry i, at a state, is log sum exp over the choices of rows i, ..., n - 1."""
    messages = [torch.zeros(len(following), dtype=torch.float64)]
    messages[0][-1] = -torch.inf
    for row in potentials.flip(0):
        messages.append((messages[-1][following] + row).logsumexp(1))
    return messages[::-1]
