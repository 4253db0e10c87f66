# SPDX-License-Identifier: Apache-2.0
"""Thresholds found by counting, against sorting."""

import numpy as np
import pytest

from equipoise._core._threshold import extremes_around, threshold_above

FAMILIES = {
    "uniform": lambda rng, n: rng.random(n),
    "heavy tails": lambda rng, n: rng.standard_cauchy(n),
    "two far groups": lambda rng, n: rng.random(n) + 1e6 * (rng.random(n) > 0.5),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n", [2, 3, 10, 100])
def test_as_many_entries_as_asked_for_exceed_the_threshold(family: str, n: int) -> None:
    rng, found = np.random.default_rng(0), 0
    for count in range(1, n):
        d = FAMILIES[family](rng, n)
        threshold = threshold_above(d, count, n)
        if threshold == threshold:
            found += 1
            assert (d > threshold).sum() == count
            ordered = np.sort(d)
            assert extremes_around(d, threshold) == (ordered[n - count], ordered[n - count - 1])
    # Where a few entries are far from the rest it may give up, and the callers sort.
    assert found == n - 1 or family != "uniform"


def test_entries_of_minus_infinity_do_not_count() -> None:
    d = np.array([-np.inf, 0.3, -np.inf, 0.1, 0.2])
    assert 0.2 <= threshold_above(d, 1, 3) < 0.3
    assert 0.1 <= threshold_above(d, 2, 3) < 0.2


def test_equal_entries_leave_no_threshold() -> None:
    assert np.isnan(threshold_above(np.array([1.0, 1.0, 1.0, 2.0]), 2, 4))
    assert np.isnan(threshold_above(np.zeros(6), 3, 6))
