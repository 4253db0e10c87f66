# SPDX-License-Identifier: Apache-2.0
"""Gumbel noise: its law, its tails, where its randomness comes from."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equipoise.ops import draw_gumbel, draw_uniform
from equipoise.ops._gumbel import _open

FALSE_ALARM = 1e-6


def kolmogorov_distance(x: Tensor) -> float:
    """The largest distance between the empirical distribution function and that of the Gumbel distribution."""
    x = x.double().sort().values
    law = (-(-x).exp()).exp()
    steps = torch.arange(len(x) + 1).double() / len(x)
    return float(torch.maximum((steps[1:] - law).max(), (law - steps[:-1]).max()))


def threshold(n: int) -> float:
    """What the distance exceeds with probability FALSE_ALARM (the bound of Dvoretzky, Kiefer and Wolfowitz)."""
    return math.sqrt(-math.log(FALSE_ALARM / 2) / (2 * n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_law_is_gumbel(dtype: torch.dtype, generator: torch.Generator) -> None:
    x = draw_gumbel([500, 400], generator=generator, dtype=dtype)
    assert kolmogorov_distance(x.flatten()) < threshold(x.numel())
    # The test has the power to tell a Gumbel variable from one that is shifted by 0.02.
    assert kolmogorov_distance(x.flatten() + 0.02) > threshold(x.numel())


def test_upper_tail_of_float32_is_fine_grained(generator: torch.Generator) -> None:
    n = 1 << 22
    x = draw_gumbel([n], generator=generator, dtype=torch.float32)
    uniform = torch.rand(n, generator=generator, dtype=torch.float32)
    coarse = -(-(-uniform).log1p()).log()
    # Beyond 10 there are about 190 of 4 million. A uniform of 24 bits has 760 places for them, so many coincide.
    assert distinct_beyond(x, 10.0) > 0.98 > distinct_beyond(coarse, 10.0)
    assert abs((x > 10).sum().item() - n * -math.expm1(-math.exp(-10.0))) < 5 * math.sqrt(190)


def distinct_beyond(x: Tensor, bound: float) -> float:
    tail = x[x > bound]
    return tail.unique().numel() / tail.numel()


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 2.0**-31), (torch.float64, 2.0**-53)])
def test_ends_of_the_uniform_give_finite_noise(dtype: torch.dtype, step: float) -> None:
    ends = _open(torch.tensor([0.0, step, 1.0 - step, 1.0], dtype=dtype), step)
    noise = -(-ends.log1p()).log()
    assert bool(noise.isfinite().all())
    assert noise[0] > noise[1] > noise[2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_the_one_asked_for_and_values_are_finite(dtype: torch.dtype, generator: torch.Generator) -> None:
    x = draw_gumbel([1000, 100], generator=generator, dtype=dtype)
    assert x.dtype == dtype
    assert bool(x.isfinite().all())


def test_dtype_none_is_the_default() -> None:
    assert draw_gumbel([2]).dtype == torch.get_default_dtype()


@pytest.mark.parametrize("shape", [[], [0, 3], (2, 0), torch.Size([2, 3, 4])])
def test_any_shape(shape: list[int]) -> None:
    assert draw_gumbel(shape).shape == torch.Size(shape)


def test_same_seed_gives_the_same_noise() -> None:
    first, second = (draw_gumbel([5, 3], generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)


def test_a_generator_leaves_the_global_stream_alone(generator: torch.Generator) -> None:
    before = torch.get_rng_state()
    draw_gumbel([5, 3], generator=generator)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_generator_the_global_stream_is_used() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second = draw_gumbel([5, 3]), draw_gumbel([5, 3])
        torch.manual_seed(3)
        assert torch.equal(draw_gumbel([5, 3]), first)
        assert not torch.equal(first, second)


def test_integer_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype must be floating point, got torch.int64"):
        draw_gumbel([2], dtype=torch.int64)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("draw", [draw_gumbel, draw_uniform])
@pytest.mark.parametrize("shape", [3, [-1, 2], [2.0], "ab"])
def test_shape_must_hold_sizes(draw: Callable[..., torch.Tensor], shape: object) -> None:
    with pytest.raises(ValueError, match=r"shape must be a sequence of integers >= 0, got .*: give that"):
        draw(shape)
