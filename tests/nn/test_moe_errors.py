# SPDX-License-Identifier: Apache-2.0
"""What a layer refuses, each with one clear error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jaxtyping import config
from torch import Tensor, nn

from equipoise.estimators import STRATEGIES
from equipoise.nn import ROUTERS, LinearSchedule, MoE, Router, RouteRequest, Routing, SamplingRule
from equipoise.nn._auto import AutoProposal
from equipoise.nn._bias_rules import LossFree, Priced, RunningPrices
from equipoise.nn._peer_rules import Base, TopK


def refused(message: str, build: Callable[..., Any], *arguments: Any, **how: Any) -> None:
    with pytest.raises(ValueError, match=message):
        build(*arguments, **how)


def test_unknown_router_lists_the_names() -> None:
    names = ", ".join(ROUTERS)
    refused(f"router must be one of {names}, .* got 'swich'", MoE, 4, 2, router="swich")


@pytest.mark.parametrize("name", ["capacity_factor", "eval_capacity_factor"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_capacity_factor(name: str, value: float) -> None:
    refused(f"{name} must be finite and > 0, got {value}: 1.0 gives", MoE, 4, 2, **{name: value})


@pytest.mark.parametrize("name", ["balance_loss", "z_loss", "marginal_entropy", "conditional_entropy"])
@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan"), "auto", True])
def test_weights_of_losses(name: str, value: Any) -> None:
    refused(f"{name} must be a finite number >= 0, got {value!r}: it is the weight", MoE, 4, 2, **{name: value})
    MoE(4, 2, **{name: 0})


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_weights_of_losses_of_a_router(value: float) -> None:
    rule = SamplingRule(STRATEGIES["sample"])
    refused(r"loss_weights\['z'\] must be a finite number >= 0", Router, 4, 2, rule, loss_weights={"z": value})


@pytest.mark.parametrize(
    ("router", "remedy"), [(None, "leave it out"), (3, "leave it out"), (nn.Linear, "make an object of this class")]
)
def test_a_rule_that_cannot_be_called(router: Any, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # to see what users see
    refused(f"router must be a name, a strategy, a Router, or a routing rule .*: {remedy}", MoE, 4, 2, router=router)


@pytest.mark.parametrize("router", ["gm-iw", "gm-sh", "gm", "base"])
def test_capacity_factor_that_cannot_hold_every_row(router: str) -> None:
    refused(
        f"capacity_factor must be >= 1 with router '{router}', got 0.9", MoE, 4, 2, router=router, capacity_factor=0.9
    )
    MoE(4, 2, router="skip-iw", capacity_factor=0.9)


def test_capacity_of_all_experts() -> None:
    refused(
        "eval_capacity_factor must be None with router 'dense', got 1.0",
        MoE,
        4,
        2,
        router="dense",
        eval_capacity_factor=1.0,
    )


@pytest.mark.parametrize(("dim", "num_experts", "name"), [(0, 2, "dim"), (4, 0, "num_experts"), (4, -1, "num_experts")])
def test_sizes(dim: int, num_experts: int, name: str) -> None:
    refused(f"{name} must be an integer >= 1", MoE, dim, num_experts)


@pytest.mark.parametrize("shape", [(3, 5), (4, 3), (1,)])
def test_dim_mismatch(shape: tuple[int, ...]) -> None:
    refused(r"x must have shape \[\.\.\., 4\], got .*: the layer was built with dim=4", MoE(4, 2), torch.randn(*shape))


def test_integers_are_not_rows() -> None:
    # Called past the shape checker of the tests, which would refuse the dtype first.
    from equipoise.nn._router_checks import check_input_dim

    refused(
        "x must be floating point, got torch.int64: embed tokens first", check_input_dim, torch.ones(3, 4).long(), 4
    )


def test_mask_and_token_ids() -> None:
    from equipoise._core import check_mask
    from equipoise.nn._router_checks import check_rows_like

    refused("mask must be boolean", check_mask, torch.ones(3), [3])
    refused(r"mask must have shape \[3\]", check_mask, torch.ones(2).bool(), [3])
    refused(r"token_ids must be integers of shape \[3\]", check_rows_like, "token_ids", torch.ones(3), [3])
    refused(r"token_ids must be integers of shape \[3\]", check_rows_like, "token_ids", torch.ones(2).long(), [3])


def test_expert_that_changes_the_shape() -> None:
    moe = MoE(4, 2, experts=[nn.Linear(4, 5), nn.Linear(4, 5)])
    refused("expert", moe, torch.randn(6, 4))


def test_number_of_expert_modules() -> None:
    refused("expert", MoE, 4, 3, experts=[nn.Linear(4, 4)])


@pytest.mark.parametrize("value", [0, -1])
def test_top_k(value: int) -> None:
    refused(f"top_k must be an integer >= 1, got {value}", TopK, value)
    refused(f"top_k must be an integer >= 1, got {value}", Priced, 4, top_k=value)
    refused(f"top_k must be an integer >= 1, got {value}", LossFree, 4, top_k=value)


@pytest.mark.parametrize("eps", [-0.1, 1.0, 1.5, float("nan")])
def test_mixture_weight(eps: float) -> None:
    refused(r"eps must be in \[0, 1\), got", MoE, 4, 2, router="gm-iw-mix", eps=eps)


@pytest.mark.parametrize("solves", [0, -1])
def test_number_of_solves(solves: int) -> None:
    refused(f"solves must be an integer >= 1, got {solves}", MoE, 4, 2, router="gm-iw-avg", solves=solves)


def test_what_chooses_itself() -> None:
    refused("temperature must be a number or 'auto', got 'automatic'", MoE, 4, 2, temperature="automatic")
    refused("eps must be a number or 'auto', got 'none'", MoE, 4, 2, router="gm-iw-mix", eps="none")
    refused("target_sample_size must be left at 0.5 without .*, got 0.7", MoE, 4, 2, target_sample_size=0.7)
    for target in (0.0, 1.0):
        message = rf"target_sample_size must be in \(0, 1\), a fraction of the rows, got {target}"
        refused(message, MoE, 4, 2, temperature="auto", target_sample_size=target)
    message = "temperature and eps must be numbers without importance weights, got 'auto' and None"
    refused(message, MoE, 4, 2, temperature="auto", importance=False)
    rule = SamplingRule(STRATEGIES["gm-iw-mix"])
    refused("eps must be None, or 'auto' where the rule mixes, .* got 0.3", MoE, 4, 2, router=rule, eps=0.3)
    refused("names must be one of 'eps', 'temperature', got 'solves'", AutoProposal, ["solves"])
    refused("window must be an integer >= 1, got 0", AutoProposal, ["eps"], window=0)
    refused("step must be finite and > 1, got 1.0", AutoProposal, ["eps"], step=1.0)


@pytest.mark.parametrize("value", [0, -1])
def test_top_k_of_a_strategy(value: int) -> None:
    refused(f"top_k must be an integer >= 1, got {value}", MoE, 4, 2, router="gm-iw", top_k=value)
    refused("top_k must be at most num_experts = 2, got 3", MoE, 4, 2, router="gm-iw", top_k=3)


def test_more_choices_than_experts() -> None:
    refused("top_k must be at most num_experts = 2, got 3", MoE, 4, 2, router="topk", top_k=3)
    refused("top_k must be at most num_experts = 2, got 3", MoE, 4, 2, router=TopK(3))


@pytest.mark.parametrize(
    ("router", "how"),
    [
        ("switch", {"top_k": 2}),
        ("skip-iw", {"eps": 0.2}),
        ("gm-iw", {"eps": "auto"}),
        ("gm-iw-mix", {"solves": 4}),
        ("switch", {"solves": 4}),
        ("switch", {"temperature": "auto"}),
        (Base(), {"solves": 4}),
        (Base(), {"eps": "auto"}),
        ("switch", {"sinkhorn_first": True}),
        ("topk", {"importance": False}),
        ("base", {"temperature": 0.5}),
        ("hash", {"temperature": LinearSchedule(2.0, 1.0, steps=3)}),
        (Base(), {"sinkhorn_first": True}),
    ],
)
def test_option_that_the_router_does_not_use(router: Any, how: dict[str, Any]) -> None:
    (name,) = how
    refused(f"{name} must be left at .* with router .*, which does not use it", MoE, 4, 2, router=router, **how)


def test_unknown_loss_and_evaluation() -> None:
    refused("loss must be one of 'reinforce', 'gating', 'gated-reinforce', got 'straight'", MoE, 4, 2, loss="straight")
    refused("evaluation must be one of 'argmax', 'priced', got 'sampled'", MoE, 4, 2, evaluation="sampled")


def test_priced_evaluation_of_a_router_that_learns_no_logits() -> None:
    refused("evaluation must be 'argmax' with router 'hash'", MoE, 4, 2, router="hash", evaluation="priced")


@pytest.mark.parametrize("name", ["balance_loss", "marginal_entropy", "z_loss"])
def test_inert_balance_losses_say_so(name: str) -> None:
    refused(
        f"{name} must be 0 here, got 0.1: it would be inert, because a hash", MoE, 4, 2, router="hash", **{name: 0.1}
    )
    refused(f"{name} must be 0 here, got 0.1: it would be inert, because there is one", MoE, 4, 1, **{name: 0.1})
    MoE(4, 2, router="hash", **{name: 0.0})


def test_temperature() -> None:
    refused("temperature must be finite and >= 0, got -1.0", MoE, 4, 2, temperature=-1.0)
    refused("temperature must be > 0 with importance weights, got 0", MoE, 4, 2, temperature=0.0)
    MoE(4, 2, temperature=0.0, importance=False)


@pytest.mark.parametrize(("name", "how"), [("start", (0.0, 1.0, 5)), ("end", (1.0, -1.0, 5)), ("steps", (1.0, 0.5, 0))])
def test_schedules(name: str, how: tuple[float, float, int]) -> None:
    refused(f"{name} must be", LinearSchedule, *how)


def test_settings_of_rules_with_state() -> None:
    refused(r"decay must be in \[0, 1\), got 1", RunningPrices, 4, 1.0)
    refused("rate must be finite and > 0, got 0", LossFree, 4, rate=0.0)


def test_router_of_other_sizes() -> None:
    router = Router(4, 3, TopK())
    refused(
        "router must be of the layer's sizes, dim=4 and num_experts=2, got dim=4 and num_experts=3",
        MoE,
        4,
        2,
        router=router,
    )


def test_rule_that_forgets_a_dimension() -> None:
    from equipoise.nn._router_checks import check_choice

    message = r"must have indices and scores of shape \[3, K\], got \[3\] and \[3\]: unsqueeze\(1\)"
    refused(message, check_choice, torch.zeros(3).long(), torch.zeros(3), 3)

    def short(logits: Tensor, request: RouteRequest) -> Routing:
        return request.route(logits[1:].argmax(-1, keepdim=True), torch.ones(2, 1))

    refused(r"must have indices and scores of shape \[3, K\], got \[2, 1\]", MoE(4, 2, router=short), torch.randn(3, 4))


def test_rule_that_returns_no_routing() -> None:
    def indices_only(logits: Tensor, request: RouteRequest) -> Any:
        return logits.argmax(-1, keepdim=True)

    message = r"a routing rule must return request.route\(indices, scores\), got Tensor: see"
    refused(message, MoE(4, 2, router=indices_only), torch.randn(3, 4))


@pytest.mark.parametrize("router", [name for name in ROUTERS if name not in ("hash", "dense")])
def test_nan_in_the_input(router: str) -> None:
    x = torch.randn(5, 4)
    x[2, 1] = torch.nan
    refused("must be free of NaN|must not be NaN|must be finite", MoE(4, 2, router=router), x)
    refused("logits must be free of NaN and .inf", MoE(4, 2, router=router).eval(), x)
