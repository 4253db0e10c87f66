# SPDX-License-Identifier: Apache-2.0
"""The paper's strategies as routing rules.

Legend: T rows (tokens), E experts.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise._core import check_one_of
from equipoise.estimators import STRATEGIES, Strategy, check_strategy
from equipoise.nn._rules import Choice, RouteRequest, at_experts
from equipoise.nn._selection import choose_top
from equipoise.sampling import Sample

LOSSES = ("reinforce", "gating")


class StrategyRule:
    r"""Samples an expert for each row, with the weight that corrects for how it was sampled.

    In training z comes from the strategy and w_i is its weight. With `loss="reinforce"` an expert's output is used as
    it is, and the router learns by the score function; with `loss="gating"` it is multiplied by p(z_i), through which
    the router learns (section 3.1 of the paper). Rows beyond the capacity have no expert, and weight 0. In evaluation
    each row takes the expert of largest probability, without noise, gated if training is.

    Example:
        >>> from equipoise.estimators import STRATEGIES
        >>> rule = StrategyRule(STRATEGIES["gm-iw"], loss="gating")
        >>> rule.limited, rule.gated
        (True, True)

    References:
        Kool, Maddison, Mnih, Unbiased gradient estimation with balanced assignments for mixtures of experts (2021).
    """

    top_k = 1

    def __init__(
        self,
        strategy: Strategy,
        *,
        loss: str = "reinforce",
        sinkhorn_first: bool = False,
        importance: bool = True,
    ) -> None:
        """Sets up the rule.

        Args:
            strategy: a row of `equipoise.STRATEGIES`, or any object that meets `equipoise.Strategy`.
            loss: "reinforce" or "gating".
            sinkhorn_first: balance the proposal in expectation before sampling.
            importance: whether the ratio p/q is part of the weights.
        """
        check_one_of("loss", loss, LOSSES)
        self.strategy = check_strategy(strategy)
        self.gated = loss == "gating"
        self.sinkhorn_first = sinkhorn_first
        self.importance = importance
        self.limited = strategy.balanced

    def __call__(self, logits: Float[Tensor, "T E"], request: RouteRequest) -> Choice:
        """Chooses experts.

        Args:
            logits: the router's.
            request: everything else.

        Returns:
            The choice; with the sample in training.
        """
        if not request.training:
            return choose_top(logits, request, gated=self.gated)
        rows, num_experts = logits.shape
        noise = self.strategy.draw_noise(
            logits.shape, generator=request.generator, dtype=logits.dtype, device=logits.device
        )
        # None would mean "as few rows as possible" to a strategy; here it means as many as there are.
        capacity = max(rows, 1) if request.capacity is None else request.capacity
        s, weight = self.strategy.draw(
            request.log_p.detach(),
            noise,
            temperature=request.temperature,
            capacity=capacity,
            mask=request.mask,
            sinkhorn_first=self.sinkhorn_first,
            importance=self.importance,
        )
        indices = torch.where(s.kept, s.z, num_experts).unsqueeze(1)
        scores = at_experts(request.log_p, indices).exp() if self.gated else torch.ones_like(weight).unsqueeze(1)
        drops_none = s.balanced and noise.priority is None and request.mask is None
        return Choice(
            indices=indices,
            scores=torch.where(indices < num_experts, scores, 0.0),
            weight=weight.detach(),
            sample=s,
            prices=_in_logit_units(s, request.temperature),
            gap=s.gap,
            capacity=request.capacity,
            score_function=not self.gated,
            exactly_balanced=drops_none and capacity * num_experts == rows,
        )

    def _settings(self) -> dict[str, Any]:
        """Returns the keywords that build this rule again."""
        loss = "gating" if self.gated else "reinforce"
        return {"loss": loss, "sinkhorn_first": self.sinkhorn_first, "importance": self.importance}

    def __repr__(self) -> str:
        """Names the strategy and its settings."""
        return f"StrategyRule({self.strategy.name!r}, **{self._settings()})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles by name: the functions of a strategy of the table cannot be pickled."""
        known = STRATEGIES.get(self.strategy.name) is self.strategy
        return _rebuild, (self.strategy.name if known else self.strategy, self._settings())


def _rebuild(strategy: str | Strategy, settings: dict[str, Any]) -> StrategyRule:
    """Makes the rule of a name in the table, or of a strategy of the user's own."""
    return StrategyRule(STRATEGIES[strategy] if isinstance(strategy, str) else strategy, **settings)


def _in_logit_units(s: Sample, temperature: float | int | Tensor) -> Tensor | None:
    """Scales prices of a / tau + g back to those of a; at tau = 0 the scores were a itself."""
    if s.prices is None:
        return None
    if isinstance(temperature, Tensor):
        return s.prices * torch.where(temperature > 0, temperature, 1.0)
    return s.prices * temperature if temperature > 0 else s.prices
