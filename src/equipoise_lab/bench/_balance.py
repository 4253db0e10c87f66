# SPDX-License-Identifier: Apache-2.0
"""Balance of fresh batches, for routers that learn one number for each expert from past ones: what is measured.

A batch has logits h W + b: rows h of `RANK` standard normal features, a direction W_j and a popularity b_j for each
expert, all of variance 1. With drift d, every step moves W and b by d standard deviations, and back towards 0 by as
little as keeps their variance. Every rule routes a batch, observes it, and next meets logits that have moved.

Legend: T rows (tokens), E experts, K experts a row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from equipoise._core import check_at_least, check_one_of
from equipoise.nn import RouteRequest, Routing, RoutingRule, choose_top, expert_bias
from equipoise.nn._bias_rules import LossFree, Priced, Quantile
from equipoise.nn._peer_rules import TopK
from equipoise.ops import log_softmax
from equipoise_lab.bench._benchmark import Measurement, Step, check_run

RANK = 16
# In logit units a step. The published 0.001 moves a bias by at most 0.1 in 100 steps; popularities differ by 1.
LOSS_FREE_RATE = 0.05
FLOOR = "floor"
RULES: dict[str, Callable[[int, int], RoutingRule]] = {
    "topk": lambda num_experts, top_k: TopK(top_k),
    "loss-free": lambda num_experts, top_k: LossFree(num_experts, top_k=top_k, rate=LOSS_FREE_RATE),
    "quantile": lambda num_experts, top_k: Quantile(num_experts, top_k=top_k),
    "priced": lambda num_experts, top_k: Priced(num_experts, top_k=top_k),
}
"""From E and K to a router's rule, by the router's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceBench:
    """One run of the balance benchmark."""

    rows: int = 4096  # T, of every batch
    experts: tuple[int, ...] = (64, 128)  # numbers of experts, E
    top_ks: tuple[int, ...] = (1, 2, 8)  # numbers of experts a row, K
    drifts: tuple[float, ...] = (0.0, 0.01)  # standard deviations by which logits move in a step
    steps: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100)  # batches after which balance is measured, increasing
    routers: tuple[str, ...] = tuple(RULES)
    trials: int = 3  # other logits, noise and drift for each; results are means
    fresh: int = 4  # batches that balance is measured on, each time
    floor_rows: int = 131_072  # of the batch whose prices set the floor
    seed: int = 0  # of the first trial

    def __post_init__(self) -> None:
        """Refuses a run that cannot be made."""
        for name in ("rows", "fresh", "floor_rows"):
            check_at_least(name, getattr(self, name), 1)
        for router in self.routers:
            check_one_of("router", router, list(RULES))
        for top_k in self.top_ks:
            if not 1 <= top_k < min(self.experts):
                raise ValueError(f"top_k must be from 1 to {min(self.experts) - 1}, got {top_k}: add experts")
        check_run(self)

    def settings(self) -> list["Setting"]:
        """Lists the settings of a run."""
        return [Setting(e, k, drift) for e in self.experts for k in self.top_ks for drift in self.drifts]


@dataclass(frozen=True, slots=True)
class Setting:
    """Experts, experts a row, and drift of the logits."""

    num_experts: int
    top_k: int
    drift: float

    def key(self, trial: int) -> str:
        """Names the measurement of all routers in one trial."""
        return f"{self.num_experts} experts/K {self.top_k}/drift {self.drift:g}/trial {trial}"


BALANCE_RECIPES = {
    "full": BalanceBench(),
    "quick": BalanceBench(experts=(64,), top_ks=(1, 8), steps=(1, 2, 5, 10, 20), trials=1),
}


def balance_steps(bench: BalanceBench) -> list[Step]:
    """Lists the measurements of a run; one whole trial after the other, so that early results cover all settings."""
    return [
        Step(
            at.key(trial),
            f"trial {trial}  {at.num_experts} experts  K = {at.top_k}  drift {at.drift:g}",
            partial(_measure, bench, at, trial),
        )
        for trial in range(bench.trials)
        for at in bench.settings()
    ]


class _Source:
    """Logits that drift: batches of one distribution, until it moves."""

    def __init__(self, num_experts: int, drift: float, seed: int) -> None:
        self.drift, self.generator = drift, Generator().manual_seed(seed)
        self.size = (RANK + 1, num_experts)  # directions, and popularity as the weight of a feature that is 1
        self.weight = self._normal()

    def _normal(self) -> Float[Tensor, "features E"]:
        weight = torch.randn(self.size, generator=self.generator)
        weight[:RANK] /= math.sqrt(RANK)
        return weight

    def draw(self, rows: int) -> Float[Tensor, "T E"]:
        """Draws a batch of logits."""
        features = torch.randn(rows, RANK, generator=self.generator)
        return features @ self.weight[:RANK] + self.weight[RANK]

    def move(self) -> None:
        """Moves the distribution by one step."""
        if self.drift:
            self.weight = math.sqrt(1 - self.drift**2) * self.weight + self.drift * self._normal()


def _measure(bench: BalanceBench, at: Setting, trial: int) -> Measurement:
    """Feeds the same batches to all rules and measures MaxVio on the same fresh ones, which no rule observes."""
    source = _Source(at.num_experts, at.drift, bench.seed + trial)
    rules = {name: RULES[name](at.num_experts, at.top_k) for name in bench.routers}
    figures: dict[str, float] = {}
    bias = None
    for step in range(1, bench.steps[-1] + 1):
        batch = _request(source.draw(bench.rows))
        for rule in rules.values():
            observe: Callable[[Routing], object] | None = getattr(rule, "observe", None)
            if observe is not None:
                observe(rule(batch.logits, batch))
        source.move()
        if step not in bench.steps:
            continue
        if bias is None or at.drift:
            bias = expert_bias(source.draw(bench.floor_rows), at.top_k)
        fresh = [_request(source.draw(bench.rows)) for _ in range(bench.fresh)]
        for name, rule in rules.items():
            figures[f"{name} {step}"] = _mean_violation([rule(batch.logits, batch) for batch in fresh])
        floor = [choose_top(batch.logits + bias, batch, top_k=at.top_k) for batch in fresh]
        figures[f"{FLOOR} {step}"] = _mean_violation(floor)
    return Measurement(repeats=bench.fresh, figures=figures)


def _mean_violation(routings: list[Routing]) -> float:
    return float(torch.stack([routing.stats.max_violation for routing in routings]).mean())


def _request(logits: Float[Tensor, "T E"]) -> RouteRequest:
    return RouteRequest(
        logits=logits,
        log_p=log_softmax(logits),
        capacity=None,
        mask=None,
        token_ids=None,
        positions=torch.arange(len(logits)),
        training=True,
        temperature=1.0,
        generator=None,
    )
