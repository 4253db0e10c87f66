# SPDX-License-Identifier: Apache-2.0
"""`Router`: from rows to a `Routing`.

Legend: T rows (tokens), E experts, K experts a row, dim features.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from equipoise._core import (
    autocast_device,
    check_at_least,
    check_capacity_factor,
    check_mask,
    check_one_of,
    check_temperature,
    reads_values,
)
from equipoise.nn._auto import AutoProposal
from equipoise.nn._balance import balance_losses
from equipoise.nn._bias_rules import Priced, RunningPrices, WideBuffers
from equipoise.nn._router_checks import (
    check_auto,
    check_has_gate,
    check_input_dim,
    check_logits,
    check_loss_weight,
    check_mixes,
    check_routing,
    check_rows_like,
    check_same_logits,
    check_token_ids_given,
    check_top_k,
)
from equipoise.nn._routing import Routing
from equipoise.nn._rules import RouteRequest, RoutingRule, RuleTraits, rule_traits
from equipoise.nn._schedules import Schedule
from equipoise.nn._scoring import Scoring
from equipoise.nn._selection import choose_top
from equipoise.nn._token_prior import TokenPrior, TokenTable
from equipoise.ops import log_softmax
from equipoise.sampling import THIS_PROCESS, Scope

EVALUATIONS = ("argmax", "priced")
# Updates between two looks at the prices of a router that does not use them: enough to change to "priced" at any time.
_SELDOM = 8


class Router(WideBuffers):
    """A linear gate, and a rule that chooses experts from its logits.

    Logits, softmax and rule work in float32 (float64 for float64), also under autocast and with half-precision
    parameters. State that changes between steps (averages, biases, the temperature of a schedule) changes in `observe`,
    never in forward, which may run more than once a step. To replace the gate, override `logits` in a subclass: it is
    called twice where the router learns by the score function, and must return the same both times. Or build the router
    without a gate (`dim=None`), and pass the logits of your own gate to `route`.

    Example:
        >>> import equipoise as eq
        >>> def two_largest(logits, request):
        ...     return eq.nn.choose_top(logits.detach(), request, top_k=2)
        >>> router = Router(8, 4, two_largest)
        >>> routing = router(torch.randn(3, 5, 8))
        >>> routing.indices.shape, routing.shape
        (torch.Size([15, 2]), (3, 5))
    """

    temperature: Tensor
    updates: Tensor
    scope: Scope = THIS_PROCESS
    """The rows that share the capacity; `equipoise.distributed.parallelize` sets another."""
    weight: nn.Parameter  # None without a gate

    def __init__(
        self,
        dim: int | None,
        num_experts: int,
        rule: RoutingRule,
        *,
        capacity_factor: float | None = 1.25,
        eval_capacity_factor: float | None = None,
        evaluation: str = "argmax",
        temperature: float | str | Schedule = 1.0,
        eps: str | None = None,
        target_sample_size: float = 0.5,
        upstream: bool = False,
        loss_weights: Mapping[str, float] | None = None,
        scoring: Scoring | None = None,
        token_prior: TokenPrior | int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Builds the gate, with small weights, so that all experts are about equally likely at first.

        Args:
            dim: features of a row; None: no gate, see `route`.
            num_experts: E.
            rule: chooses experts from logits. If it is a module, it becomes a submodule.
            capacity_factor: in training an expert takes at most K * ceil(capacity_factor * T / E) rows; None: no
                limit.
            eval_capacity_factor: the same in evaluation.
            evaluation: "argmax" or "priced", see `RoutingOptions`. You may set the attribute at any time: prices are
                averaged in both cases (those of every eighth batch while they are not used), and are part of the state
                dict.
            temperature: for rules that sample: a number, a function of the number of `observe` calls so far, or
                "auto", see `RoutingOptions`.
            eps: for rules that mix: "auto", or None for the rule's own.
            target_sample_size: for "auto", see `RoutingOptions`.
            upstream: whether the score function also trains the layers before the router, see `RoutingOptions`.
            loss_weights: the weights of "load-balance", "marginal-entropy", "conditional-entropy" and "z".
            scoring: what the logits mean, if they are not those of a softmax.
            token_prior: a learnt table by token id that is added to the logits; an int: `TokenPrior(vocab_size)`.
            device: the device of the parameters.
            dtype: the dtype of the parameters.
        """
        super().__init__()
        check_at_least("dim", 1 if dim is None else dim, 1)
        check_at_least("num_experts", num_experts, 1)
        check_capacity_factor("capacity_factor", capacity_factor)
        check_capacity_factor("eval_capacity_factor", eval_capacity_factor)
        check_top_k(rule_traits(rule).top_k, num_experts)
        self.dim, self.num_experts = dim, num_experts
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.evaluation, self.upstream = evaluation, upstream
        self.loss_weights = dict(loss_weights or {})
        for name, value in self.loss_weights.items():
            check_loss_weight(f"loss_weights[{name!r}]", value)
        self.scoring = scoring
        self.rule = rule
        weight = None if dim is None else nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
        self.register_parameter("weight", weight)
        prior = TokenPrior(token_prior) if isinstance(token_prior, int) else token_prior
        self.prior = None if prior is None else TokenTable(prior, num_experts, device=device, dtype=dtype)
        unpriced = isinstance(rule, Priced) or not self.traits.reads_logits
        self.average = None if unpriced else RunningPrices(num_experts, device=device)
        check_mixes(eps, self.traits.mixes)
        chosen = [name for name, value in (("eps", eps), ("temperature", temperature)) if value == "auto"]
        self.auto = AutoProposal(chosen, target=target_sample_size, device=device) if chosen else None
        self._set_temperature(temperature, device)
        self.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        """Reads what a rule may have whenever the rule is set."""
        super().__setattr__(name, value)
        if name == "rule":
            self.traits: RuleTraits = rule_traits(value)

    @property
    def evaluation(self) -> str:
        """How experts are chosen in evaluation: "argmax" or "priced"."""
        return self._evaluation

    @evaluation.setter
    def evaluation(self, evaluation: str) -> None:
        check_one_of("evaluation", evaluation, EVALUATIONS)
        self._evaluation = evaluation

    def _set_temperature(self, temperature: float | str | Schedule, device: torch.device | str | None) -> None:
        """Keeps a number as it is; what changes is a tensor, so that compiled code need not be compiled again."""
        self.schedule: Schedule | None = temperature if callable(temperature) else None
        self._temperature_moves = self.schedule is not None or temperature == "auto"
        check_auto("temperature", temperature)
        at_first: Any = temperature if self.schedule is None else self.schedule(0)
        start: float = 1.0 if temperature == "auto" else at_first
        check_temperature(start, positive=False)
        self.fixed_temperature = float(start)
        self.register_buffer("temperature", torch.tensor(float(start), device=device))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64, device=device))

    def reset_parameters(self) -> None:
        """Draws the gate anew, with standard deviation sqrt(0.1 / dim) (Fedus and others 2021, section 2.4).

        A token prior is reset to its initial table, the temperature to its start, and the count of updates to 0. The
        rule and the averages of prices have a `reset_parameters` of their own, as deferred initialisation expects.
        """
        self.temperature.fill_(self.fixed_temperature)
        self.updates.zero_()
        if self.dim is not None:
            nn.init.normal_(self.weight, std=math.sqrt(0.1 / self.dim))
        if self.prior is not None:
            self.prior.reset_parameters()

    def logits(self, x: Float[Tensor, "T dim"]) -> Float[Tensor, "T E"]:
        """Computes the logits, before a token prior is added: a function of x without noise. Autocast is off here.

        Args:
            x: the rows, at least float32.

        Returns:
            The logits, in the dtype of x.
        """
        return F.linear(x, self.weight.to(x.dtype))

    def forward(
        self,
        x: Float[Tensor, "*shape dim"],
        *,
        mask: Bool[Tensor, "*shape"] | None = None,
        token_ids: Int[Tensor, "*shape"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Routing:
        """Routes rows.

        Args:
            x: the rows; all leading dimensions together are one batch of T rows.
            mask: False for rows that take no expert (padding).
            token_ids: integers. The router `hash` uses them, and routers with a token prior need them.
            generator: where randomness comes from; None is torch's global stream, which activation checkpointing
                restores.

        Returns:
            The routing.
        """
        check_has_gate(self.dim)
        check_input_dim(x, self.dim)
        shape = tuple(x.shape[:-1])
        with torch.autocast(autocast_device(x.device), enabled=False):
            wide = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
            rows = x.reshape(-1, x.shape[-1]).to(wide)
            own = partial(self.logits, rows.detach()) if rows.requires_grad else None
            how: dict[str, Any] = {"mask": mask, "token_ids": token_ids, "generator": generator}
            return self.route(self.logits(rows), shape=shape, own_logits=own, **how)

    def route(
        self,
        logits: Float[Tensor, "T E"],
        *,
        shape: tuple[int, ...] | None = None,
        bias: Float[Tensor, "E"] | None = None,
        mask: Bool[Tensor, "..."] | None = None,
        token_ids: Int[Tensor, "..."] | None = None,
        generator: torch.Generator | None = None,
        own_logits: Callable[[], Float[Tensor, "T E"]] | None = None,
    ) -> Routing:
        """Routes rows by given logits, such as those of another model's gate.

        Args:
            logits: one row for each row of the batch.
            shape: the leading dimensions of the input, whose product is T; None: (T,).
            bias: a correction bias, for a `scoring`.
            mask: of this shape: False for rows that take no expert (padding).
            token_ids: of this shape, as in `forward`.
            generator: as in `forward`.
            own_logits: computes the same logits with gradient for the gate's own parameters alone, such as
                `lambda: gate(x.detach())`. Called if the router learns by the score function and `upstream` is False.
                None: the score function trains whatever the logits depend on.

        Returns:
            The routing.

        Example:
            >>> import equipoise as eq
            >>> router = eq.nn.make_router("topk", None, 4, top_k=2)
            >>> router.route(torch.tensor([[2.0, 0.0, 1.0, -1.0]])).indices
            tensor([[0, 2]])
        """
        shape = (logits.shape[0],) if shape is None else shape
        check_logits(logits, shape, self.num_experts)
        check_mask(mask, shape)
        check_rows_like("token_ids", token_ids, shape)
        flat_mask = None if mask is None else mask.reshape(-1)
        flat_ids = None if token_ids is None else token_ids.reshape(-1).long()
        with torch.autocast(autocast_device(logits.device), enabled=False):
            logits, log_p = self._log_p(logits, flat_ids, flat_mask)
            scoring = self.scoring
            selection = None if scoring is None else scoring.compared(logits, bias)
            rows, exact = logits.shape[0], self.traits.holds_all
            scope = self.scope.begin(rows, whole=mask is None, training=self.training, exact=exact)
            request = RouteRequest(
                logits=logits,
                log_p=log_p,
                capacity=self.capacity(scope.count(rows)),
                mask=flat_mask,
                token_ids=flat_ids,
                positions=_positions(shape, logits.device),
                training=self.training,
                temperature=self.temperature if self._temperature_moves else self.fixed_temperature,
                generator=scope.generator(generator, logits.device) if self.training else generator,
                eps=self.auto.read("eps") if self.auto is not None and "eps" in self.auto.names else None,
                shape=shape,
                scoring=scoring,
                selection=selection,
                scope=scope,
            )
            routing = self._rescaled(self._choose(logits if selection is None else selection, request), request)
            if self.training and self.loss_weights:
                routing = replace(routing, balance_losses=balance_losses(self.loss_weights, logits, request))
            if scope.ranks > 1:  # now, since all ranks are here, and not when one of them reads it
                _ = routing.stats
        if not routing.score_function or own_logits is None or self.upstream or not torch.is_grad_enabled():
            return routing
        again = own_logits()  # under autocast, if the logits were
        with torch.autocast(autocast_device(logits.device), enabled=False):
            _, own_log_p = self._log_p(again, flat_ids, flat_mask)
            if type(self).logits is not Router.logits and reads_values(log_p, own_log_p):
                check_same_logits(torch.allclose(log_p, own_log_p, atol=1e-4))
            return replace(routing, own_log_p=own_log_p)

    def _log_p(self, logits: Tensor, token_ids: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds the token prior to the logits, in float32 or more; returns them and their log-probabilities."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.prior is not None:
            check_token_ids_given(token_ids is not None, self.prior.prior.vocab_size)
            assert token_ids is not None
            logits = logits + self.prior(token_ids, mask).to(logits.dtype)
        return logits, log_softmax(logits) if self.scoring is None else self.scoring.log_p(logits)

    def capacity(self, rows: int) -> int | None:
        """Returns how many of T rows an expert may take in this mode, at least K; None: any number.

        Args:
            rows: T. Masked rows count too, because their number is not known without waiting for the device.
        """
        factor = (self.capacity_factor if self.traits.limited else None) if self.training else self.eval_capacity_factor
        if factor is None:
            return None
        # In whole numbers: 1.1 * 10 is a little more than 11 in floats, and sizes may be symbols while tracing.
        above, below = Fraction(factor).limit_denominator(10**6).as_integer_ratio()
        return self.traits.top_k * max(-(-above * rows // (below * self.num_experts)), 1)

    def _choose(self, logits: Tensor, request: RouteRequest) -> Routing:
        """Calls the rule, or takes the running prices in evaluation."""
        if self.training or self.average is None or self.evaluation == "argmax":
            decided: Any = self.rule(logits, request)
            check_routing(decided, isinstance(decided, Routing))
            return decided
        prices = self.average.prices.clone()
        top_k, gated, factors = self.traits.top_k, self.traits.gated, self.traits.factors
        routing = choose_top(logits.detach() - prices, request, top_k=top_k, gated=gated, prices=prices)
        return routing if factors is None else replace(routing, scores=factors(request.log_p, routing.indices))

    def _rescaled(self, routing: Routing, request: RouteRequest) -> Routing:
        """Gives the factors of a foreign gate to rules with factors of their own, and its scale to those without."""
        scoring = request.scoring
        if scoring is None:
            return routing
        if not self.traits.gated:
            return replace(routing, scores=scoring.scale * routing.scores)
        if self.traits.factors is None:
            return routing
        wanted = routing.indices if routing.sample is None else routing.sample.z_rounds
        factors = scoring.factors(request.logits, wanted)
        return replace(routing, scores=torch.where(routing.indices < self.num_experts, factors, 0.0))

    @torch.no_grad()
    def observe(self, routing: Routing) -> None:
        """Updates the state that changes between steps: that of the rule, running prices, temperature and eps.

        Args:
            routing: what this router decided in the step that has just ended.
        """
        if self.traits.observe is not None:
            self.traits.observe(routing)
        if self.average is not None:
            self._observe_prices(self.average, routing)
        self.updates += 1
        if self.schedule is not None:
            self.temperature.fill_(self.schedule(int(self.updates)))
        if self.auto is not None:
            self.auto.observe(routing)
            if "temperature" in self.auto.names:
                self.temperature.copy_(self.auto.read("temperature"))

    def _observe_prices(self, average: RunningPrices, routing: Routing) -> None:
        """Takes in the prices of a batch; of every eighth where they are not used yet."""
        every = 1 if self.evaluation == "priced" else _SELDOM
        if every == 1 or int(self.updates) % every == 0:
            how: dict[str, Any] = {"stands_for": every, "scope": routing.scope}
            average.take(routing.compared, routing.mask, self.traits.top_k, **how)

    def extra_repr(self) -> str:
        """Shows the settings."""
        rule = "" if isinstance(self.rule, nn.Module) else f", rule={self.rule!r}"
        return (
            f"{self.dim}, {self.num_experts}{rule}, capacity_factor={self.capacity_factor}, "
            f"evaluation={self.evaluation!r}, upstream={self.upstream}, loss_weights={self.loss_weights}"
        )


def _positions(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the place of each row along the last leading dimension."""
    if not shape:
        return torch.zeros(1, dtype=torch.int64, device=device)
    return torch.arange(shape[-1], device=device).expand(shape).reshape(-1)
