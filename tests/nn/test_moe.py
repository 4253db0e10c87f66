# SPDX-License-Identifier: Apache-2.0
"""The layer: capacity, evaluation, schedules, balance losses, routers and experts of the user's own."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise.nn import (
    CosineSchedule,
    ExponentialSchedule,
    LinearSchedule,
    MoE,
    Router,
    RouteRequest,
    Routing,
    capture,
)
from equipoise.nn._bias_rules import LossFree
from equipoise.nn._peer_rules import TopK


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small batches only wait for a second thread."""
    torch.set_num_threads(1)


def layer(router: Any = "skip-iw", dim: int = 6, num_experts: int = 3, **how: Any) -> MoE:
    torch.manual_seed(1)
    return MoE(dim, num_experts, hidden_dim=8, router=router, **how)


def tilted(moe: MoE) -> MoE:
    """Makes expert 0 the favourite of every row whose first feature is positive."""
    with torch.no_grad():
        moe.router.weight[0, 0] += 5.0
    return moe


def run(moe: MoE, x: Tensor, **how: Any) -> tuple[Tensor, Routing]:
    with capture(moe) as routings:
        y = moe(x, **how)
    return y, routings[0]


def output_by_hand(moe: MoE, x: Tensor, routing: Routing) -> Tensor:
    """Sums scores times expert outputs, row by row."""
    experts: Any = moe.experts
    y = torch.zeros_like(x)
    for i, (indices, scores) in enumerate(zip(routing.indices.tolist(), routing.scores, strict=True)):
        for j, score in zip(indices, scores, strict=True):
            if j < moe.num_experts:
                hidden = nn.functional.gelu(x[i] @ experts.up[j].T + experts.up_bias[j])
                y[i] = y[i] + score * (hidden @ experts.down[j].T + experts.down_bias[j])
    return y


@pytest.mark.parametrize(
    ("router", "how"),
    [("skip-iw", {}), ("gm-iw", {"capacity_factor": 1.0, "loss": "gating"}), ("topk", {"top_k": 2}), ("dense", {})],
)
def test_output_is_the_sum_of_scores_times_experts(router: str, how: dict[str, Any]) -> None:
    moe, x = tilted(layer(router, **how)), torch.randn(12, 6)
    y, routing = run(moe, x)
    torch.testing.assert_close(y, output_by_hand(moe, x, routing))


def test_dropped_rows_get_zeros() -> None:
    moe, x = tilted(layer("switch", capacity_factor=0.5)), torch.randn(30, 6)
    y, routing = run(moe, x)
    assert 0 < int((~routing.kept).sum()) < 30
    assert bool((y[~routing.kept] == 0).all())
    assert bool((y[routing.kept] != 0).any(1).all())
    assert bool((routing.weight == 1).all())  # a dropped row's loss still counts
    skipped = run(tilted(layer("skip-iw", capacity_factor=0.5)), x)[1]
    assert torch.equal(skipped.weight == 0, ~skipped.kept)


@pytest.mark.parametrize(
    ("factor", "rows", "expected"),
    [(1.0, 12, 4), (1.25, 12, 5), (1.1, 30, 11), (0.5, 12, 2), (0.01, 12, 1), (2.0, 7, 5), (None, 12, None)],
)
def test_capacity(factor: float | None, rows: int, expected: int | None) -> None:
    moe = layer("switch", capacity_factor=factor)
    assert run(moe, torch.randn(rows, 6))[1].capacity == expected
    assert run(moe.eval(), torch.randn(rows, 6))[1].capacity is None
    moe.router.eval_capacity_factor = factor
    assert run(moe, torch.randn(rows, 6))[1].capacity == expected


@pytest.mark.parametrize("router", ["sample", "topk", "loss-free", "priced"])
def test_routers_without_capacity_drop_nothing(router: str) -> None:
    _, routing = run(tilted(layer(router, capacity_factor=0.5)), torch.randn(30, 6))
    assert routing.capacity is None
    assert bool(routing.kept.all())


@pytest.mark.parametrize("router", ["skip-iw", "skip", "gm-iw", "gm", "base"])
def test_no_capacity_factor_is_no_limit(router: str) -> None:
    x = torch.randn(30, 6)
    _, routing = run(tilted(layer(router, capacity_factor=None)), x)
    assert bool(routing.kept.all())
    assert int(routing.stats.load.max()) > 10
    if router != "base":
        torch.testing.assert_close(routing.weight, torch.ones(30), rtol=1e-4, atol=1e-4)


def test_evaluation_keeps_to_its_own_capacity() -> None:
    moe = tilted(layer("skip-iw", eval_capacity_factor=1.0)).eval()
    _, routing = run(moe, torch.randn(30, 6))
    assert routing.capacity == 10
    assert int(routing.stats.load.max()) == 10
    assert not bool(routing.kept.all())


