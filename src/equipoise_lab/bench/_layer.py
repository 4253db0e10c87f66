# SPDX-License-Identifier: Apache-2.0
"""The layer against a dense one, against itself with other routers, and against its peer: what is measured.

Legend: T tokens, E experts, K experts a token.
"""

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.nn import ROUTERS, MoE, Surrogate, capture, make_router
from equipoise_lab._timing import num_threads, times_of_each
from equipoise_lab.bench._benchmark import Measurement, Records, Step, check_run
from equipoise_lab.bench._layer_models import LayerSize, Model, build_dense, build_moe, build_peer, peer_missing
from equipoise_lab.bench._probes import probe_layer_memory

# The routers that the limits compare, with the capacity factor that each is compared at.
CONTENDERS = {"switch": 1.25, "gm-iw": 1.0, "skip-iw": 1.0}
# The memory of each is held against the dense layer behind it: same kind, same width of what a token passes through.
# The router `dense` passes every token through all experts, and is no sparse layer.
MEMORY = {
    **{name: "dense" for name in ROUTERS if name != "dense"},
    "topk-1": "dense-swiglu",
    "topk-2": "dense-swiglu-2",
}
# In the figures of a comparison, behind the name of a layer: the median over the rounds, beside the best.
MEDIAN = " (median)"
PEER_MODES = ("grouped_mm", "eager", "batched_mm")
# batched_mm gathers the weights of every token's experts; beyond this it is not tried.
_PEER_BYTES = 500_000_000
_DENSE_CAPACITY = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBench:
    """One run of the layer benchmark.

    Attributes:
        size: tokens, dim, hidden_dim and num_experts.
        threads: each of these numbers of threads is measured.
        repeats: rounds, of which the best counts for each layer.
        seed: seed of parameters, tokens and noise.
        top_ks: values of K for the comparison with the peer.
        routers: those whose own share of the layer is measured.
        memory: whether to measure peak memory, in processes of its own.
    """

    size: LayerSize
    threads: tuple[int, ...] = (1, 2)
    repeats: int = 5
    seed: int = 0
    top_ks: tuple[int, ...] = (1, 2)
    routers: tuple[str, ...] = tuple(ROUTERS)
    memory: bool = True

    def __post_init__(self) -> None:
        """Refuses a run that cannot be made."""
        check_run(self)
        if not self.threads or min(self.threads) < 1:
            raise ValueError(f"threads must be numbers of at least 1, got {list(self.threads)}: raise them")


LAYER_RECIPES = {
    "full": LayerBench(size=LayerSize(tokens=8192, dim=512, hidden_dim=2048, num_experts=16)),
    "quick": LayerBench(size=LayerSize(tokens=2048, dim=128, hidden_dim=512, num_experts=16), repeats=3),
}


def layer_steps(bench: LayerBench) -> list[Step]:
    """Lists the measurements of a run, in order."""
    steps: list[Step] = []
    for threads in bench.threads:
        label = f"{threads} thread{'s' if threads > 1 else ''}"
        measures: list[tuple[str, str, Callable[[Records], Measurement]]] = [
            ("contenders", "dense, switch, gm-iw, skip-iw", functools.partial(_contenders, bench, threads))
        ]
        measures += [
            (f"router {name}", f"share of the router {name}", functools.partial(_router_share, bench, threads, name))
            for name in bench.routers
        ]
        measures += [
            (f"peer {k}", f"topk, K = {k}, and transformers", functools.partial(_peers, bench, threads, k))
            for k in bench.top_ks
        ]
        steps += [Step(key=layer_key(threads, what), title=f"{label}: {t}", measure=m) for what, t, m in measures]
    if bench.memory:
        steps += [
            Step(key=f"memory {name}", title=f"memory of {name}", measure=functools.partial(_memory, bench, name))
            for name in dict.fromkeys([*MEMORY.values(), *MEMORY])
        ]
    return steps


def layer_key(threads: int, what: str) -> str:
    """Names the measurement of `what` with a number of threads."""
    return f"{threads} threads/{what}"


def _contenders(bench: LayerBench, threads: int, records: Records) -> Measurement:
    """Times a training step of each contender and of the dense layer, in turns."""
    del records
    x, grad = _batch(bench)
    calls: dict[str, Callable[[], Any]] = {"dense": functools.partial(plain_step, build_dense(bench.size), x, grad)}
    for name, factor in CONTENDERS.items():
        layer = build_moe(bench.size, bench.seed, router=name, capacity_factor=factor)
        calls[name] = functools.partial(training_step, layer, x, grad)
    return Measurement(repeats=bench.repeats, figures=_timed(bench, threads, calls))


def _router_share(bench: LayerBench, threads: int, name: str, records: Records) -> Measurement:
    """Times the router alone, gate included, forward and backward, beside the layer that it is part of."""
    del records
    x, grad = _batch(bench)
    layer = build_moe(bench.size, bench.seed, router=name, capacity_factor=_factor(name))
    # All experts on every token take E times as long: their router is held against a layer of the usual cost.
    whole = build_moe(bench.size, bench.seed, router="switch") if name == "dense" else layer
    calls: dict[str, Callable[[], Any]] = {
        "router": functools.partial(_routing_step, layer, x),
        "layer": functools.partial(training_step, whole, x, grad),
    }
    return Measurement(repeats=bench.repeats, figures=_timed(bench, threads, calls))


