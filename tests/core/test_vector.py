# SPDX-License-Identifier: Apache-2.0
"""Instructions for kernels, called from a kernel, against NumPy."""

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from equipoise._core._vector import LANES, count_bits, larger, lowest_bit, not_below, smaller


@numba.njit
def extremes(x: NDArray[np.float64]) -> tuple[float, float]:
    most = least = x[0]
    for entry in x:
        most, least = larger(most, entry), smaller(least, entry)
    return most, least


@numba.njit
def found(row: NDArray[np.float64], prices: NDArray[np.float64], start: int, floor: float) -> list[int]:
    positions = [-1]
    bits = not_below(row, prices, start, floor)
    while bits != 0:
        positions.append(lowest_bit(bits))
        bits &= bits - np.uint64(1)
    return positions[1:]


@numba.njit
def lowest_and_count(bits: int) -> tuple[int, int]:
    return lowest_bit(np.uint64(bits)), count_bits(np.uint64(bits))


@pytest.mark.parametrize("bits", [1, 2, 0b1011000, 1 << 40, 1 << 63, 2**64 - 1])
def test_bits(bits: int) -> None:
    assert lowest_and_count(np.uint64(bits)) == (bin(bits)[::-1].index("1"), bin(bits).count("1"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
class TestInstructions:
    @pytest.mark.parametrize("size", [1, 7, 8, 64, 100])
    def test_larger_and_smaller(self, size: int, dtype: str) -> None:
        x = np.random.default_rng(size).normal(size=size).astype(dtype)
        x[size // 2] = -np.inf
        assert extremes(x) == (x.max(), x.min())

    @pytest.mark.parametrize("start", [0, 3, 8])
    def test_not_below(self, start: int, dtype: str) -> None:
        generator = np.random.default_rng(start)
        row, prices = generator.normal(size=(2, start + LANES)).astype(dtype)
        offers = row - prices
        for floor in (offers[start], -np.inf, np.inf, np.dtype(dtype).type(0.3)):
            expected = np.flatnonzero(offers[start:] >= floor).tolist()
            assert found(row, prices, start, np.dtype(dtype).type(floor)) == expected

    def test_what_is_not_a_number_is_found(self, dtype: str) -> None:
        row, prices = np.zeros((2, LANES), dtype)
        row[2], row[5] = np.nan, np.inf
        assert found(row, prices, 0, np.dtype(dtype).type(1.0)) == [2, 5]
