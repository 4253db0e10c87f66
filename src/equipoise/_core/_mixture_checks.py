# SPDX-License-Identifier: Apache-2.0
"""Checks of mixed and averaged proposals: the mixture weight and the number of solves."""

import torch
from torch import Tensor

from equipoise._core._number_checks import check_number
from equipoise._core._operators import value_check

_RANGE = "eps must be in [0, 1)"
_RANGE_REMEDY = "0 mixes nothing in, 0.2 is usual"
_COLD = (
    "eps must be 0 at temperature 0, got {}: nothing is drawn there that could be drawn otherwise; raise the "
    "temperature, or leave eps out"
)


def check_eps(eps: float | int, deterministic: bool) -> None:
    """Requires a mixture weight 0 <= eps < 1, and 0 where the temperature is 0 for all problems."""
    check_number("eps", eps, tensor=True)
    if not 0 <= eps < 1:
        raise ValueError(f"{_RANGE}, got {eps}: {_RANGE_REMEDY}")
    if deterministic and eps > 0:
        raise ValueError(_COLD.format(eps))


@value_check("checked_eps")
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


def check_solves(solves: int) -> None:
    """Requires a whole number >= 1 of solves."""
    if isinstance(solves, bool) or not isinstance(solves, int) or solves < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"solves must be an integer >= 1, got {solves!r}: 1 averages nothing, 8 is usual")
