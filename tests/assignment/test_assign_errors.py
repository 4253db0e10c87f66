# SPDX-License-Identifier: Apache-2.0
"""Each way to hand in something wrong, and the message that says so."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.assignment import detour_costs
from support.methods import METHODS

# One problem of each size has its own way through the default solver.
SIZES = [(8, 4), (1200, 12)]


def scores_of(n: int, k: int, *batch: int) -> torch.Tensor:
    return torch.randn(*batch, n, k, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n", "k"), SIZES)
class TestScores:
    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (math.nan, "scores must not be NaN, got NaN in row 5: mask the row"),
            (math.inf, r"scores must be below \+inf, got \+inf in row 5: use a large finite score"),
        ],
    )
    @pytest.mark.parametrize("expert", [0, -1])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_nan_and_plus_infinity(
        self, n: int, k: int, method: str, bad: float, message: str, expert: int, dtype: torch.dtype
    ) -> None:
        scores = scores_of(n, k).to(dtype)
        scores[5, expert] = bad
        with pytest.raises(ValueError, match=message):
            eq.assign(scores, method=method)

    def test_whole_row_of_nan(self, n: int, k: int, method: str) -> None:
        scores = scores_of(n, k)
        scores[5] = math.nan
        with pytest.raises(ValueError, match="got NaN in row 5"):
            eq.assign(scores, method=method)

    def test_nan_at_an_expert_without_capacity(self, n: int, k: int, method: str) -> None:
        scores = scores_of(n, k)
        scores[5, 1] = math.nan
        with pytest.raises(ValueError, match="got NaN in row 5"):
            eq.assign(scores, [n, 0] + [n] * (k - 2), method=method)

    def test_the_problem_is_named(self, n: int, k: int, method: str) -> None:
        scores = scores_of(n, k, 2, 2)
        scores[1, 0, 7, 0] = math.nan
        with pytest.raises(ValueError, match="got NaN in row 7 of problem 2"):
            eq.assign(scores, method=method)

    def test_row_without_an_expert(self, n: int, k: int, method: str) -> None:
        scores = scores_of(n, k)
        scores[6] = -math.inf
        with pytest.raises(
            ValueError, match="scores must leave every row an expert, but row 6 is -inf for all of them"
        ):
            eq.assign(scores, n, method=method)
        mask = torch.arange(n) != 6
        assert eq.assign(scores, mask=mask, method=method).z[6] == k

    def test_row_whose_experts_have_no_capacity(self, n: int, k: int, method: str) -> None:
        scores = scores_of(n, k)
        scores[6, 1:] = -math.inf
        with pytest.raises(ValueError, match="row 6 is -inf for all that have a capacity above 0: .* raise a capacity"):
            eq.assign(scores, [0] + [n] * (k - 1), method=method)

    def test_set_of_rows_without_room(self, n: int, k: int, method: str) -> None:
        scores = scores_of(n, k)
        c = n // k
        scores[2 : 2 * c + 3, 2:] = -math.inf  # one row too many for experts 0 and 1
        message = rf"-inf confines {2 * c + 1} rows, among them row 2, to experts 0, 1, which hold {2 * c}: allow more"
        with pytest.raises(ValueError, match=message):
            eq.assign(scores, method=method)

    def test_set_of_rows_without_room_and_with_slack(self, n: int, k: int, method: str) -> None:
        scores = scores_of(n, k)
        c = n // k
        scores[: c + 2, 1:] = -math.inf
        with pytest.raises(ValueError, match=rf"among them row 0, to experts 0, which hold {c + 1}"):
            eq.assign(scores, c + 1, method=method)


@pytest.mark.parametrize("method", METHODS)
def test_only_expert_that_nobody_may_use_leaves_too_little_room(method: str) -> None:
    scores = scores_of(8, 4)
    scores[:, 3] = -math.inf
    with pytest.raises(ValueError, match="scores must leave the rows room, but -inf confines 8 rows.* which hold 6"):
        eq.assign(scores, 2, method=method)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[0.0, 1.0]], "scores must be a torch.Tensor, got list: wrap it in torch.as_tensor"),
        (
            torch.zeros(4, 2, dtype=torch.int64),
            r"scores must be floating point .*, got torch.int64: .*scores.float\(\)",
        ),
        (torch.zeros(4, 2, dtype=torch.bool), "scores must be floating point .*, got torch.bool"),
        (
            torch.zeros(4, 2, dtype=torch.complex64),
            "scores must be floating point .*, got torch.complex64: take scores.real",
        ),
        (np.zeros((4, 2)), "scores must be a torch.Tensor, got ndarray: wrap it in torch.as_tensor"),
        (None, "scores must be a torch.Tensor, got NoneType"),
        (torch.eye(4).to_sparse(), r"scores must be a dense tensor, got .*sparse_coo: convert it with scores.to_dense"),
        (
            torch.nested.nested_tensor([torch.zeros(4, 2), torch.zeros(3, 2)], layout=torch.jagged),
            "scores must be a dense tensor, got a nested one: pad its parts, and mask the padding",
        ),
        (torch.zeros(4), r"scores must have shape \[..., n, k\], rows by experts, got \[4\]"),
        (torch.tensor(1.0), r"scores must have shape \[..., n, k\], rows by experts, got \[\]"),
        (torch.zeros(4, 0), r"scores must have at least one expert .*, got shape \[4, 0\]"),
    ],
)
def test_scores_of_the_wrong_kind(bad: Any, message: str) -> None:
    assignment = eq.assign(scores_of(4, 2))
    for call in (eq.assign, lambda x: eq.conditional_values(x, assignment)):
        with pytest.raises(ValueError, match=message):
            call(bad)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("bad", [None, 3, torch.zeros(4, dtype=torch.int64), (0, 1)], ids=repr)
def test_not_an_assignment(bad: Any) -> None:
    message = f"assignment must be an Assignment, got {type(bad).__name__}: pass what assign returned for these scores"
    for call in (eq.conditional_values, detour_costs):
        with pytest.raises(ValueError, match=message):
            call(scores_of(4, 2), bad)


@pytest.mark.parametrize("method", METHODS)
class TestCapacity:
    @pytest.mark.parametrize("capacity", [1, [1, 1, 1, 4], torch.tensor([7, 0, 0, 0]), 0])
    def test_too_small_for_the_rows(self, method: str, capacity: Any) -> None:
        message = "capacity must sum to at least the number of rows, 8, got [047]: raise it, or mask rows"
        with pytest.raises(ValueError, match=message):
            eq.assign(scores_of(8, 4), capacity, method=method)

    def test_too_small_in_one_problem(self, method: str) -> None:
        capacity = torch.full([3, 2, 4], 2)
        capacity[1, 1, 0] = 1
        with pytest.raises(ValueError, match="at least the number of rows, 8 in problem 3, got 7"):
            eq.assign(scores_of(8, 4, 3, 2), capacity, method=method)

    def test_only_rows_that_are_not_masked_count(self, method: str) -> None:
        mask = torch.arange(8) < 5
        assert eq.assign(scores_of(8, 4), [5, 0, 0, 0], mask=mask, method=method).counts.tolist() == [5, 0, 0, 0]
        with pytest.raises(ValueError, match="at least the number of rows, 5, got 4"):
            eq.assign(scores_of(8, 4), [4, 0, 0, 0], mask=mask, method=method)

    @pytest.mark.parametrize("capacity", [-1, [9, 9, 9, -1], torch.tensor([9, 9, 9, -1])])
    def test_negative(self, method: str, capacity: Any) -> None:
        with pytest.raises(ValueError, match="capacity must be >= 0, got -1: give the number of rows"):
            eq.assign(scores_of(8, 4), capacity, method=method)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        (2.0, r"capacity must be an integer, got 2.0: round it, for example math.ceil\(capacity\)"),
        (True, "capacity must be an integer, got True"),
        ([2.0, 2, 2, 2], r"capacity must hold integers, got \[2.0, 2, 2, 2\]: round them first"),
        (torch.full([4], 2.0), r"capacity must be an integer tensor, got torch.float32: .*capacity.long\(\)"),
        (torch.ones(4, dtype=torch.bool), "capacity must be an integer tensor, got torch.bool"),
        ([2, 2, 2], r"capacity must be an int, or have shape \[4\] .* or \[3, 4\] .*, got \[3\]"),
        (torch.full([3, 1], 8), r"capacity must be an int, .* got \[3, 1\]"),
        (torch.full([2, 4], 8), r"capacity must be an int, .* got \[2, 4\]"),
        (torch.full([3, 8, 4], 8), r"capacity must be an int, .* got \[3, 8, 4\]"),
    ],
)
def test_capacity_of_the_wrong_kind(capacity: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eq.assign(scores_of(8, 4, 3), capacity)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[True] * 8] * 3, "mask must be a torch.Tensor, got list: wrap it in torch.as_tensor"),
        (True, "mask must be a torch.Tensor, got bool"),
        (torch.ones(3, 8, dtype=torch.int32), r"mask must be boolean, .*, got torch.int32: use mask.bool\(\)"),
        (torch.ones(3, 8, requires_grad=True), "mask must be boolean, .*, got torch.float32"),
        (torch.ones(3, 8, dtype=torch.bool).to_sparse(), r"mask must be a dense tensor, got .*: .* mask.to_dense\(\)"),
        (torch.tensor(True), r"mask must have shape \[3, 8\] .*, got \[\]"),
        (torch.ones(3, 8), r"mask must be boolean, .*, got torch.float32: use mask.bool\(\)"),
        (torch.ones(8, dtype=torch.bool), r"mask must have shape \[3, 8\] .*, got \[8\]: expand it"),
        (torch.ones(3, 4, dtype=torch.bool), r"mask must have shape \[3, 8\] .*, got \[3, 4\]"),
    ],
)
def test_mask_of_the_wrong_kind(mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eq.assign(scores_of(8, 4, 3), mask=mask)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ([[0.0] * 4] * 3, "prices must be a torch.Tensor, got list: wrap it in torch.as_tensor"),
        (0.0, "prices must be a torch.Tensor, got float"),
        (torch.zeros(3, 4, dtype=torch.complex64), "prices must be floating point, got torch.complex64"),
        (torch.zeros(3, 4).to_sparse(), r"prices must be a dense tensor, got .*: .* prices.to_dense\(\)"),
        (torch.tensor(0.0), r"prices must have shape \[3, 4\] .*, got \[\]"),
        (torch.zeros(4), r"prices must have shape \[3, 4\] .*, got \[4\]: pass the .prices of an Assignment"),
        (torch.zeros(3, 8), r"prices must have shape \[3, 4\] .*, got \[3, 8\]"),
        (torch.zeros(3, 4, dtype=torch.int64), "prices must be floating point, got torch.int64"),
        (torch.full([3, 4], math.nan), "prices must be finite, got a NaN or an infinity"),
        (torch.full([3, 4], -math.inf), "prices must be finite, got a NaN or an infinity"),
    ],
)
def test_prices_of_the_wrong_kind(prices: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eq.assign(scores_of(8, 4, 3), prices=prices)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [("mask", [8], torch.bool), ("prices", [4], torch.float64), ("capacity", [4], torch.int64)],
)
def test_arguments_on_another_device(name: str, shape: list[int], dtype: torch.dtype) -> None:
    elsewhere = torch.ones(shape, dtype=dtype, device="meta")
    with pytest.raises(ValueError, match=rf"{name} must be on the device of scores \(cpu\), got meta: move it with"):
        eq.assign(scores_of(8, 4), **{name: elsewhere})


def test_unknown_method_lists_the_known_ones() -> None:
    known = "'auto', 'primal-dual', 'settle', 'cycle-cancelling', 'auction'"
    with pytest.raises(ValueError, match=f"method must be one of {known}, got 'hungarian'"):
        eq.assign(scores_of(8, 4), method="hungarian")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("method", [None, 3, ["auto"], np.zeros(2)], ids=repr)
def test_method_that_is_no_name(method: Any) -> None:
    with pytest.raises(ValueError, match="method must be one of 'auto', .*, got "):
        eq.assign(scores_of(8, 4), method=method)


def test_default_solver_is_for_the_cpu() -> None:
    with pytest.raises(ValueError, match='method "primal-dual" needs scores on the CPU, got meta: use "settle"'):
        eq.assign(torch.empty(8, 4, device="meta"), method="primal-dual")


@pytest.mark.parametrize(("bad", "message"), [(torch.nan, "must not be NaN, got NaN"), (torch.inf, r"below \+inf")])
@pytest.mark.parametrize("top_k", [2, 8])
def test_an_illegal_score_is_found_in_a_row_whose_offers_were_guessed(bad: float, message: str, top_k: int) -> None:
    scores = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
    scores[1503, 17] = bad
    with pytest.raises(ValueError, match=rf"scores .*{message}.* row 1503"):
        eq.assign(scores, top_k=top_k)
