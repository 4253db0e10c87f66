# SPDX-License-Identifier: Apache-2.0
"""Checks of the samplers' arguments.

Legend: n rows (datapoints), k columns (experts), m solves, ... batch dimensions.
"""

from collections.abc import Sequence

from torch import Tensor

from equipoise._core import check_floating, check_same_device, check_shape, check_solves, checked_draws


def check_broadcasts(name: str, x: Tensor, batch: Sequence[int]) -> None:
    """Requires a tensor that broadcasts over the batch dimensions, and adds none."""
    ours = [1] * (len(batch) - x.ndim) + list(x.shape)
    if x.ndim > len(batch) or any(a not in (1, b) for a, b in zip(ours, batch, strict=True)):
        raise ValueError(
            f"{name} must be a number or broadcast over the batch dimensions {list(batch)}, got shape {list(x.shape)}: "
            "give one for each problem"
        )


def check_coin(coin: Tensor | None, shape: list[int], logits: Tensor) -> Tensor:
    """Requires uniform numbers of this shape, one a row (and draw), none of them NaN, and returns them."""
    if coin is None:
        raise ValueError(
            "coin must be given where eps > 0, or eps is a tensor, got None: draw uniform numbers, one a row, as the "
            "strategy's draw_noise does"
        )
    check_shape("coin", coin, shape, "one number a row")
    check_floating("coin", coin)
    check_same_device("coin", coin, "logits", logits)
    return checked_draws("coin", coin)


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


def check_rounds(rounds: int, num_experts: int) -> None:
    """Requires noise for at least one round, and for no more rounds than there are experts."""
    if not 1 <= rounds <= num_experts:
        raise ValueError(
            f"noises must hold the noise of 1 to {num_experts} rounds (a row's experts differ from each other), got "
            f"{rounds}: draw one for each expert that a row takes"
        )
