# SPDX-License-Identifier: Apache-2.0
"""Every kind of capacity that is accepted, and the message for every kind that is not."""

from typing import Any

import numpy as np
import pytest
import torch

import equipoise as eq
from support.methods import METHODS


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "capacity",
    [
        np.int64(3),
        np.uint8(3),
        np.array(3),
        np.array([3, 3, 3, 3]),
        np.array([3, 3, 3, 3], np.uint16),
        np.array([3, 3, 3, 3], np.uint64),
        np.full([2, 4], 3),
        [np.int64(3)] * 4,
        [torch.tensor(3)] * 4,
        [[3, 3, 3, 3], (3, 3, 3, 3)],
        [np.array([3, 3, 3, 3])] * 2,
        (3, 3, 3, 3),
        torch.tensor(3),
        torch.tensor([3, 3, 3, 3], dtype=torch.uint8),
        torch.tensor([3, 3, 3, 3], dtype=torch.uint16),
        torch.tensor([3, 3, 3, 3], dtype=torch.int32),
    ],
    ids=repr,
)
def test_integers_of_every_kind(capacity: Any) -> None:
    scores = draw(2, 8, 4)
    a, expected = eq.assign(scores, capacity), eq.assign(scores, 3)
    assert torch.equal(a.z, expected.z)
    assert a.capacity.tolist() == [[3] * 4] * 2
    assert a.capacity.dtype == torch.int64
    torch.testing.assert_close(eq.sinkhorn(scores, capacity).log_p, eq.sinkhorn(scores, 3).log_p)


HUGE = [2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**30]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n", "k"), [(9, 2), (8, 4), (1200, 12)])
@pytest.mark.parametrize("huge", HUGE)
def test_capacity_without_a_limit(method: str, n: int, k: int, huge: int) -> None:
    scores = draw(n, k)
    kinds: list[Any] = [huge, [huge] * k]
    if huge < 2**63:
        kinds += [np.int64(huge), np.full(k, huge), torch.full([k], huge), torch.tensor(huge)]
    elif huge < 2**64:
        kinds += [np.uint64(huge), np.full(k, huge, np.uint64)]
    for capacity in kinds:
        a = eq.assign(scores, capacity, method=method)
        assert torch.equal(a.z, scores.argmax(-1))
        assert a.capacity.tolist() == [min(huge, 2**40)] * k
        assert (a.gap.item(), a.prices.tolist()) == (0.0, [0.0] * k)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n", "k"), [(9, 2), (8, 4), (1200, 12)])
def test_one_expert_without_a_limit(method: str, n: int, k: int) -> None:
    scores, rest = draw(n, k), [-(-n // k)] * (k - 1)
    expected = eq.assign(scores, [n, *rest], method=method)
    a = eq.assign(scores, [2**70, *rest], method=method)
    assert float(a.value) == pytest.approx(float(expected.value), rel=1e-12 if method != "auction" else 0.1)
    assert a.capacity.tolist() == [2**40, *rest]
    if method != "auction":
        torch.testing.assert_close(eq.conditional_values(scores, a), eq.conditional_values(scores, expected))


def test_sinkhorn_without_a_limit() -> None:
    logits = draw(8, 4)
    for huge in HUGE:
        torch.testing.assert_close(eq.sinkhorn(logits, huge).log_p, logits.log_softmax(-1))


GIVE = "give the number of rows an expert may take"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        ("2", f"capacity must be None, an int, a list of ints or an integer tensor, got str '2': {GIVE}"),
        (b"2", "an integer tensor, got bytes b'2'"),
        ({2}, r"an integer tensor, got set \{2\}"),
        ({0: 2}, r"an integer tensor, got dict \{0: 2\}"),
        (object, "an integer tensor, got type <class 'object'>"),
        (True, f"capacity must be an integer, got True: {GIVE}"),
        (np.True_, f"capacity must be an integer, got np.True_: {GIVE}"),
        (2.0, r"capacity must be an integer, got 2.0: round it, for example math.ceil\(capacity\)"),
        (np.float32(2), r"capacity must be an integer, got np.float32\(2.0\): round it"),
        (2 + 0j, r"capacity must be an integer, got \(2\+0j\): round it"),
        (-(2**70), f"capacity must be >= 0, got -1180591620717411303424: {GIVE}"),
        ([9, 9, 9, -(2**70)], f"capacity must be >= 0, got -1180591620717411303424: {GIVE}"),
        (np.array([9, 9, 9, -1]), "capacity must be >= 0, got -1"),
        (["2"] * 4, rf"capacity must hold integers, got \['2', '2', '2', '2'\]: {GIVE}"),
        ([True] * 4, rf"capacity must hold integers, got \[True, True, True, True\]: {GIVE}"),
        ([None] * 4, "capacity must hold integers, got .*None"),
        ([2.0, 2, 2, 2], r"capacity must hold integers, got \[2.0, 2, 2, 2\]: round them first"),
        ([[2, 2, 2, 2.5]], r"capacity must hold integers, got \[2, 2, 2, 2.5\]: round them first"),
        ([torch.tensor(2.0)] * 4, r"capacity must hold integers, got \[tensor\(2.\)"),
        ([[2, 2], [2]], r"capacity must have as many entries in every list, got \[\[2, 2\], \[2\]\]: give each"),
        ([2, [2, 2, 2]], "capacity must have as many entries in every list"),
        ([], r"capacity must be an int, or have shape \[4\] .*, got \[0\]: reshape it"),
        (np.full(4, 2.0), r"capacity must hold integers, got an array of float64: .*capacity.astype\(int\)"),
        (np.array([True] * 4), "capacity must hold integers, got an array of bool"),
        (np.full(3, 2), r"capacity must be an int, or have shape \[4\] .*, got \[3\]"),
        (torch.full([4], 2).to_sparse(), r"capacity must be a dense tensor, got .*sparse_coo: .*capacity.to_dense\(\)"),
        (torch.full([4], 2.0), r"capacity must be an integer tensor, got torch.float32: .*capacity.long\(\)"),
    ],
    ids=repr,
)
def test_capacity_of_the_wrong_kind(capacity: Any, message: str) -> None:
    for function in (eq.assign, eq.sinkhorn):
        with pytest.raises(ValueError, match=message):
            function(draw(8, 4), capacity)
