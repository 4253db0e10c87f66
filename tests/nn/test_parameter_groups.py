# SPDX-License-Identifier: Apache-2.0
"""`parameter_groups`: every trained parameter once, routers with a rate of their own."""

import pytest
import torch
from torch import nn

from equipoise.nn import MoE, Router, parameter_groups
from equipoise.nn._peer_rules import TopK


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), MoE(4, 2), nn.ModuleDict({"inner": MoE(4, 3)}))


def test_every_parameter_is_in_one_group() -> None:
    net = model()
    rest, routers = parameter_groups(net, 1e-2, router_lr_scale=3.0)
    assert (rest["lr"], routers["lr"]) == (1e-2, pytest.approx(3e-2))
    assert [id(p) for p in routers["params"]] == [id(net[1].router.weight), id(net[2]["inner"].router.weight)]
    together = {id(p) for p in rest["params"] + routers["params"]}
    assert together == {id(p) for p in net.parameters()}
    assert len(rest["params"]) + len(routers["params"]) == len(together)


@pytest.mark.filterwarnings("ignore::equipoise.nn.RoutingWarning")  # nothing is captured, on purpose
@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimiser_takes_them(optimiser) -> None:
    net = model()
    optimizer = optimiser(parameter_groups(net, 1e-2, router_lr_scale=2.0))
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, pytest.approx(2e-2)]
    net[1](torch.randn(8, 4)).sum().backward()
    optimizer.step()


def test_tables_of_token_priors_do_not_decay() -> None:
    net = nn.Sequential(nn.Linear(4, 4), MoE(4, 2, token_prior=10))
    rest, routers, priors = parameter_groups(net, 1e-2, router_lr_scale=2.0)
    assert priors["params"] == [net[1].router.prior.weight]
    assert (priors["name"], priors["lr"], priors["weight_decay"]) == ("token-priors", 2e-2, 0.0)
    assert routers["params"] == [net[1].router.weight]
    assert "weight_decay" not in rest
    assert "weight_decay" not in routers


def test_frozen_and_shared_parameters() -> None:
    net = model()
    net[0].requires_grad_(False)
    net.append(nn.Linear(4, 2, bias=False))
    net[3].weight = net[1].router.weight
    rest, routers = parameter_groups(net, 1.0)
    assert not any(p is q for p in rest["params"] for q in [*net[0].parameters(), net[3].weight])
    assert sum(p is net[3].weight for p in routers["params"]) == 1
    for module in (net[1].router, net[2]["inner"].router):
        module.requires_grad_(False)
    assert [group["name"] for group in parameter_groups(net, 1.0)] == ["model"]


def test_a_router_by_itself_and_a_rule_that_learns() -> None:
    class Rule(TopK, nn.Module):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            TopK.__init__(self, 1)
            self.scale = nn.Parameter(torch.ones(2))

    router = Router(4, 2, Rule())
    (group,) = parameter_groups(router, 1.0)
    assert len(group["params"]) == 2


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"lr must be finite and > 0, got 0"):
        parameter_groups(model(), 0.0)
    with pytest.raises(ValueError, match=r"router_lr_scale must be finite and > 0, got -1"):
        parameter_groups(model(), 1.0, router_lr_scale=-1.0)
    with pytest.raises(ValueError, match=r"model must hold at least one equipoise.nn.MoE, got Linear"):
        parameter_groups(nn.Linear(2, 2), 1.0)