@pytest.mark.parametrize("loss", ["reinforce", "gating", "gated-reinforce"])
def test_evaluation_takes_the_argmax_and_is_gated_as_training_is(loss: str) -> None:
    moe = layer("gm-iw", loss=loss).eval()
    _, routing = run(moe, torch.randn(10, 6))
    assert torch.equal(routing.indices[:, 0], routing.logits.argmax(-1))
    best = routing.log_p.exp().amax(-1, keepdim=True)
    torch.testing.assert_close(routing.scores, torch.ones(10, 1) if loss == "reinforce" else best)


@pytest.mark.parametrize("router", ["skip-iw", "switch", "dense", "topk", "priced"])
def test_priced_evaluation_stays_near_balance_row_by_row(router: str) -> None:
    moe = tilted(layer(router, evaluation="priced", num_experts=4))
    torch.manual_seed(0)
    for _ in range(8):
        moe.observe(run(moe, torch.randn(256, 6))[1])
    moe.eval()
    x = torch.randn(1024, 6)
    y, routing = run(moe, x)
    argmax_load = torch.bincount(routing.logits.argmax(-1), minlength=4)
    assert float(argmax_load.max()) / 256 - 1 > 0.6
    assert float(routing.stats.max_violation) < 0.2
    assert routing.prices is not None
    assert torch.equal(routing.indices[:, 0], (routing.logits - routing.prices).argmax(-1))
    torch.testing.assert_close(moe(x[:1]), y[:1])  # needs no batch


def test_priced_evaluation_is_gated_as_training_is() -> None:
    x = torch.randn(10, 6)
    assert bool((run(layer("skip-iw", loss="reinforce", evaluation="priced").eval(), x)[1].scores == 1).all())
    assert bool((run(layer("switch", evaluation="priced").eval(), x)[1].scores < 1).all())


@pytest.mark.parametrize(
    ("schedule", "middle"),
    [(LinearSchedule, 2.5), (CosineSchedule, 2.5), (ExponentialSchedule, 2.0)],
)
def test_schedule(schedule: Callable[..., Any], middle: float) -> None:
    curve = schedule(4.0, 1.0, steps=10)
    assert curve(0) == 4.0
    assert curve(5) == pytest.approx(middle)
    assert curve(10) == pytest.approx(1.0)
    assert curve(1000) == pytest.approx(1.0)
    values = [curve(step) for step in range(11)]
    assert values == sorted(values, reverse=True)


def test_temperature_follows_the_schedule_with_updates_not_with_forward_passes() -> None:
    moe, x = layer("sample", temperature=LinearSchedule(4.0, 1.0, steps=3)), torch.randn(8, 6)
    for expected in (4.0, 3.0, 2.0, 1.0, 1.0):
        for _ in range(2):
            _, routing = run(moe, x)
            assert routing.sample is not None
            torch.testing.assert_close(routing.sample.log_q, (routing.log_p / expected).log_softmax(-1))
        moe.observe(routing)
    other = layer("sample", temperature=LinearSchedule(4.0, 1.0, steps=3))
    other.load_state_dict(moe.state_dict())
    assert float(other.router.temperature) == 1.0


def test_any_function_is_a_schedule() -> None:
    moe = layer("sample", temperature=lambda step: 1.0 + step)
    moe.observe(run(moe, torch.randn(4, 6))[1])
    assert float(moe.router.temperature) == 2.0


def test_options_of_the_strategies_reach_them() -> None:
    x = torch.randn(12, 6)
    how = {"temperature": 2.0, "sinkhorn_first": True, "importance": False}
    _, routing = run(tilted(layer("sample", **how)), x)
    assert routing.sample is not None
    balanced = eq.sinkhorn(routing.log_p.detach() / 2.0).log_p
    torch.testing.assert_close(routing.sample.log_q, balanced)
    assert bool((routing.weight == 1).all())


RECIPES = {
    "skip-iw": {"marginal-entropy", "conditional-entropy"},
    "gm-iw": {"marginal-entropy", "conditional-entropy"},
    "switch": {"load-balance"},
    "topk": {"load-balance"},
    "base": set(),
    "hash": set(),
    "loss-free": set(),
    "dense": set(),
}


@pytest.mark.parametrize("router", RECIPES)
def test_balance_losses_of_the_recipe(router: str) -> None:
    assert set(run(layer(router), torch.randn(8, 6))[1].balance_losses) == RECIPES[router]


def test_balance_losses_are_weighted_and_leave_masked_rows_out() -> None:
    moe = layer("gm-iw", balance_loss=0.5, marginal_entropy=2.0, conditional_entropy=3.0, z_loss=0.25)
    x, mask = torch.randn(8, 6), torch.tensor([True] * 6 + [False] * 2)
    _, routing = run(moe, x, mask=mask)
    losses = routing.balance_losses
    logits = x[:6] @ moe.router.weight.T
    p = logits.softmax(-1)
    share = torch.bincount(logits.argmax(-1), minlength=3) / 6
    mean = p.mean(0)
    torch.testing.assert_close(losses["load-balance"], 0.5 * 3 * (share * mean).sum())
    torch.testing.assert_close(losses["marginal-entropy"], 2.0 * (mean * mean.log()).sum())
    torch.testing.assert_close(losses["conditional-entropy"], -3.0 * (p * p.log()).sum(-1).mean())
    torch.testing.assert_close(losses["z"], 0.25 * logits.logsumexp(-1).square().mean())
    assert all(x.requires_grad for x in losses.values())
    paper = layer("skip-iw", marginal_entropy=0.0)
    assert run(paper, x)[1].balance_losses == {}


