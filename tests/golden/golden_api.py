# SPDX-License-Identifier: Apache-2.0
"""Every use of the library that the golden numbers need, in one place.

When a refactoring renames something, change it here, and the numbers stay comparable. Each function returns a flat
dictionary from a name to a tensor or a number; None is left out.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

import equipoise as eq

Arrays = dict[str, Any]

STORED_NAMES: dict[str, str] = {}
"""How names of parameters and buffers end now, and how they ended when the numbers were stored, where that changed.

For example {"router.gate.weight": "router.weight"}, which holds for every layer of a model.
"""

LATER_NAMES = ("average.averages", "average.errors")
"""How names of buffers end that came after the numbers were stored. What is computed from them is compared."""


def strategy_names() -> list[str]:
    return list(eq.STRATEGIES)


def router_names() -> list[str]:
    return list(eq.nn.ROUTERS)


def router_takes(name: str, option: str) -> bool:
    """Whether a router has a use for an option of `MoE`: top_k, loss, sinkhorn_first, importance, eps, solves."""
    return option in eq.nn.ROUTERS[name].options


def can_be_priced(name: str) -> bool:
    """Whether `evaluation="priced"` makes sense: a router that looks at no logits has nothing to price."""
    return eq.nn.ROUTERS[name].inert is None and name != "dense"


def gumbel(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return eq.draw_gumbel(shape, generator=generator, dtype=dtype)


def assignment(scores: Tensor, capacity: Any, mask: Tensor | None, method: str) -> Arrays:
    a = eq.assign(scores, capacity, mask=mask, method=method)
    found = {name: getattr(a, name) for name in ("z", "counts", "value", "prices", "gap")}
    # An approximate assignment has no conditional values.
    return found if method == "auction" else {**found, "conditional_values": eq.conditional_values(scores, a)}


def balanced(logits: Tensor, capacity: Any, mask: Tensor | None) -> Arrays:
    b = eq.sinkhorn(logits, capacity, mask=mask)
    return {name: getattr(b, name) for name in ("log_p", "prices", "converged", "iterations")}


def strategy_noise(name: str, shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> Any:
    return eq.STRATEGIES[name].draw_noise(shape, generator=generator, dtype=dtype)


def strategy_draw(name: str, log_p: Tensor, noise: Any, how: dict[str, Any]) -> tuple[Any, Tensor]:
    return eq.STRATEGIES[name].draw(log_p, noise, **how)


def sample_parts(s: Any) -> Arrays:
    return {name: getattr(s, name) for name in ("z", "log_q", "kept", "keep_weight", "counts", "prices", "gap")}


def at_z(s: Any, table: Tensor) -> Tensor:
    """Gathers [n, k] at the sampled experts."""
    return s.at_z(table)


def samplers() -> dict[str, Callable[..., Any]]:
    """Functions of (logits, gumbel [m, n, k], priority [n], pick, temperature, capacity, mask)."""

    def how(temperature: float, capacity: Any, mask: Tensor | None) -> dict[str, Any]:
        return {"temperature": temperature, "capacity": capacity, "mask": mask}

    return {
        "independent": lambda a, g, u, p, t, c, m: eq.sample_independent(a, g[0], temperature=t, mask=m),
        "skip": lambda a, g, u, p, t, c, m: eq.sample_skip(a, g[0], u, **how(t, c, m)),
        "gumbel_matching": lambda a, g, u, p, t, c, m: eq.sample_gumbel_matching(a, g[0], **how(t, c, m)),
        "averaged": lambda a, g, u, p, t, c, m: eq.sample_averaged(a, g, p, **how(t, c, m)),
    }


def importance_weight(log_p: Tensor, s: Any) -> Tensor:
    return eq.importance_weight(log_p, s)


def reinforce(log_p: Tensor, s: Any, losses: Tensor, **how: Any) -> Tensor:
    return eq.reinforce(log_p, s, losses, **how)


def gate(log_p: Tensor, s: Any) -> Tensor:
    return eq.gate(log_p, s)


def gated_loss(log_p: Tensor, s: Any, losses: Tensor, weight: Tensor) -> Tensor:
    return eq.gated_loss(log_p, s, losses, weight=weight)


def rounds(name: str, log_p: Tensor, noises: Sequence[Any], how: dict[str, Any]) -> tuple[Arrays, Tensor]:
    """K experts a row: what was drawn, and its log-probability with gradient."""
    s, weight = eq.sample_rounds(log_p, eq.STRATEGIES[name], noises, **how)
    log_prob = s.log_prob(log_p)
    return {"z": s.z_rounds, "kept": s.kept_rounds, "weight": weight, "log_prob": log_prob}, log_prob


def balance_losses() -> dict[str, Callable[..., Tensor]]:
    """Functions of (logits, mask)."""
    return {
        "load_balance": lambda a, m: eq.load_balance_loss(torch.log_softmax(a, -1), mask=m),
        "marginal_entropy": lambda a, m: eq.marginal_entropy_loss(torch.log_softmax(a, -1), mask=m),
        "z": lambda a, m: eq.z_loss(a, mask=m),
    }


def moving_average(losses: Sequence[Tensor], s: Any, decay: float) -> list[Tensor]:
    """The value of an `EMABaseline` after each of several batches."""
    ema, values = eq.EMABaseline(decay=decay, corrected=False), []
    for batch in losses:
        ema.update(batch, s)
        values.append(ema.value)
    return values


def moe(dim: int, num_experts: int, **options: Any) -> nn.Module:
    if "draws" in options:  # as it was called when the numbers were stored
        options["solves"] = options.pop("draws")
    if options["router"] in eq.STRATEGIES:
        # The defaults when the numbers were stored.
        options = {"loss": "reinforce", "conditional_entropy": 0.0, **options}
        options["upstream"] = options["loss"] != "gating"
    return eq.nn.MoE(dim, num_experts, **options)


def capture(model: nn.Module) -> AbstractContextManager[Any]:
    return eq.nn.capture(model)


def ema_baseline(decay: float) -> Any:
    return eq.EMABaseline(decay=decay, corrected=False)


def ema_value(baseline: Any) -> Tensor:
    return baseline.value


def surrogate(baseline: Any, **options: Any) -> nn.Module:
    weighted = options.pop("weighted", True)  # as it was called when the numbers were stored
    return eq.nn.Surrogate(baseline, weights="all" if weighted else "none", **options)


def routing_parts(routing: Any) -> Arrays:
    names = ("indices", "scores", "weight", "kept", "prices", "gap")
    stats = {f"stats.{name}": value for name, value in routing.stats.to_dict().items() if name != "gap"}
    losses = {f"balance_losses.{name}": value for name, value in routing.balance_losses.items()}
    return {**{name: getattr(routing, name) for name in names}, **stats, **losses}


def update(routings: Any) -> None:
    routings.update()


def stored_name(name: str) -> str:
    """The name that a parameter or buffer had when the numbers were stored."""
    for now, before in STORED_NAMES.items():
        if f".{name}".endswith(f".{now}"):
            return name.removesuffix(now) + before
    return name


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters under the names that they had when the numbers were stored."""
    return {stored_name(name): p for name, p in model.named_parameters()}


def buffers(model: nn.Module) -> Arrays:
    """What changes without gradient, under the names that it had when the numbers were stored."""
    new = {f"{name}.average." for name, m in model.named_modules() if getattr(m, "evaluation", None) == "argmax"}
    kept = {n: b for n, b in model.named_buffers() if not n.startswith(tuple(new)) and not n.endswith(LATER_NAMES)}
    return {stored_name(n): b.clone() for n, b in kept.items()}
