# SPDX-License-Identifier: Apache-2.0
"""The one factory of routers, and what it refuses."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import equipoise as eq
from equipoise.estimators import STRATEGIES, WeightedSampler
from equipoise.nn import ROUTERS, MoE, Router, SamplingRule, make_router
from equipoise.nn._peer_rules import TopK


@dataclass(frozen=True)
class Mine:
    """A strategy of a user's own: that of the table by another name, without what a strategy need not have."""

    of: str
    name: str = "mine"
    label: str = "Mine"
    unbiased: bool = True
    respects_capacity: bool = True

    def draw_noise(self, shape, **how):
        return STRATEGIES[self.of].draw_noise(shape, **how)

    def draw(self, log_p, noise, **how):
        return STRATEGIES[self.of].draw(log_p, noise, **how)


@dataclass(frozen=True)
class MineAssignsAll(Mine):
    assigns_all: bool = True


def route(router: Router, rows: int = 12) -> Any:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    return router(x, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ROUTERS)
def test_a_layer_has_the_router_that_the_factory_makes(name: str) -> None:
    torch.manual_seed(0)
    alone = make_router(name, 4, 3, capacity_factor=1.0, z_loss=0.0)
    torch.manual_seed(0)
    inside = MoE(4, 3, router=name, capacity_factor=1.0, z_loss=0.0).router
    assert repr(alone) == repr(inside)
    assert torch.equal(route(alone).indices, route(inside).indices)


def test_options_reach_the_router() -> None:
    router = make_router("gm-iw-avg-mix", 4, 3, top_k=2, eps=0.3, solves=2, temperature=2.0, evaluation="priced")
    assert isinstance(router.rule, SamplingRule)
    assert isinstance(router.rule.strategy, WeightedSampler)
    assert (router.rule.strategy.eps, router.rule.strategy.solves, router.rule.top_k) == (0.3, 2, 2)
    assert (router.fixed_temperature, router.evaluation) == (2.0, "priced")
    assert router.loss_weights == {"marginal-entropy": 0.1}
    assert make_router("gm-iw", 4, 3, marginal_entropy=0.0, balance_loss=0.2).loss_weights == {"load-balance": 0.2}


def test_certainty_is_rewarded_where_nothing_else_tells_experts_apart() -> None:
    def weight(name: str = "skip-iw", dim: int | None = 4, **options: Any) -> float:
        return make_router(name, dim, 3, **options).loss_weights.get("conditional-entropy", 0.0)

    assert weight() == weight("gm-iw-mix") == pytest.approx(0.03)
    assert weight(marginal_entropy=0.5) == pytest.approx(0.03)
    assert weight(marginal_entropy=0.01) == pytest.approx(0.003)
    assert weight(marginal_entropy=0.0) == weight(top_k=2) == weight(token_prior=16) == weight(dim=None) == 0.0
    assert weight("switch") == weight("switch", marginal_entropy=0.1) == 0.0
    assert weight("switch", conditional_entropy=0.2) == weight(token_prior=16, conditional_entropy=0.2) == 0.2


def test_upstream_needs_a_score_function() -> None:
    assert "upstream=True" in repr(make_router("skip-iw", 4, 3, upstream=True))
    with pytest.raises(ValueError, match=r"upstream must be False with loss=\"gating\", which has no score function"):
        make_router("skip-iw", 4, 3, loss="gating", upstream=True)
    with pytest.raises(ValueError, match=r"upstream"):
        make_router("switch", 4, 3, upstream=True)


def test_a_gate_with_noise_of_its_own_is_refused_unless_upstream() -> None:
    class Jittered(Router):
        def logits(self, x: torch.Tensor) -> torch.Tensor:
            return super().logits(x * torch.rand_like(x))

    x = torch.randn(12, 4, requires_grad=True)
    Jittered(4, 3, SamplingRule(STRATEGIES["skip-iw"]), upstream=True)(x)
    with pytest.raises(ValueError, match=r"logits must return the same for the same rows.*upstream=True"):
        Jittered(4, 3, SamplingRule(STRATEGIES["skip-iw"]))(x)


def test_a_strategy_is_a_router() -> None:
    torch.manual_seed(0)
    by_name = make_router("gm-iw", 4, 3, capacity_factor=1.0)
    torch.manual_seed(0)
    by_strategy = make_router(MineAssignsAll("gm-iw"), 4, 3, capacity_factor=1.0)
    assert torch.equal(route(by_name).indices, route(by_strategy).indices)
    assert by_strategy.loss_weights == by_name.loss_weights
    layer = MoE(4, 3, router=Mine("skip-iw"))
    with eq.nn.capture(layer) as routings:
        y = layer(torch.randn(12, 4))
    eq.nn.Surrogate()(y.square().mean(-1), routings).backward()
    assert layer.router.weight.grad is not None


def test_whether_the_capacity_must_hold_all_rows_is_the_strategys_word() -> None:
    message = "capacity_factor must be >= 1 with router 'mine', got 0.5: it assigns every row"
    with pytest.raises(ValueError, match=message):
        MoE(4, 3, router=MineAssignsAll("gm-iw"), capacity_factor=0.5)
    # Neither a name that begins like theirs nor a strategy that knows no capacity.
    MoE(4, 3, router=Mine("skip-iw", name="gm-mine"), capacity_factor=0.5)
    MoE(4, 3, router=MineAssignsAll("sample", respects_capacity=False), capacity_factor=0.5)


def test_a_strategy_that_is_none_is_refused() -> None:
    class MixesByWord(Mine):
        mixes = "yes"

    with pytest.raises(ValueError, match="strategy 'mine' must have an attribute mixes of type bool, or none"):
        make_router(MixesByWord("gm-iw"), 4, 3)


@pytest.mark.parametrize("build", [MoE, lambda *sizes, **how: make_router("skip-iw", *sizes, **how)])
def test_an_unknown_option_lists_the_known_ones(build: Any) -> None:
    message = r"must be among .*capacity_factor, .* evaluation, .* token_prior, got 'temprature': did you mean temp"
    with pytest.raises(TypeError, match=message):
        build(4, 3, temprature=2.0)
    with pytest.raises(TypeError, match="got 'draws': use one of these"):
        build(4, 3, draws=3)


def test_a_layer_lists_its_own_options_too() -> None:
    with pytest.raises(TypeError, match=r"options must be among hidden_dim, .*: did you mean hidden_dim\?"):
        MoE(4, 3, hiddendim=8)  # pyright: ignore[reportCallIssue]


def test_a_router_takes_no_options() -> None:
    router = Router(4, 3, TopK())
    assert make_router(router, 4, 3) is router
    with pytest.raises(ValueError, match=r"temperature must be left out with a Router, .* got 2.0: give it to make_r"):
        MoE(4, 3, router=router, temperature=2.0)
    with pytest.raises(ValueError, match=r"top_k must be left out with a Router, .* got 2: give it to make_router"):
        MoE(4, 3, router=router, top_k=2)