def _peers(bench: LayerBench, threads: int, k: int, records: Records) -> Measurement:
    """Times `topk` and the peer's block with the same parameters, in each of its modes that can run."""
    del records
    missing = peer_missing()
    if missing is not None:
        return Measurement(status="not installed", note=missing)
    x, grad = _batch(bench)
    ours = build_moe(bench.size, bench.seed, router="topk", top_k=k, experts="swiglu")
    modes = [mode for mode in PEER_MODES if mode != "batched_mm" or _batched_bytes(bench, k) <= _PEER_BYTES]
    blocks = {mode: build_peer(ours, mode) for mode in modes}
    calls: dict[str, Callable[[], Any]] = {"ours": functools.partial(plain_step, ours, x, grad)}
    calls |= {mode: functools.partial(plain_step, block, x, grad) for mode, block in blocks.items()}
    figures = _timed(bench, threads, calls)
    figures["difference"] = max(_difference(ours, block, x) for block in blocks.values())
    note = "" if len(modes) == len(PEER_MODES) else f"batched_mm would copy {_batched_bytes(bench, k) / 1e9:.0f} GB"
    return Measurement(repeats=bench.repeats, figures=figures, note=note)


def _timed(bench: LayerBench, threads: int, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Times calls in turns: the best of each, which counts, and the median, which tells how quiet the machine was."""
    with num_threads(threads):
        times = times_of_each(calls, bench.repeats)
    best = {name: min(seconds) for name, seconds in times.items()}
    return best | {name + MEDIAN: statistics.median(seconds) for name, seconds in times.items()}


def _memory(bench: LayerBench, name: str, records: Records) -> Measurement:
    del records
    try:
        rise, parameters = probe_layer_memory(name, asdict(bench.size), seed=bench.seed, threads=bench.threads[0])
    except RuntimeError as error:
        return Measurement(status="failed", note=str(error))
    return Measurement(repeats=1, figures={"bytes": rise, "parameters": parameters})


def named_layer(name: str, size: LayerSize, seed: int) -> Model:
    """Builds a layer of the memory measurement: a key or a value of `MEMORY`."""
    if name.startswith("dense"):
        kind, _, width = name.removeprefix("dense").removeprefix("-").partition("-")
        wide = replace(size, hidden_dim=size.hidden_dim * int(width or 1))
        return build_dense(wide, kind=kind or "mlp")
    if name.startswith("topk-"):
        return build_moe(size, seed, router="topk", top_k=int(name.removeprefix("topk-")), experts="swiglu")
    return build_moe(size, seed, router=name, capacity_factor=_factor(name))


def plain_step(layer: Model, x: Float[Tensor, "T dim"], grad: Float[Tensor, "T dim"]) -> None:
    """Forward and backward through the output alone."""
    layer.zero_grad(set_to_none=True)
    x.grad = None
    # A sequence of T tokens, because the peer wants one.
    layer(x.unsqueeze(0)).backward(grad.unsqueeze(0))


def training_step(layer: Model, x: Float[Tensor, "T dim"], grad: Float[Tensor, "T dim"]) -> None:
    """Forward and backward with all that trains the router: score function, weights, balance losses."""
    layer.zero_grad(set_to_none=True)
    x.grad = None
    with capture(layer) as routings:
        y = layer(x)
    Surrogate(0.0)((y * grad).sum(-1), routings).backward()


def _routing_step(layer: MoE, x: Float[Tensor, "T dim"]) -> None:
    layer.router.zero_grad(set_to_none=True)
    x.grad = None
    routing = layer.router(x)
    loss = routing.log_p.mean() + routing.scores.mean() + sum(routing.balance_losses.values())
    loss.backward()


def _difference(ours: MoE, block: Model, x: Float[Tensor, "T dim"]) -> float:
    """The largest difference between our output, with factors that sum to 1 as the peer's do, and the peer's."""
    with torch.no_grad():
        routing = ours.router(x)
        routing = replace(routing, scores=routing.scores / routing.scores.sum(1, keepdim=True))
        groups, metadata = ours.dispatcher.dispatch(x, routing)
        theirs = block(x.unsqueeze(0)).squeeze(0)
        return float((ours.dispatcher.combine(ours.experts(groups), metadata) - theirs).abs().max())


def _factor(name: str) -> float:
    return CONTENDERS.get(name, 1.0 if make_router(name, 1, 1).traits.holds_all else _DENSE_CAPACITY)


def _batched_bytes(bench: LayerBench, k: int) -> int:
    return math.prod((bench.size.tokens, k, 3, bench.size.hidden_dim, bench.size.dim, 4))


def _batch(bench: LayerBench) -> tuple[Float[Tensor, "T dim"], Float[Tensor, "T dim"]]:
    """The tokens and the gradient of the output."""
    generator = torch.Generator().manual_seed(bench.seed)
    x, grad = (torch.randn(bench.size.tokens, bench.size.dim, generator=generator) for _ in range(2))
    return x.requires_grad_(), grad
