# SPDX-License-Identifier: Apache-2.0
"""Each way to hand in something wrong, and the message that says so."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.balancing import sinkhorn


def logits(**entries: float) -> Tensor:
    x = torch.zeros(4, 2)
    for where, value in entries.items():
        x[int(where[1]), int(where[2])] = value
    return x


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "logits must be finite or -inf .*, got nan in row 2"),
        (math.inf, "logits must be finite or -inf .*, got inf in row 2"),
    ],
)
def test_not_a_number(value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sinkhorn(logits(_21=value))


def test_row_without_an_expert() -> None:
    with pytest.raises(ValueError, match="logits must leave every row an expert, got -inf .* in row 1: mask rows"):
        sinkhorn(logits(_10=-math.inf, _11=-math.inf))


def test_the_row_is_named_within_its_problem() -> None:
    x = torch.zeros(2, 3, 4, 2)
    x[1, 2, 3, 0] = math.nan
    with pytest.raises(ValueError, match=r"row 3 of problem"):
        sinkhorn(x)


@pytest.mark.parametrize("capacity", [1, [1, 2], torch.tensor([3, 0])])
def test_capacity_that_cannot_hold(capacity: Any) -> None:
    with pytest.raises(ValueError, match="capacity must hold every row: 4 rows .* raise capacity"):
        sinkhorn(logits(), capacity)


def test_capacity_counts_rows_that_are_not_masked() -> None:
    mask = torch.tensor([True, True, True, False])
    sinkhorn(logits(), [2, 1], mask=mask)
    with pytest.raises(ValueError, match="capacity must hold every row: 3 rows"):
        sinkhorn(logits(), 1, mask=mask)


@pytest.mark.parametrize("capacity", [-1, [5, -1], torch.tensor([5, -1])])
def test_negative_capacity(capacity: Any) -> None:
    with pytest.raises(ValueError, match="capacity must be >= 0, got -1"):
        sinkhorn(logits(), capacity)


def test_capacity_that_closes_all_of_a_row() -> None:
    with pytest.raises(ValueError, match="capacity must leave every row an expert, got 0 .* row 1"):
        sinkhorn(logits(_11=-math.inf), [0, 4])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        (2.0, "capacity must be an integer, got 2.0"),
        (True, "capacity must be an integer, got True"),
        ([2.0, 2.0], "capacity must hold integers"),
        (torch.tensor([2.0, 2.0]), "capacity must be an integer tensor"),
        (torch.tensor([2, 2, 2]), r"capacity must be an int, or have shape \[2\]"),
    ],
)
def test_capacity_of_the_wrong_kind(capacity: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sinkhorn(logits(), capacity)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[0.0, 1.0]], "logits must be a torch.Tensor, got list"),
        (torch.zeros(4, 2, dtype=torch.int64), "logits must be floating point"),
        (np.zeros((4, 2)), "logits must be a torch.Tensor, got ndarray"),
        (torch.zeros(4, 2, dtype=torch.complex64), "logits must be floating point .*: take logits.real"),
        (torch.eye(4).to_sparse(), r"logits must be a dense tensor, got .*: convert it with logits.to_dense\(\)"),
        (torch.zeros(4), r"logits must have shape \[..., n, k\]"),
        (torch.zeros(4, 0), "logits must have at least one expert"),
    ],
)
def test_logits_of_the_wrong_kind(bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sinkhorn(bad)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([True] * 4, "mask must be a torch.Tensor, got list"),
        (torch.ones(4), "mask must be boolean"),
        (torch.ones(4, dtype=torch.int32), "mask must be boolean"),
        (torch.ones(3, dtype=torch.bool), r"mask must have shape \[4\]"),
        (torch.ones(4, dtype=torch.bool, device="meta"), "mask must be on the device of logits"),
    ],
)
def test_mask_of_the_wrong_kind(mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sinkhorn(logits(), mask=mask)


def test_capacity_on_another_device() -> None:
    with pytest.raises(ValueError, match="capacity must be on the device of logits"):
        sinkhorn(logits(), torch.ones(2, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("tolerance", [0.0, -1e-6, math.nan, math.inf])
def test_tolerance_out_of_range(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance must be finite and > 0"):
        sinkhorn(logits(), tolerance=tolerance)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("tolerance", ["1e-6", None, True, [1e-6], 1j], ids=repr)
def test_tolerance_that_is_no_number(tolerance: Any) -> None:
    with pytest.raises(ValueError, match="tolerance must be a number > 0, got .*: give a positive number"):
        sinkhorn(logits(), tolerance=tolerance)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("iterations", [0, -3, 2.5, True])
def test_max_iterations_out_of_range(iterations: Any) -> None:
    with pytest.raises(ValueError, match="max_iterations must be an integer >= 1"):
        sinkhorn(logits(), max_iterations=iterations)


class TestPatternWithoutASolution:
    def test_more_rows_than_their_only_expert_takes(self) -> None:
        x = logits(_00=-math.inf, _10=-math.inf, _20=-math.inf)
        with pytest.raises(
            ValueError, match=r"got 3 rows whose finite logits are all at experts \[1\], which may take 2"
        ):
            sinkhorn(x)

    def test_expert_that_nobody_may_use(self) -> None:
        x = torch.zeros(6, 3)
        x[:, 1] = -math.inf
        with pytest.raises(ValueError, match=r"got 6 rows .* all at experts other than \[1\], which may take 4"):
            sinkhorn(x)
        assert sinkhorn(x, 3).converged

    def test_set_of_experts(self) -> None:
        x = torch.randn(2, 20, 5, generator=torch.Generator().manual_seed(0))
        x[1, :10, 2:] = -math.inf
        with pytest.raises(ValueError, match=r"got 10 rows .* all at experts \[0, 1\], which may take 9"):
            sinkhorn(x, [4, 5, 5, 5, 5])
        assert sinkhorn(x, [5, 5, 5, 5, 5]).converged.all()

    def test_sample_of_rows_without_a_solution_is_not_the_end(self) -> None:
        # Every 16th row, which is what the first guess looks at, insists on expert 0; all rows together fit.
        x = torch.randn(16384, 64, generator=torch.Generator().manual_seed(0))
        x[:4096:16, 1:] = -math.inf
        x[4096::16, 0] = -math.inf
        assert sinkhorn(x).converged

    def test_found_also_where_the_sample_had_none(self) -> None:
        x = torch.zeros(16384, 64)
        x[:, 3] = -math.inf
        with pytest.raises(
            ValueError, match=r"got 16384 rows .* all at experts other than \[3\], which may take 16128"
        ):
            sinkhorn(x)
