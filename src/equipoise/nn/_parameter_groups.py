# SPDX-License-Identifier: Apache-2.0
"""Learning rates: a router learns from a noisier and smaller gradient than the rest of the model."""

from typing import Any

from torch import nn

from equipoise._core import check_positive
from equipoise.nn._router import Router
from equipoise.nn._surrogate_checks import check_has_layers


def parameter_groups(model: nn.Module, lr: float, *, router_lr_scale: float = 5.0) -> list[dict[str, Any]]:
    """Splits a model's parameters into those of routers, with a learning rate of their own, and the rest.

    A router at the model's learning rate lags behind its experts; in a pilot on a byte-level language model, 5 times
    the rate was part of what made the paper's estimator match a Switch layer.

    Args:
        model: holds at least one router, in an `MoE` or by itself. A router without a gate of its own stands in the module
            whose logits it gets, and that module's own parameters are the router's.
        lr: the learning rate of everything else.
        router_lr_scale: the routers' learning rate in units of `lr`. 1 is the paper's setting.

    Returns:
        Two groups for any optimiser, in the order of `model.parameters()`: the rest, then the routers. Parameters that
        do not require gradient are left out, shared ones are there once (with the routers, if a router has them), and a
        group without parameters is left out. The key "name" says which is which; optimisers carry it along.

    Example:
        >>> import torch
        >>> import equipoise as eq
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), eq.nn.MoE(8, 4))
        >>> optimizer = torch.optim.AdamW(eq.nn.parameter_groups(model, lr=1e-3))
        >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
        [('model', 0.001), ('routers', 0.005)]
    """
    check_positive("lr", lr)
    check_positive("router_lr_scale", router_lr_scale)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    check_has_layers("model", model, len(routers))
    of_routers = {id(parameter) for router in routers for parameter in router.parameters()}
    for module in model.modules():
        if any(isinstance(child, Router) and child.dim is None for child in module.children()):
            of_routers |= {id(parameter) for parameter in module.parameters(recurse=False)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"name": "model", "params": [p for p in trained if id(p) not in of_routers], "lr": lr},
        {"name": "routers", "params": [p for p in trained if id(p) in of_routers], "lr": lr * router_lr_scale},
    ]
    return [group for group in groups if group["params"]]