def test_rule_of_the_users_own() -> None:
    def two_of_them(logits: Tensor, request: RouteRequest) -> Routing:
        assert request.capacity == 5
        indices = torch.tensor([[0, 2]]).expand(logits.shape[0], 2)
        return request.route(indices, request.log_p.exp().gather(1, indices))

    moe, x = layer(two_of_them), torch.randn(12, 6)
    y, routing = run(moe, x)
    torch.testing.assert_close(y, output_by_hand(moe, x, routing))
    assert routing.stats.load.tolist() == [12, 0, 12]


def test_rule_with_state_is_part_of_the_model() -> None:
    moe = layer(LossFree(3, rate=0.5, limited=True))
    _, routing = run(tilted(moe), torch.randn(12, 6))
    assert routing.capacity == 5
    moe.observe(routing)
    assert "router.rule.bias" in moe.state_dict()
    assert float(moe.state_dict()["router.rule.bias"].abs().sum()) > 0


def test_router_of_the_users_own() -> None:
    class Distances(Router):
        def logits(self, x: Tensor) -> Tensor:
            return -(x.unsqueeze(1) - self.weight).square().sum(-1)

    router = Distances(6, 3, TopK(), capacity_factor=None)
    moe, x = layer(router), torch.randn(5, 6)
    assert moe.router is router
    _, routing = run(moe, x)
    nearest = torch.cdist(x, router.weight).argmin(-1)
    assert torch.equal(routing.indices[:, 0], nearest)


def test_strategy_of_the_users_own_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "mine", eq.STRATEGIES["gm-iw"], raising=False)
    _, routing = run(layer("math:mine", capacity_factor=1.0), torch.randn(12, 6))
    assert routing.exactly_balanced


@pytest.mark.parametrize("experts", ["swiglu", "module", "list"])
def test_experts(experts: str) -> None:
    made: Any = {"swiglu": "swiglu", "module": nn.Linear(6, 6), "list": [nn.Identity(), nn.Tanh(), nn.Linear(6, 6)]}
    moe, x = layer("gm-iw", loss="reinforce", experts=made[experts]), torch.randn(9, 6)
    y, routing = run(moe, x)
    assert y.shape == x.shape
    if experts == "list":
        first = routing.indices[:, 0] == 0
        torch.testing.assert_close(y[first], x[first])


def test_hidden_dim_is_four_times_dim_unless_given() -> None:
    experts: Any = MoE(4, 2).experts
    assert experts.up.shape == (2, 16, 4)
    experts = layer().experts
    assert experts.up.shape == (3, 8, 6)


def test_router_dtype_is_apart_from_the_experts() -> None:
    moe = layer("switch", dtype=torch.bfloat16, router_dtype=torch.float32)
    assert moe.router.weight.dtype == torch.float32
    assert next(moe.experts.parameters()).dtype == torch.bfloat16
    assert moe(torch.randn(4, 6).bfloat16()).dtype == torch.bfloat16


def test_layers_are_reached_from_the_package() -> None:
    assert eq.nn.MoE is MoE
    assert "nn" in dir(eq)
    with pytest.raises(AttributeError, match="module 'equipoise' has no attribute 'nothing'"):
        _ = eq.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_copies_do_not_share_state() -> None:
    moe = layer("priced")
    other = copy.deepcopy(moe)
    moe.observe(run(tilted(moe), torch.randn(32, 6))[1])
    rule: Any = other.router.rule
    assert rule.average.prices.tolist() == [0.0] * 3
    assert int(other.router.updates) == 0


@pytest.mark.parametrize(
    "case",
    [
        "few_routers",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("all_routers", "default_backend")),
    ],
)
def test_compiled(case: str, fresh_python: Callable[..., str]) -> None:
    fresh_python((Path(__file__).parent / "compiled_layer.py").read_text(), case)


@pytest.mark.parametrize(
    ("router", "how"),
    [
        ("loss-free", {}),
        ("quantile", {}),
        ("priced", {}),
        ("base", {"token_prior": 11}),
        ("gm-iw-mix", {"eps": "auto", "temperature": "auto"}),
        ("skip-iw", {"temperature": LinearSchedule(2.0, 1.0, steps=10)}),
    ],
)
def test_deferred_initialisation_leaves_no_raw_memory(router: str, how: dict[str, Any]) -> None:
    wanted = MoE(8, 4, router=router, **how)
    moe = MoE(8, 4, router=router, device="meta", **how).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*moe.parameters(), *moe.buffers()):
            tensor.fill_(7)
    for module in moe.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    buffers = dict(moe.named_buffers())
    assert buffers
    for name, buffer in wanted.named_buffers():
        assert torch.equal(buffers[name], buffer), name
        assert buffers[name].dtype == buffer.dtype
    assert not any(bool((parameter == 7).any()) for parameter in moe.parameters())
