# SPDX-License-Identifier: Apache-2.0
"""Checks of mixed and averaged proposals: the mixture weight, the coin, the number of solves.

Legend: n rows (datapoints), k columns (experts), m solves, ... batch dimensions.
"""

import torch
from torch import Tensor

from equipoise._core._checks import check_floating, check_same_device, check_shape

_RANGE = "eps must be in [0, 1)"
_RANGE_REMEDY = "0 mixes nothing in, 0.2 is usual"
_COLD = (
    "eps must be 0 at temperature 0, got {}: nothing is drawn there that could be drawn otherwise; raise the "
    "temperature, or leave eps out"
)


def check_eps(eps: float | int, deterministic: bool) -> None:
    """Requires a mixture weight 0 <= eps < 1, and 0 where the temperature is 0 for all problems."""
    if not 0 <= eps < 1:
        raise ValueError(f"{_RANGE}, got {eps}: {_RANGE_REMEDY}")
    if deterministic and eps > 0:
        raise ValueError(_COLD.format(eps))


@torch.library.custom_op("equipoise::checked_eps", mutates_args=())
def checked_eps(eps: Tensor, deterministic: Tensor | None) -> Tensor:
    """Requires mixture weights in [0, 1), and 0 in problems whose temperature is 0 (True); returns them."""
    bad = ~((eps >= 0) & (eps < 1))
    if bool(bad.any()):
        raise ValueError(f"{_RANGE}, got {float(eps[bad][0])}: {_RANGE_REMEDY}")
    if deterministic is not None:
        eps_of, cold = torch.broadcast_tensors(eps, deterministic)
        bad = (eps_of > 0) & cold
        if bool(bad.any()):
            raise ValueError(_COLD.format(float(eps_of[bad][0])))
    return eps.clone()


@checked_eps.register_fake
def _(eps: Tensor, deterministic: Tensor | None) -> Tensor:  # pyright: ignore[reportUnusedParameter]
    return torch.empty_like(eps)


def check_coin(coin: Tensor | None, shape: list[int], logits: Tensor) -> Tensor:
    """Requires uniform numbers of this shape, one a row (and draw), and returns them."""
    if coin is None:
        raise ValueError(
            "coin must be given where eps > 0, or eps is a tensor, got None: draw uniform numbers, one a row, as the "
            "strategy's draw_noise does"
        )
    check_shape("coin", coin, shape, "one number a row")
    check_floating("coin", coin)
    check_same_device("coin", coin, "logits", logits)
    return coin


def check_solves_of(gumbel: Tensor, shape: list[int]) -> int:
    """Requires noise [..., m, n, k] for logits of `shape` = [..., n, k], with m >= 1, and returns m."""
    *batch, n, k = shape
    if not isinstance(gumbel, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"gumbel must be a torch.Tensor, got {type(gumbel).__name__}: wrap it in torch.as_tensor")
    got = list(gumbel.shape)
    if len(got) != len(shape) + 1 or got[:-3] != batch or got[-2:] != [n, k]:
        raise ValueError(
            f"gumbel must have shape {[*batch, 'm', n, k]} (m solves for each entry of logits), got {got}: "
            "give the solves a dimension of their own, before the rows"
        )
    check_solves(got[-3])
    return got[-3]


def check_solves(solves: int) -> None:
    """Requires a whole number >= 1 of solves."""
    if isinstance(solves, bool) or not isinstance(solves, int) or solves < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"solves must be an integer >= 1, got {solves!r}: 1 averages nothing, 8 is usual")


def check_option(name: str, value: object, used: bool, strategy: str, known: str) -> None:
    """Requires an option of a strategy to be None where the strategy does not use it."""
    if value is not None and not used:
        raise ValueError(
            f"{name} must be left out for strategy {strategy!r}, which does not use it, got {value}: it is for {known}"
        )
