# SPDX-License-Identifier: Apache-2.0
"""The cases: fixed problems, fixed seeds, every strategy and every router, in two precisions.

Legend: n rows, k experts, m draws. Layers get 24 tokens [2, 12] of 8 features, and have 4 experts.
"""

import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import golden_api as api
import numpy as np
import torch
from torch import Tensor, nn

Case = tuple[str, Callable[[], api.Arrays]]

DTYPES = {"float64": torch.float64, "float32": torch.float32}
N, K = 12, 4
SLACK = math.ceil(1.25 * N / K)
DIM, HIDDEN, EXPERTS, SHAPE = 8, 2, 4, (2, 12)


def numbers(name: str, *shape: int, dtype: torch.dtype) -> Tensor:
    """Draws standard normal numbers, in float64, from a seed that is a checksum of the name."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    return torch.from_numpy(drawn).to(dtype)


def uniform(name: str, *shape: int, dtype: torch.dtype) -> Tensor:
    drawn = np.random.default_rng(zlib.crc32(name.encode())).random(shape, dtype=np.float32)
    return torch.from_numpy(drawn).to(dtype)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def row_mask() -> Tensor:
    mask = torch.ones(N, dtype=torch.bool)
    mask[[1, 6, 11]] = False
    return mask


def logits_of(dtype: torch.dtype) -> Tensor:
    """Logits with one popular expert, so that capacities bind."""
    return numbers("logits", N, K, dtype=dtype) + torch.tensor([1.0, 0.0, 0.0, -0.5], dtype=dtype)


def with_gradient(loss: Tensor, leaf: Tensor, name: str) -> api.Arrays:
    (gradient,) = torch.autograd.grad(loss.sum(), leaf, retain_graph=True)
    return {name: loss, f"{name}.gradient": gradient}


# --- without layers ---------------------------------------------------------------------------------------------------


def settings() -> Iterator[tuple[str, dict[str, Any]]]:
    """Eight combinations of five settings in which every pair of values of every two settings occurs."""
    for number in range(8):
        a, b, c = number & 1, number >> 1 & 1, number >> 2 & 1
        how = {
            "temperature": 0.5 if a else 1.0,
            "capacity": SLACK if b else None,
            "sinkhorn_first": bool(c),
            "importance": not a ^ b,
            "mask": row_mask() if a ^ c else None,
        }
        shown = {**how, "mask": how["mask"] is not None}
        yield ",".join(f"{name}={value}" for name, value in shown.items()), how


def strategy_case(name: str, how: dict[str, Any], dtype: torch.dtype) -> api.Arrays:
    logits = logits_of(dtype).requires_grad_()
    log_p = torch.log_softmax(logits, -1)
    noise = api.strategy_noise(name, [N, K], generator(1), dtype)
    s, weight = api.strategy_draw(name, log_p, noise, how)
    losses = api.at_z(s, numbers("losses", N, K, dtype=dtype).square())
    gated = (api.gate(log_p, s) * losses - 0.5).square()
    critic = numbers("critic", N, K, dtype=dtype)
    return {
        **api.sample_parts(s),
        "weight": weight,
        "importance_weight": api.importance_weight(log_p, s),
        **with_gradient(api.reinforce(log_p, s, losses, baseline=0.7, weight=weight), logits, "reinforce"),
        **with_gradient(api.reinforce(log_p, s, losses, weight=weight, critic=critic), logits, "critic"),
        **with_gradient(api.gated_loss(log_p, s, gated, weight), logits, "gated_loss"),
    }


def rounds_case(name: str, draws: int, how: dict[str, Any], dtype: torch.dtype) -> api.Arrays:
    logits = logits_of(dtype).requires_grad_()
    stream = generator(2)
    noises = [api.strategy_noise(name, [N, K], stream, dtype) for _ in range(draws)]
    parts, log_prob = api.rounds(name, torch.log_softmax(logits, -1), noises, how)
    return {**parts, **with_gradient(parts["weight"] * log_prob, logits, "score")}


def sampler_case(name: str, temperature: float, capacity: Any, mask: Tensor | None, dtype: torch.dtype) -> api.Arrays:
    stream = generator(3)
    noise = api.gumbel([3, N, K], stream, dtype), uniform("priority", N, dtype=dtype), uniform("pick", dtype=dtype)
    s = api.samplers()[name](logits_of(dtype), *noise, temperature, capacity, mask)
    losses = [api.at_z(s, numbers(f"losses {t}", N, K, dtype=dtype)) for t in range(3)]
    averages = {f"average.{t}": value for t, value in enumerate(api.moving_average(losses, s, 0.9))}
    return {"gumbel": noise[0], **api.sample_parts(s), **averages}


def balance_case(capacity: Any, mask: Tensor | None, dtype: torch.dtype) -> api.Arrays:
    logits = logits_of(dtype).requires_grad_()
    found = api.balanced(logits, capacity, mask)
    if mask is not None:
        found["log_p"] = found["log_p"] * mask.unsqueeze(-1)
    found.update(with_gradient(found["log_p"] * numbers("direction", N, K, dtype=dtype), logits, "sinkhorn"))
    del found["sinkhorn"]
    for name, loss in api.balance_losses().items():
        found.update(with_gradient(loss(logits, mask), logits, name))
    return found


def plain_cases(dtype: torch.dtype) -> Iterator[Case]:
    for name in api.strategy_names():
        for shown, how in settings():
            yield f"strategy/{name}/{shown}", lambda n=name, h=how: strategy_case(n, h, dtype)
        for draws, number in ((2, 0), (2, 5), (3, 2)):
            shown, how = list(settings())[number]
            yield f"rounds/{name}/K={draws},{shown}", lambda n=name, d=draws, h=how: rounds_case(n, d, h, dtype)
    masked = row_mask()
    for name in api.samplers():
        for t, c, m in ((1.0, None, None), (0.5, SLACK, masked), (0.0, None, masked)):
            shown = f"temperature={t},capacity={c},mask={m is not None}"
            yield f"sampler/{name}/{shown}", lambda n=name, t=t, c=c, m=m: sampler_case(n, t, c, m, dtype)
    for c, m in ((None, None), (SLACK, masked), ([2, 6, 3, 4], None)):
        shown = f"capacity={c},mask={m is not None}"
        for method in ("auto", "cycle-cancelling", "auction"):
            yield (
                f"assign/{method}/{shown}",
                lambda c=c, m=m, method=method: api.assignment(logits_of(dtype), c, m, method),
            )
        yield f"balance/{shown}", lambda c=c, m=m: balance_case(c, m, dtype)


# --- layers -----------------------------------------------------------------------------------------------------------


def filled(model: nn.Module) -> nn.Module:
    """Gives every parameter fixed numbers, by its name."""
    with torch.no_grad():
        for name, parameter in api.parameters(model).items():
            parameter.copy_(0.5 * numbers(name, *parameter.shape, dtype=torch.float64))
    return model


def gradients(model: nn.Module) -> api.Arrays:
    return {f"gradient.{name}": p.grad for name, p in api.parameters(model).items() if p.grad is not None}


def token_losses(y: Tensor, step: int) -> Tensor:
    return (y - numbers(f"target {step}", *SHAPE, DIM, dtype=y.dtype)).square().mean(-1)


def layer_case(options: dict[str, Any], dtype: torch.dtype, masked: bool = False) -> api.Arrays:
    """Two training steps without a change of parameters, each with an update; then evaluation."""
    layer = filled(api.moe(DIM, EXPERTS, hidden_dim=HIDDEN, dtype=dtype, **options))
    baseline = api.ema_baseline(0.9)
    surrogate, found = api.surrogate(baseline), api.Arrays()
    mask = torch.arange(24).reshape(SHAPE) % 7 != 3 if masked else None
    ids = torch.arange(24).reshape(SHAPE) * 31 % 17
    torch.manual_seed(4)
    for step in range(2):
        layer.zero_grad()
        x = numbers(f"x {step}", *SHAPE, DIM, dtype=dtype)
        with api.capture(layer) as routings:
            y = layer(x, mask=mask, token_ids=ids)
        loss = surrogate(token_losses(x + y, step), routings)
        loss.backward()
        found[f"loss.{step}"] = loss
        if step == 1:  # the baseline is 0 in the first step
            parts = {**api.routing_parts(routings[0]), "y": y, **gradients(layer)}
            found.update({f"train.{name}": value for name, value in parts.items()})
        api.update(routings)
    found["baseline"] = api.ema_value(baseline)
    found.update({f"state.{name}": value for name, value in api.buffers(layer).items()})
    layer.eval()
    with torch.no_grad(), api.capture(layer) as routings:
        y = layer(numbers("x 2", *SHAPE, DIM, dtype=dtype), mask=mask, token_ids=ids)
    found.update({f"eval.{name}": value for name, value in {**api.routing_parts(routings[0]), "y": y}.items()})
    return found


class TwoLayers(nn.Module):
    """Two residual layers, with a causal mean over positions between them, so that tokens see those before them."""

    def __init__(self, routers: tuple[str, str], dtype: torch.dtype) -> None:
        super().__init__()
        how: dict[str, Any] = {"hidden_dim": HIDDEN, "dtype": dtype}
        self.first, self.second = (api.moe(DIM, EXPERTS, router=router, **how) for router in routers)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.first(x)
        h = h.cumsum(-2) / torch.arange(1, h.shape[-2] + 1, dtype=h.dtype).unsqueeze(-1)
        return h + self.second(h)


def model_case(routers: tuple[str, str], how: dict[str, Any], dtype: torch.dtype) -> api.Arrays:
    """Two steps of gradient descent; what is stored after the second depends on all that the first did."""
    model = filled(TwoLayers(routers, dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    baseline = api.ema_baseline(0.9)
    surrogate, found = api.surrogate(baseline, **how), api.Arrays()
    torch.manual_seed(5)
    for step in range(2):
        optimizer.zero_grad()
        with api.capture(model) as routings:
            y = model(numbers(f"x {step}", *SHAPE, DIM, dtype=dtype))
        loss = surrogate(token_losses(y, step), routings)
        loss.backward()
        found[f"loss.{step}"] = loss
        for layer, routing in enumerate(routings):
            parts = api.routing_parts(routing)
            found.update({f"{name}.{step}.{layer}": parts[name] for name in ("indices", "weight")})
        optimizer.step()
        api.update(routings)
    found.update({"y": y, "baseline": api.ema_value(baseline), **gradients(model)})
    found.update({f"state.{name}": value for name, value in api.buffers(model).items()})
    return found


def layer_cases(dtype: torch.dtype) -> Iterator[Case]:
    def case(name: str, masked: bool = False, **options: Any) -> Case:
        shown = ",".join([*(f"{option}={value}" for option, value in options.items()), *(["masked"] * masked)])
        return f"router/{name}/{shown}", lambda: layer_case({"router": name, **options}, dtype, masked)

    for name in api.router_names():
        yield case(name, top_k=1, evaluation="argmax")
        priced = {"evaluation": "priced"} if api.can_be_priced(name) else {}
        if api.router_takes(name, "top_k"):
            yield case(name, top_k=2, **priced)
        elif priced:
            yield case(name, masked=True, **priced)
        if api.router_takes(name, "loss"):
            yield case(name, loss="gating", capacity_factor=1.0, **priced)
    yield case("gm-iw-mix", True, top_k=2, loss="gating", temperature=0.5, eps=0.1, sinkhorn_first=True)
    yield case("skip-iw", True, top_k=2, importance=False, capacity_factor=1.0, eval_capacity_factor=1.0)
    yield case("gm-iw-avg-mix", True, temperature="auto", eps="auto", draws=3, z_loss=0.01, balance_loss=0.1)
    yield case("switch", True, experts="swiglu", eval_capacity_factor=1.0)
    for number, credit in enumerate(("token", "sequence", "batch")):
        for routers in (("skip-iw", "gm-iw"), ("sample", "topk")):
            how = {"credit": credit, "weighted": number != 2}
            shown = f"{'+'.join(routers)}/credit={credit},weighted={number != 2}"
            yield f"model/{shown}", lambda r=routers, h=how: model_case(r, h, dtype)


def all_cases() -> Iterator[Case]:
    for name, dtype in DTYPES.items():
        for cases in (plain_cases(dtype), layer_cases(dtype)):
            yield from ((f"{name}/{case}", compute) for case, compute in cases)
