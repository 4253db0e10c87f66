# SPDX-License-Identifier: Apache-2.0
"""Standard Gumbel noise, and uniform."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise._core import checked_sizes


def draw_gumbel(
    shape: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    r"""Draws independent standard Gumbel variables.

    .. math::
        g = -\log(-\log(1 - u)), \quad u \sim \text{Uniform}(0, 1), \qquad P(g \le t) = \exp(-\exp(-t)).

    Adding them to logits and taking the largest entry of each row draws from the softmax of the row (the Gumbel-max
    trick), so the upper tail matters most, where u is near 0. A uniform number of 24 bits, as `torch.rand` draws it in
    float32, gives at most 16.6, in coarse steps; here u has 31 bits near 0 (53 in float64) and the logarithm is
    `log1p`. Half precision is drawn in float32 and rounded. The result is always finite.

    Args:
        shape: the shape of the result, usually that of the logits.
        generator: where the randomness comes from; None is torch's global stream of the device.
        dtype: a floating-point type; None is torch's default.
        device: None is the generator's device if there is one, else torch's default.

    Returns:
        The noise, of the given shape, without gradient.

    Example:
        >>> g = draw_gumbel([2, 3], generator=torch.Generator().manual_seed(0))
        >>> g.shape, bool(g.isfinite().all())
        (torch.Size([2, 3]), True)

    References:
        Gumbel, Statistical theory of extreme values and some practical applications (1954).
        Maddison, Tarlow, Minka, A* sampling (2014).
    """
    shape = checked_sizes(shape)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating point, got {dtype}: noise is added to logits, give their dtype")
    if device is None and generator is not None:
        device = generator.device
    minus_u = _minus_uniform(shape, generator, device, wide=dtype == torch.float64)
    return minus_u.log1p_().neg_().log_().neg_().to(dtype)


def draw_uniform(
    shape: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draws independent uniform numbers from [0, 1), as `torch.rand` does, also where `torch.compile` varies the shape.

    Args:
        shape: the shape of the result.
        generator: where the randomness comes from; None is torch's global stream of the device.
        dtype: a floating-point type; None is torch's default.
        device: None is torch's default.

    Returns:
        The numbers, of the given shape, without gradient.

    Example:
        >>> bool((draw_uniform([3]) < 1).all())
        True
    """
    shape = checked_sizes(shape)
    if generator is None:  # with the keyword, even as None, torch.rand takes no symbolic sizes
        return torch.rand(shape, dtype=dtype, device=device)
    return torch.rand(shape, generator=generator, dtype=dtype, device=device)


def _minus_uniform(
    shape: Sequence[int], generator: torch.Generator | None, device: torch.device | str | None, *, wide: bool
) -> Tensor:
    """Draws -u for u uniform on the open interval (0, 1), fine-grained near 0."""
    if wide:
        return _open(draw_uniform(shape, generator=generator, dtype=torch.float64, device=device), 2.0**-53)
    # One 32-bit word a number, as torch.rand uses, but none of its bits thrown away: small integers convert exactly.
    bits = torch.empty(tuple(shape), dtype=torch.int32, device=device)
    if torch.compiler.is_compiling():  # cannot trace random_; the same numbers come from the operator that copies
        bits = torch.ops.aten.random(bits, generator=generator)
    else:
        bits.random_(generator=generator)
    return _open(bits.float().mul_(2.0**-31), 2.0**-31)


def _open(u: Tensor, step: float) -> Tensor:
    """Returns -u, in place, with 0 moved up by half a step, and 1 (to which large integers round) down to the next."""
    return u.clamp_(min=step / 2, max=1.0 - torch.finfo(u.dtype).eps / 2).neg_()
