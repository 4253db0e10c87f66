# SPDX-License-Identifier: Apache-2.0
"""Checks of strategies, baselines and critics: shapes, and what can be seen of a dependence on the experts drawn.

Legend: n rows (datapoints), k columns (experts), F features, D draws, ... batch dimensions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from equipoise._core import in_transform, is_number


def check_baseline(baseline: Tensor, shape: Sequence[int]) -> None:
    """Requires a baseline for all rows [], for each problem [...] or for each row [..., n], with `shape` = [..., n]."""
    batch = list(shape[:-1])
    if list(baseline.shape) not in ([], batch, list(shape)):
        raise ValueError(
            f"baseline must be a number, or have shape {batch} (one for each problem) or {list(shape)} (one for each "
            f"row), got {list(baseline.shape)}: expand it"
        )


def check_constant(baseline: float | int) -> None:
    """Requires a baseline that is a finite number."""
    if not is_number(baseline):
        raise ValueError(
            f"baseline must be a number or a torch.Tensor, got {type(baseline).__name__}: give 0.0 for no baseline, or "
            "wrap one number for each problem or row in torch.as_tensor"
        )
    if not -float("inf") < baseline < float("inf"):
        raise ValueError(f"baseline must be finite, got {baseline}: look for an overflow in what it is computed from")


def check_unbalanced(name: str, balanced: bool) -> None:
    """Requires a sample whose experts were drawn without regard to the capacity."""
    if balanced:
        raise ValueError(
            f"{name} must not come from a balanced assignment, got a Gumbel-Matching sample: its counts are set by the "
            "capacity, which makes the balance loss a constant; leave it out to count the router's own argmax"
        )


def check_known_keywords(name: str, accepted: Sequence[str], required: Sequence[str]) -> None:
    """Requires a function that takes all of the keywords."""
    missing = [keyword for keyword in required if keyword not in accepted]
    if missing:
        raise ValueError(
            f"{name} must take the keywords {', '.join(required)}, got a signature without {', '.join(missing)}: "
            "add them, or take **kwargs"
        )


def check_given(name: str, x: Tensor | None) -> Tensor:
    """Requires a tensor where None is possible, and returns it."""
    if x is None:
        raise ValueError(f"{name} must be given here, got None: draw it too, as the strategy's draw_noise does")
    return x


def check_features(features: Tensor, shape: Sequence[int], num_features: int) -> None:
    """Requires floating-point features [..., n, F]; `shape` = [...] of the critic, where () takes any."""
    if not isinstance(features, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"features must be a torch.Tensor, got {type(features).__name__}: wrap it in torch.as_tensor")
    if not features.is_floating_point():
        raise ValueError(f"features must be floating point, got {features.dtype}: convert it with features.float()")
    if features.ndim < 2 or features.shape[-1] != num_features:
        remedy = "x[..., :0] is none for each row" if num_features == 0 else "num_features says how many a row has"
        raise ValueError(
            f"features must have shape [..., n, {num_features}] (one row of features for each row), got "
            f"{list(features.shape)}: {remedy}"
        )
    if len(shape) > 0 and list(features.shape[:-2]) != list(shape):
        raise ValueError(
            f"features must have the batch dimensions {list(shape)} that this critic was made with, got "
            f"{list(features.shape[:-2])}: expand them, or make the critic with shape=() to share it over the batch"
        )


def check_num_experts(num_experts: int, log_q: Tensor) -> None:
    """Requires a sample [..., n, k] with as many experts as expected."""
    if log_q.shape[-1] != num_experts:
        raise ValueError(
            f"s must be a sample of {num_experts} experts, got {log_q.shape[-1]}: make the critic with "
            f"num_experts={log_q.shape[-1]}"
        )


def check_one_round(name: str, rounds: int) -> None:
    """Requires a sample of one expert a row."""
    if rounds != 1:
        raise ValueError(
            f"{name} must come with a sample of one expert a row, got {rounds} rounds: give the weights that "
            "sample_rounds returned, and leave critic and gate out"
        )


def check_several_draws(draws: int) -> None:
    """Requires at least two independent draws."""
    if draws < 2:
        raise ValueError(
            f"losses must hold at least 2 independent draws in their first dimension, got {draws}: with one draw there "
            "is no other to compare with; use a statistic of past batches (EMABaseline, RegressionCritic)"
        )


def check_rows_independent(respects_capacity: bool, assigns_all: bool) -> None:
    """Requires a sample whose rows were drawn independently and none dropped, so that they may serve each other."""
    if respects_capacity:
        how = "Gumbel-Matching" if assigns_all else "a capacity by which rows are dropped"
        raise ValueError(
            f"s must have independent rows for a leave-one-out mean over the batch, got a sample under {how}: the "
            "other rows' losses depend on a row's own expert there, and the gradient would be biased. Use "
            "draws_baseline over independent draws, a statistic of past batches, or say allow_biased=True"
        )


def check_not_the_losses(baseline: Tensor, losses: Tensor) -> None:
    """Refuses the losses themselves (or a detached or reshaped view of them) for a baseline."""
    if torch.compiler.is_compiling() or in_transform() or baseline.ndim != losses.ndim or losses.numel() == 0:
        return  # within a transform there is no memory to look at
    if baseline is losses or (baseline.data_ptr() == losses.data_ptr() and baseline.data_ptr() != 0):
        raise ValueError(
            "baseline must not depend on the experts that were drawn, got the losses of this very sample: use what is "
            "known before the draw, or a statistic of past batches (EMABaseline, RegressionCritic)"
        )


def check_option(name: str, value: object, used: bool, strategy: str, known: str) -> None:
    """Requires an option of a strategy to be None where the strategy does not use it."""
    if value is not None and not used:
        raise ValueError(
            f"{name} must be left out for strategy {strategy!r}, which does not use it, got {value}: it is for {known}"
        )
