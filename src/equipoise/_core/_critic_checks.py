# SPDX-License-Identifier: Apache-2.0
"""The check of what a critic predicts.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

from collections.abc import Sequence

from torch import Tensor


def check_critic(critic: Tensor, shape: Sequence[int]) -> None:
    """Requires a floating-point prediction for every pair, `shape` = [..., n, k]."""
    if not isinstance(critic, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"critic must be a torch.Tensor, got {type(critic).__name__}: pass what a critic predicts, critic(features)"
        )
    if list(critic.shape) != list(shape):
        raise ValueError(
            f"critic must have shape {list(shape)} (a predicted loss for each row and expert, drawn or not), got "
            f"{list(critic.shape)}: its expectation over experts is added back; one number a row is a baseline"
        )
    if not critic.is_floating_point():
        raise ValueError(f"critic must be floating point, got {critic.dtype}: convert it with critic.float()")
