# SPDX-License-Identifier: Apache-2.0
"""Baselines as the surrogate reads them: one for all layers, or one for each.

Legend: T rows (tokens), l layers.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from equipoise._core import check_shape
from equipoise.estimators import EMABaseline
from equipoise.nn._residual_baseline import ResidualBaseline
from equipoise.nn._surrogate_checks import check_per_layer, check_residual
from equipoise.sampling import THIS_PROCESS, Scope

Baseline = float | int | Tensor | EMABaseline | ResidualBaseline
"""A number, a number for each token, or something that learns one from past batches."""

Residual = Tensor | Callable[[], Tensor]
"""Each token's loss without the experts, or a function that computes it."""


class LayerBaselines(nn.Module):
    r"""One baseline for each layer, in order of execution: layer l learns from W_i (f_i - b_i^l).

    A baseline for all layers may not depend on any expert that a token was given. One for layer l may depend on the
    experts of the layers before it, and usually predicts better: what enters layer l is known before layer l draws.
    """

    def __init__(self, baselines: Sequence[Baseline]) -> None:
        """Keeps the baselines; those that are modules become submodules.

        Args:
            baselines: one for each layer. The same object may stand for several.
        """
        super().__init__()
        self.each = list(baselines)
        for number, baseline in enumerate(self.each):
            if isinstance(baseline, nn.Module):
                self.add_module(str(number), baseline)

    def get_extra_state(self) -> dict[str, dict[str, Tensor]]:
        """Returns what moving averages need to go on, by the number of their layer."""
        averages = {str(number): b for number, b in enumerate(self.each) if isinstance(b, EMABaseline)}
        return {number: average.state_dict() for number, average in averages.items()}

    def set_extra_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Goes on from saved moving averages.

        Args:
            state: from `get_extra_state`.
        """
        for number, values in state.items():
            average = self.each[int(number)]
            if isinstance(average, EMABaseline):
                average.load_state_dict(values)


def pair_baselines(
    own: Baseline | LayerBaselines, residual: Residual | Sequence[Residual | None] | None, layers: int
) -> list[tuple[Baseline, Residual | None]]:
    """Checks that baselines, residuals and layers belong together.

    Args:
        own: one baseline, or one for each layer.
        residual: where a `ResidualBaseline` needs it; a sequence where there is one baseline for each layer.
        layers: how many were captured.

    Returns:
        Each baseline with its residual: one pair, or one for each layer.
    """
    baselines = own.each if isinstance(own, LayerBaselines) else None
    residuals = residual if isinstance(residual, Sequence) else None
    count, given = (None if listed is None else len(listed) for listed in (baselines, residuals))
    check_per_layer(count, given, layers, residual is None)
    each = [own] if baselines is None else baselines
    pairs = list(zip(each, [residual] * len(each) if residuals is None else residuals, strict=True))
    for baseline, r in pairs:
        check_residual(isinstance(baseline, ResidualBaseline), r is not None)
    return cast(Any, pairs)


@torch.no_grad()
def read_baselines(
    pairs: Sequence[tuple[Baseline, Residual | None]],
    losses: Sequence[Float[Tensor, " T"]],
    active: Bool[Tensor, " T"],
    shape: Sequence[int],
    moves: bool,
    scope: Scope = THIS_PROCESS,
) -> list[Tensor | float]:
    """Reads every b, which knows past batches only; then lets what learns see this one.

    Args:
        pairs: from `pair_baselines`.
        losses: f, flattened, less what a critic predicts; for each pair.
        active: rows to learn from.
        shape: of the tokens.
        moves: whether to learn.
        scope: of the rows; what learns, learns from those of all ranks.

    Returns:
        One entry for each pair.
    """
    found = [_read(baseline, residual, f, shape) for (baseline, residual), f in zip(pairs, losses, strict=True)]
    learners = {id(own): (own, r, f) for (own, _), (_, r), f in zip(pairs, found, losses, strict=True)}
    if moves:
        for own, r, f in learners.values():  # one that serves several layers sees a batch once
            _learn(own, r, f, active, scope)
    return [b for b, _ in found]


def _read(
    own: Baseline, residual: Residual | None, losses: Tensor, shape: Sequence[int]
) -> tuple[Tensor | float, Tensor]:
    """Returns b, and r where there is one."""
    if isinstance(own, EMABaseline):
        return own.value.to(losses), losses
    if isinstance(own, ResidualBaseline):
        r: Any = residual() if callable(residual) else residual
        check_shape(
            "residual()" if callable(residual) else "residual", r, shape, "one number for each token, as token_losses"
        )
        r = r.detach().reshape(-1)
        return own(r).to(losses), r
    if isinstance(own, Tensor) and own.ndim > 0:
        check_shape("baseline", own, shape, "one number for each token, as token_losses")
        return own.detach().reshape(-1).to(losses), losses
    return float(own), losses


def _learn(own: Baseline, r: Tensor, losses: Tensor, active: Tensor, scope: Scope) -> None:
    """Lets a baseline that learns take in the batch."""
    if isinstance(own, EMABaseline):
        own.update(losses, active, scope)
    elif isinstance(own, ResidualBaseline):
        own.update(losses, r, active, scope)
