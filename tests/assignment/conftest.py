# SPDX-License-Identifier: Apache-2.0
"""Small random problems, and their oracle: every assignment, one by one."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

import equipoise as eq


@dataclass(frozen=True)
class Enumerated:
    """What looking at every assignment finds."""

    feasible: bool
    value: float
    conditional: np.ndarray


@cache
def _every_choice(n: int, k: int) -> np.ndarray:
    return np.array(list(itertools.product(range(k), repeat=n)), dtype=np.int64).reshape(k**n, n)


def _enumerate(scores: torch.Tensor, capacity: torch.Tensor, mask: torch.Tensor | None = None) -> Enumerated:
    s = scores.double().numpy()
    n, k = s.shape
    rows = np.arange(n) if mask is None else np.flatnonzero(mask.numpy())
    conditional = np.zeros((n, k))
    conditional[rows] = -np.inf
    choices = _every_choice(len(rows), k)
    counts = (choices[:, :, None] == np.arange(k)).sum(1)
    totals = s[rows[None], choices].sum(1)
    allowed = (counts <= capacity.numpy()).all(1) & (totals > -np.inf)
    choices, totals = choices[allowed], totals[allowed]
    for position, row in enumerate(rows):
        np.maximum.at(conditional[row], choices[:, position], totals)
    return Enumerated(bool(allowed.any()), float(totals.max(initial=-np.inf)), conditional)


@pytest.fixture(scope="session")
def enumerate_all() -> Callable[..., Enumerated]:
    """The best value of one small problem, and the best given each row's expert, by enumeration."""
    return _enumerate


Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _random_problem(seed: int) -> Problem:
    """Scores, capacity and mask of a small problem.

    Ties, many scales, slack, unequal and empty capacities, padding and forbidden pairs, each for some of the seeds. May
    be infeasible, though never for want of slots.
    """
    rng = np.random.default_rng(seed)
    n, k = int(rng.integers(0, 7)), int(rng.integers(1, 5))
    scores = {
        "normal": lambda: rng.normal(size=(n, k)),
        "integer": lambda: rng.integers(-2, 3, (n, k)).astype(float),
        "two values": lambda: rng.choice(rng.normal(size=2), (n, k)),
        "scaled": lambda: rng.normal(size=(n, k)) * 10.0 ** rng.integers(-30, 31),
        "mixed scales": lambda: rng.normal(size=(n, k)) * 10.0 ** rng.integers(-9, 10, (n, k)),
    }[rng.choice(["normal", "integer", "two values", "scaled", "mixed scales"])]()
    scores[rng.random((n, k)) < rng.choice([0.0, 0.3, 0.6])] = -np.inf
    mask = rng.random(n) < rng.choice([1.0, 0.7])
    capacity = rng.integers(0, 4, k)
    while capacity.sum() < mask.sum():
        capacity[rng.integers(k)] += 1
    return torch.from_numpy(scores), torch.from_numpy(capacity), torch.from_numpy(mask)


@pytest.fixture(scope="session")
def random_problem() -> Callable[[int], Problem]:
    """Scores [n, k], capacity [k] and mask [n] of a small problem, from a seed."""
    return _random_problem


def _check_certified(scores: torch.Tensor, a: eq.Assignment) -> None:
    """Everything that an exact `Assignment` promises, recomputed from the scores, in float64."""
    k = scores.shape[-1]
    s, taken = scores.detach().double(), a.z < k
    assert (a.z.dtype, a.counts.dtype, a.capacity.dtype, a.mask.dtype) == (torch.int64,) * 3 + (torch.bool,)
    assert {a.value.dtype, a.prices.dtype, a.gap.dtype} == {torch.float64}
    assert torch.equal(taken, a.mask)
    assert torch.equal(a.counts, (a.z.unsqueeze(-1) == torch.arange(k)).sum(-2))
    assert bool((a.counts <= a.capacity).all())
    assert bool((a.prices.isfinite() & (a.prices >= 0)).all())
    assert bool((a.prices[a.counts < a.capacity] == 0).all())
    assert bool((a.prices.amin(-1) == 0).all())
    expert = a.z.clamp(max=k - 1).unsqueeze(-1)
    here = s.gather(-1, expert).squeeze(-1).where(taken, 0.0)
    net = s - a.prices.unsqueeze(-2)
    regret = (net - net.gather(-1, expert)).amax(-1).where(taken, 0.0)
    gap = regret.sum(-1) + (a.prices * (a.capacity - a.counts)).sum(-1)
    assert bool(here.isfinite().all())
    # Two orders of summation of n float64 terms.
    rounding = 1e-14 * here.abs().sum(-1)
    assert bool(((a.value - here.sum(-1)).abs() <= rounding).all())
    if a.z.numel():
        largest = s.abs().where(s.isfinite() & taken.unsqueeze(-1), 0.0).amax((-2, -1))
        scale = torch.maximum(a.value.abs(), largest)
        assert bool((gap <= 1e-9 * scale).all()), (gap, scale)
        # The reported gap is that of these prices, not an assumed one.
        assert bool(((a.gap - gap).abs() <= 1e-12 * scale).all()), (a.gap, gap)


@pytest.fixture(scope="session")
def check_certified() -> Callable[[torch.Tensor, eq.Assignment], None]:
    """Asserts all that holds for the result of an exact method, the gap included."""
    return _check_certified
