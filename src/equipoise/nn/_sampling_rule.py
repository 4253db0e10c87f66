# SPDX-License-Identifier: Apache-2.0
"""Strategies, the paper's and those beyond it, as routing rules.

Legend: T rows (tokens), E experts, K experts a row.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equipoise._core import check_at_least, check_one_of, compact_repr
from equipoise.estimators import STRATEGIES, Strategy, StrategyTraits, check_strategy, read_traits
from equipoise.nn._named_router import NamedRouter
from equipoise.nn._routing import Routing
from equipoise.nn._rules import RouteRequest, at_experts
from equipoise.nn._selection import choose_top
from equipoise.sampling import Sample, sample_rounds

LOSSES = ("reinforce", "gating", "gated-reinforce")


class SamplingRule:
    r"""Samples experts for each row, and computes the weight that corrects for how they were sampled.

    In training z comes from the strategy and w_i is its weight. `loss` says whether an expert's output is multiplied by
    its gate p(z_i), and how the router learns:

    ===================  ==========================  ==========================================================
    `loss`               output of row i             gradient that the weights make unbiased (`weights="all"`)
    ===================  ==========================  ==========================================================
    "reinforce"          (1/K) sum_r e_z(x_i)        grad E_p[f_i]: the score function
    "gating"             sum_r p(z) e_z(x_i)         E_p[grad f_i], through the gates (section 3.1 of the paper)
    "gated-reinforce"    sum_r p(z) e_z(x_i)         grad E_p[f_i]: the gates and the score function together
    ===================  ==========================  ==========================================================

    "gating" leaves out that p also decides which experts are drawn. "gated-reinforce" is eq. (2) of the paper for an f
    that depends on the router through the gates: the exact gradient of the gated model, for the parameters of the
    router, and with `upstream=True` (see `RoutingOptions`) for those before it,

    .. math::
        \nabla \text{E}_p[f_i] = \text{E}_p\left[ (f_i - b) \nabla \log p(z_i) + \nabla f_i \right].

    Rows beyond the capacity have no expert, and weight 0. In evaluation each row takes the expert of largest
    probability, without noise, gated if training is.

    With `top_k` = K above 1 a row draws K different experts, in K rounds r (see `sample_rounds`), from the
    Plackett-Luce distribution of p, and its weight is the product over rounds. p(z) in the gates is the full softmax at
    temperature 1, not renormalised over the K: with one expert it is the paper's gate. In evaluation a row takes its K
    most probable experts, with the same factors. A row that one round dropped has weight 0, and keeps the experts of
    other rounds.

    Example:
        >>> from equipoise.estimators import STRATEGIES
        >>> rule = SamplingRule(STRATEGIES["gm-iw"], loss="gating")
        >>> rule.limited, rule.gated
        (True, True)

    References:
        Kool, Maddison, Mnih, Unbiased gradient estimation with balanced assignments for mixtures of experts (2021).
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        loss: str = "reinforce",
        sinkhorn_first: bool = False,
        importance: bool = True,
        top_k: int = 1,
    ) -> None:
        """Sets up the rule.

        Args:
            strategy: a row of `equipoise.STRATEGIES`, or any object that meets `equipoise.Strategy`.
            loss: "reinforce", "gating" or "gated-reinforce".
            sinkhorn_first: balance the proposal in expectation before sampling.
            importance: whether the ratio p/q is part of the weights.
            top_k: K.
        """
        check_at_least("top_k", top_k, 1)
        check_one_of("loss", loss, LOSSES)
        self.strategy = check_strategy(strategy)
        self.loss = loss
        self.gated = loss != "reinforce"
        self.sinkhorn_first = sinkhorn_first
        self.importance = importance
        self.top_k = top_k
        self.limited = strategy.respects_capacity
        traits = read_traits(StrategyTraits, strategy)
        self.assigns_all, self.mixes = traits.assigns_all, traits.mixes

    def __call__(self, logits: Float[Tensor, "T E"], request: RouteRequest) -> Routing:
        """Chooses experts.

        Args:
            logits: the router's.
            request: everything else.

        Returns:
            The decision. In training it has the sample.
        """
        if not request.training:
            routing = choose_top(logits, request, top_k=self.top_k, gated=self.gated)
            return routing if self.top_k == 1 else replace(routing, scores=self.factors(request.log_p, routing.indices))
        scope, (rows, num_experts) = request.scope, logits.shape
        # None would mean "as few rows as possible" to a strategy; here it means as many as there are.
        capacity = max(scope.count(rows), 1) if request.capacity is None else request.capacity // self.top_k
        s, weight = self._draw(request, capacity)
        indices = torch.where(s.kept_rounds, s.z_rounds, num_experts)
        drops_none = s.respects_capacity and s.assigns_all and request.mask is None  # known without reading a tensor
        return request.route(
            indices,
            self.factors(request.log_p, indices),
            weight,
            sample=s,
            prices=_in_logit_units(s, request.temperature),
            gap=s.total_gap,
            capacity=request.capacity,
            score_function=self.loss != "gating",
            exactly_balanced=scope.ranks == 1 and drops_none and capacity * num_experts == rows,
        )

    def _draw(self, request: RouteRequest, capacity: int) -> tuple[Sample, Tensor]:
        """Draws noise and experts, and weighs the rows."""
        log_p = request.log_p.detach()
        noises = [
            self.strategy.draw_noise(log_p.shape, generator=request.generator, dtype=log_p.dtype, device=log_p.device)
            for _ in range(self.top_k)
        ]
        how: dict[str, Any] = {} if request.eps is None else {"eps": request.eps}
        if request.scope.ranks > 1:  # a strategy of the user's own need not know it
            how["scope"] = request.scope
        return sample_rounds(
            log_p,
            self.strategy,
            noises,
            capacity=capacity,
            mask=request.mask,
            temperature=request.temperature,
            sinkhorn_first=self.sinkhorn_first,
            importance=self.importance,
            **how,
        )

    def factors(self, log_p: Float[Tensor, "T E"], indices: Int[Tensor, "T K"]) -> Float[Tensor, "T K"]:
        """Computes the factor of each expert's output: p(z) if gated, else 1/K; 0 where there is no expert.

        Args:
            log_p: the router's log-probabilities, with gradient.
            indices: experts, with E for "no expert".

        Returns:
            The factors, with gradient if gated.
        """
        present = indices < log_p.shape[-1]
        if not self.gated:
            return present.to(log_p.dtype) / self.top_k
        return torch.where(present, at_experts(log_p, indices).exp(), 0.0)

    def _settings(self) -> dict[str, Any]:
        """Returns the keywords that build this rule again."""
        how = {"loss": self.loss, "sinkhorn_first": self.sinkhorn_first, "importance": self.importance}
        return {**how, "top_k": self.top_k}

    def __repr__(self) -> str:
        """Names the strategy and its settings."""
        return compact_repr(self, strategy=self.strategy.name, **self._settings())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles a strategy of the table by its name; others, and those with options, as they are."""
        known = STRATEGIES.get(self.strategy.name) is self.strategy
        return _rebuild, (self.strategy.name if known else self.strategy, self._settings())


_OPTIONS = ("top_k", "loss", "sinkhorn_first", "importance", "temperature", "target_sample_size", "upstream")


def sampling_router(strategy: Strategy) -> NamedRouter:
    """Makes the row of a strategy. The entropy losses are part of the recipe.

    The objective does not balance itself, so the mean distribution is rewarded for its entropy. And a router that is
    nearly uniform gives every expert the same rows at random, so that none has anything of its own to learn: rows are
    rewarded for certainty too (docs/language-models.md has the weights that were tried).

    Args:
        strategy: any.

    Returns:
        The row, of the strategy's name.
    """
    traits = read_traits(StrategyTraits, check_strategy(strategy))
    own = {"eps": traits.mixes, "solves": traits.averages}
    return NamedRouter(
        name=strategy.name,
        make=partial(_make_rule, strategy),
        options=(*_OPTIONS, *(name for name, used in own.items() if used)),
        marginal_entropy=0.1,
        conditional_entropy=0.03,
        doc=f"the paper's {strategy.label}" if traits.paper else strategy.label,
    )


def _make_rule(
    strategy: Any,
    _num_experts: int,
    _device: Any,
    *,
    temperature: Any,
    target_sample_size: float,
    upstream: bool,
    eps: float | str | None = None,
    solves: int | None = None,
    **how: Any,
) -> SamplingRule:
    """Builds the rule of a strategy; the router keeps the temperature, `upstream`, and an eps that chooses itself."""
    del temperature, target_sample_size, upstream
    changed = {name: value for name, value in (("eps", eps), ("solves", solves)) if value not in (None, "auto")}
    return SamplingRule(strategy.with_options(**changed) if changed else strategy, **how)


def _rebuild(strategy: str | Strategy, settings: dict[str, Any]) -> SamplingRule:
    """Makes the rule of a name in the table, or of a strategy of the user's own."""
    return SamplingRule(STRATEGIES[strategy] if isinstance(strategy, str) else strategy, **settings)


def _in_logit_units(s: Sample, temperature: float | int | Tensor) -> Tensor | None:
    """Scales prices of a / tau + g back to those of a; at tau = 0 the scores were a itself."""
    if s.prices is None:
        return None
    if isinstance(temperature, Tensor):
        return s.prices * torch.where(temperature > 0, temperature, 1.0)
    return s.prices * temperature if temperature > 0 else s.prices
