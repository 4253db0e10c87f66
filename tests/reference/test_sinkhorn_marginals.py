# SPDX-License-Identifier: Apache-2.0
"""Section 2.3: balancing in expectation approximates the marginals of the Gibbs distribution and of Gumbel-Matching."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equipoise import reference
from equipoise.balancing import sinkhorn

Draw = Callable[..., Tensor]


def test_error_at_two_rows_is_known() -> None:
    # Sinkhorn halves the log odds: u_00 u_11 / (u_01 u_10) stays what it was, and its root is the ratio of a row.
    for odds in (0.5, 2.0, 6.0):
        logits = torch.tensor([[odds, 0.0], [0.0, 0.0]], dtype=torch.float64)
        half, whole = (torch.tensor(x).double().sigmoid() for x in (odds / 2, odds))
        torch.testing.assert_close(sinkhorn(logits, tolerance=1e-12).log_p.exp()[0, 0], half, rtol=0, atol=1e-12)
        torch.testing.assert_close(reference.gibbs_log_marginals(logits)[0, 0].exp(), whole, rtol=0, atol=1e-12)


def test_error_falls_as_one_over_the_number_of_rows(normal: Draw) -> None:
    scaled: list[float] = []
    for n in (4, 8, 16, 32):
        logits = normal(5, n, 2)
        exact = torch.stack([reference.gibbs_log_marginals(a).exp() for a in logits])
        errors = (sinkhorn(logits, tolerance=1e-12).log_p.exp() - exact).abs().amax((1, 2))
        scaled.append(n * float(errors.mean()))
    # Measured over 10 other problems of each size: 0.30, 0.30, 0.29, 0.28.
    assert all(0.2 < error < 0.4 for error in scaled), scaled


@pytest.mark.parametrize(("n", "bound"), [(4, 0.1), (8, 0.06), (12, 0.05)])
def test_is_close_to_gumbel_matching_too(normal: Draw, generator: torch.Generator, n: int, bound: float) -> None:
    logits = normal(n, 2)
    matching = reference.gumbel_matching_marginals(logits, 4000, generator=generator)
    difference = (sinkhorn(logits, tolerance=1e-12).log_p.exp() - matching.frequencies).abs()
    assert (difference <= bound + 6 * matching.standard_errors).all()
