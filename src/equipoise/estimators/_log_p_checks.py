# SPDX-License-Identifier: Apache-2.0
"""Checks of probabilities that have to read values; see `equipoise._core._value_checks` for why they are operators.

Legend: n rows (datapoints), k columns (experts), ... batch dimensions.
"""

import math

import torch
from torch import Tensor

from equipoise._core import all_finite, is_batched, row_name
from equipoise._core._operators import value_check

# Of each dimension so many rows are looked at: logits in the place of log_p are wrong in nearly all rows.
_SOME_ROWS, _SOME_PROBLEMS = 16, 4

# How far from 1 rounding takes the sum of a row (half precision included).
_SUM_SLACK = 0.05

# log p above zero by more than rounding (half precision included) is a logit that was never normalised.
_LOG_P_SLACK = 0.05


@value_check("checked_log_ratio")
def checked_log_ratio(log_p_z: Tensor, log_q_z: Tensor, deterministic: Tensor | None, finite: bool) -> Tensor:
    """Computes log p - log q at the sampled experts, requiring that they could be sampled.

    Args:
        log_p_z: router log-probability of each row's expert [..., n]; at most 0, and 0 where nothing is to be checked.
        log_q_z: log-probability under the proposal [..., n]; above -inf.
        deterministic: the problems without noise, bool, or None when there is none.
        finite: whether p/q has to be a number that the dtype can hold.
    """
    if deterministic is not None and bool(deterministic.any()):
        raise ValueError(_DETERMINISTIC)
    if not all_finite(log_q_z):
        bad = ~log_q_z.isfinite()
        raise ValueError(
            f"importance weights must have q > 0 at every sampled expert, got log_q = {float(log_q_z[bad][0])} at "
            f"{row_name(bad)}: a sample that is impossible under log_q did not come from it"
        )
    if log_p_z.numel() and not bool(log_p_z.amax() <= _LOG_P_SLACK):  # amax passes NaN on
        bad = ~(log_p_z <= _LOG_P_SLACK)
        raise ValueError(
            f"log_p must hold log-probabilities (<= 0, no NaN), got {float(log_p_z[bad][0])} at {row_name(bad)}: "
            "pass torch.log_softmax(logits, -1)"
        )
    log_ratio = log_p_z - log_q_z
    largest = math.log(torch.finfo(log_ratio.dtype).max)
    if finite and log_ratio.numel() and not bool(log_ratio.amax() <= largest):
        bad = ~(log_ratio <= largest)
        raise ValueError(
            f"importance weights must be finite, got log(p/q) = {float(log_ratio[bad][0]):.4g} at {row_name(bad)}, "
            f"where q is too small: raise the temperature, mix with eps > 0, or drop them (importance=False)"
        )
    return log_ratio


def checked_log_p(log_p: Tensor, mask: Tensor | None, through: Tensor) -> Tensor:
    """Requires that rows of log_p [..., n, k] sum to 1 in probability, those that are not masked, in a sample of them.

    Args:
        log_p: what is said to be log-probabilities.
        mask: rows that count [..., n]; None for all of them.
        through: any tensor without a gradient that the caller goes on with; compiled code would drop the check else.

    Returns:
        What was given to be passed through.
    """
    if torch.compiler.is_compiling():
        return _checked_log_p(through, log_p.detach(), mask)
    if not is_batched(log_p, mask):  # within a vmap there are no values to look at
        check_log_p(log_p.detach(), mask)
    return through


@value_check("checked_log_p")
def _checked_log_p(through: Tensor, log_p: Tensor, mask: Tensor | None) -> Tensor:
    check_log_p(log_p, mask)
    return through.clone()


def check_log_p(log_p: Tensor, mask: Tensor | None) -> None:
    """Does the same for a caller that has nothing to pass through: in eager code only."""
    if torch.compiler.is_compiling() or log_p.is_meta or log_p.numel() == 0 or is_batched(log_p, mask):
        return
    steps = [-(-size // _SOME_PROBLEMS) for size in log_p.shape[:-2]] + [-(-log_p.shape[-2] // _SOME_ROWS)]
    some = tuple(slice(None, None, step) for step in steps)
    rows = log_p.detach()[some]
    total = (rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows).exp().sum(-1)
    if mask is not None:
        total = torch.where(mask[some], total, 1.0)
    least, most = total.aminmax()  # both are NaN if any entry is
    if not (float(least) >= 1 - _SUM_SLACK and float(most) <= 1 + _SUM_SLACK):
        bad = ~((total - 1).abs() <= _SUM_SLACK)
        *problem, row = (int(i) * step for i, step in zip(bad.nonzero()[0], steps, strict=True))
        where = f"row {row} of problem {problem}" if problem else f"row {row}"
        raise ValueError(
            f"log_p must hold log-probabilities, with rows that sum to 1, got probabilities that sum to "
            f"{float(total[bad][0]):.4g} in {where}: pass torch.log_softmax(logits, -1)"
        )


_DETERMINISTIC = (
    "importance weights must have temperature > 0, got a sample drawn at temperature 0, whose q is 1 for the expert "
    "chosen and 0 for the others: raise the temperature, or drop them (importance=False, or weight=s.keep_weight)"
)


def check_stochastic(deterministic: bool) -> None:
    """Requires a sample that was drawn with noise."""
    if deterministic:
        raise ValueError(_DETERMINISTIC)
