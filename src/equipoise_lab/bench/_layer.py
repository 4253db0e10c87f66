# SPDX-License-Identifier: Apache-2.0
"""The layer against a dense one, against itself with other routers, and against its peer: what is measured.

Legend: T tokens, E experts, K experts a token.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from equipoise.nn import ROUTERS
from equipoise_lab._timing import best_in_turns, num_threads
from equipoise_lab.bench._benchmark import Measurement, Step, check_run, need
from equipoise_lab.bench._layer_models import (
    CONTENDERS,
    MEMORY,
    LayerSize,
    build_dense,
    build_gated,
    build_moe,
    build_peer,
    difference,
    plain_step,
    routing_step,
    training_step,
)
from equipoise_lab.bench._probes import probe_layer_memory

# In the figures of a comparison, behind the name of a layer: the median over the rounds, beside the best.
MEDIAN = " (median)"
PEER_MODES = ("grouped_mm", "eager", "batched_mm")
# batched_mm gathers the weights of every token's experts; beyond this it is not tried.
_PEER_BYTES = 500_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBench:
    """One run of the layer benchmark."""

    size: LayerSize
    threads: tuple[int, ...] = (1, 2)  # each of these numbers of threads is measured
    repeats: int = 5  # rounds, of which the best counts for each layer
    seed: int = 0  # of parameters, tokens and noise
    top_ks: tuple[int, ...] = (1, 2)  # values of K for the comparison with the peer
    routers: tuple[str, ...] = tuple(ROUTERS)  # those whose own share of the layer is measured
    memory: bool = True  # whether to measure peak memory, in processes of its own

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
        measures = {"contenders": ("dense, switch, gm-iw, skip-iw", partial(_contenders, bench, threads))}
        for name in bench.routers:
            share = partial(_router_share, bench, threads, name)
            measures[f"router {name}"] = (f"share of the router {name}", share)
        for k in bench.top_ks:
            measures[f"peer {k}"] = (f"topk, K = {k}, and transformers", partial(_peers, bench, threads, k))
        label = f"{threads} thread{'s' if threads > 1 else ''}"
        steps += [Step(layer_key(threads, what), f"{label}: {t}", m) for what, (t, m) in measures.items()]
    if bench.memory:
        names = dict.fromkeys([*MEMORY.values(), *MEMORY])
        steps += [Step(f"memory {name}", f"memory of {name}", partial(_memory, bench, name)) for name in names]
    return steps


def layer_key(threads: int, what: str) -> str:
    """Names the measurement of `what` with a number of threads."""
    return f"{threads} threads/{what}"


def _contenders(bench: LayerBench, threads: int) -> Measurement:
    """Times a training step of each contender and of the dense layer, in turns."""
    x, grad = _batch(bench)
    calls = {"dense": partial(plain_step, build_dense(bench.size), x, grad)}
    for name in CONTENDERS:
        calls[name] = partial(training_step, build_moe(bench.size, bench.seed, router=name), x, grad)
    return Measurement(repeats=bench.repeats, figures=_timed(bench, threads, calls))


def _router_share(bench: LayerBench, threads: int, name: str) -> Measurement:
    """Times the router alone, gate included, forward and backward, beside the layer that it is part of."""
    x, grad = _batch(bench)
    layer = build_moe(bench.size, bench.seed, router=name)
    # All experts on every token take E times as long: their router is held against a layer of the usual cost.
    whole = build_moe(bench.size, bench.seed, router="switch") if name == "dense" else layer
    calls = {"router": partial(routing_step, layer, x), "layer": partial(training_step, whole, x, grad)}
    return Measurement(repeats=bench.repeats, figures=_timed(bench, threads, calls))


def _peers(bench: LayerBench, threads: int, k: int) -> Measurement:
    """Times `topk` and the peer's block with the same parameters, in each of its modes that can run."""
    need("transformers", "transformers")
    x, grad = _batch(bench)
    ours = build_gated(bench.size, bench.seed, k)
    copied = math.prod((bench.size.tokens, k, 3, bench.size.hidden_dim, bench.size.dim, 4))
    blocks = {m: build_peer(ours, m) for m in PEER_MODES if m != "batched_mm" or copied <= _PEER_BYTES}
    calls = {name: partial(plain_step, layer, x, grad) for name, layer in {"ours": ours, **blocks}.items()}
    figures = _timed(bench, threads, calls)
    figures["difference"] = max(difference(ours, block, x) for block in blocks.values())
    note = "" if len(blocks) == len(PEER_MODES) else f"batched_mm would copy {copied / 1e9:.0f} GB"
    return Measurement(repeats=bench.repeats, figures=figures, note=note)


def _timed(bench: LayerBench, threads: int, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Times calls in turns: the best of each, which counts, and the median, which tells how quiet the machine was."""
    with num_threads(threads):
        timings = best_in_turns(calls, bench.repeats)
    best = {name: timing.seconds for name, timing in timings.items()}
    return best | {name + MEDIAN: statistics.median(timing.times) for name, timing in timings.items()}


def _memory(bench: LayerBench, name: str) -> Measurement:
    rise, parameters = probe_layer_memory(name, asdict(bench.size), seed=bench.seed, threads=bench.threads[0])
    return Measurement(repeats=1, figures={"bytes": rise, "parameters": parameters})


def _batch(bench: LayerBench) -> tuple[Float[Tensor, "T dim"], Float[Tensor, "T dim"]]:
    """The tokens and the gradient of the output."""
    generator = torch.Generator().manual_seed(bench.seed)
    x, grad = (torch.randn(bench.size.tokens, bench.size.dim, generator=generator) for _ in range(2))
    return x.requires_grad_(), grad
