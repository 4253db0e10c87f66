# SPDX-License-Identifier: Apache-2.0
"""Learning rates and weight decay: routers may have a rate of their own, and tables of token priors do not decay."""

from typing import Any

from torch import nn

from equipoise._core import check_positive
from equipoise.nn._router import Router
from equipoise.nn._surrogate_checks import check_has_layers


def parameter_groups(
    model: nn.Module, lr: float, *, router_lr_scale: float = 1.0, surrogate: nn.Module | None = None
) -> list[dict[str, Any]]:
    """Splits a model's parameters into those of routers, with a learning rate of their own, and the rest.

    Args:
        model: holds at least one router, in an `MoE` or by itself. If a router has no gate of its own, the parameters
            that the module around it has itself, outside of submodules, count as the router's.
        lr: the learning rate of everything else.
        router_lr_scale: the routers' learning rate in units of `lr`.
        surrogate: a surrogate whose readouts are to be trained as well; None if it has none.

    Returns:
        Groups for any optimiser, each in the order of `model.parameters()`: the rest, then the routers, then the tables
        of token priors, with the routers' rate and weight decay 0, then the surrogate's readouts. Parameters that do
        not require gradient are left out, and so are groups without parameters; shared parameters are there once (with
        the routers, if a router has them). The key "name" is the name of a group, which optimisers keep. A module of a
        router names the parameters that do not decay in an attribute `no_weight_decay`, a tuple.

    Example:
        >>> import torch
        >>> import equipoise as eq
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), eq.nn.MoE(8, 4, token_prior=256))
        >>> optimizer = torch.optim.AdamW(eq.nn.parameter_groups(model, lr=1e-3), weight_decay=0.1)
        >>> [(group["name"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        [('model', 0.001, 0.1), ('routers', 0.001, 0.1), ('token-priors', 0.001, 0.0)]
    """
    check_positive("lr", lr)
    check_positive("router_lr_scale", router_lr_scale)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    check_has_layers("model", model, len(routers))
    of_routers = {id(parameter) for router in routers for parameter in router.parameters()}
    for module in model.modules():
        if any(isinstance(child, Router) and child.dim is None for child in module.children()):
            of_routers |= {id(parameter) for parameter in module.parameters(recurse=False)}
    undecayed = {id(parameter) for router in routers for parameter in _undecayed(router)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gates, rate = of_routers - undecayed, lr * router_lr_scale
    groups: list[dict[str, Any]] = [
        {"name": "model", "params": [p for p in trained if id(p) not in of_routers], "lr": lr},
        {"name": "routers", "params": [p for p in trained if id(p) in gates], "lr": rate},
        {"name": "token-priors", "params": [p for p in trained if id(p) in undecayed], "lr": rate, "weight_decay": 0.0},
        {"name": "readouts", "params": [] if surrogate is None else list(surrogate.parameters()), "lr": lr},
    ]
    return [group for group in groups if group["params"]]


def _undecayed(router: Router) -> list[nn.Parameter]:
    """Finds the parameters of a router that its modules name in `no_weight_decay`."""
    return [
        module.get_parameter(name) for module in router.modules() for name in getattr(module, "no_weight_decay", ())
    ]
