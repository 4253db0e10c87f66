# SPDX-License-Identifier: Apache-2.0
"""One rank of `equipoise bench scale`: measures a layer, its exchange and its assignment, and writes the figures.

Run as `python -m equipoise_lab.bench._scale_rank RANK SIZE FOLDER OPTIONS`.
"""

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import equipoise as eq
from equipoise.assignment._exchange import Meter
from equipoise.assignment._settle import Problem, settle
from equipoise.distributed._ranks import Ranks
from equipoise.distributed._scope import MeshScope
from equipoise.distributed._shared_solvers import RankExchange
from equipoise.ops import draw_gumbel

_TIMEOUT = timedelta(seconds=300)
# Rows of which a twentieth is solved to learn what a contested row costs: enough that a call's own cost vanishes.
_CONTESTED_OF = 1 << 15


def main(rank: int, size: int, folder: Path, options: dict[str, Any]) -> None:
    """Measures on all ranks together, with the options of `ScaleBench`; the slowest rank's time counts."""
    torch.set_num_threads(1)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=_TIMEOUT)
    ranks = Ranks(init_device_mesh("cpu", (size,), mesh_dim_names=("expert",)))
    figures: dict[str, float] = {}
    for kind in (("equal", "gm-iw", "local"), ("uneven", "skip-iw", "local"), ("global", "gm-iw", "global")):
        _measure_layer(*kind, ranks, options, figures)
    _measure_exchange(ranks, options, figures)
    _measure_assignment(ranks, options, figures)
    if rank == 0:
        (folder / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def _measure_layer(
    name: str, router: str, scope: str, ranks: Ranks, options: dict[str, Any], figures: dict[str, float]
) -> None:
    """Times forward and backward of one layer, and counts what it sends."""
    layer, dispatcher = _layer(router, ranks, options, hidden_dim=options["hidden"], scope=scope)
    sent = dispatcher.ranks.sent
    x = _rows(ranks, options).requires_grad_()

    def step() -> None:
        layer(x).sum().backward()

    step()
    for kind in sent.values():
        kind.messages = kind.bytes = 0
    step()
    tokens = sent["tokens"]
    figures[f"{name}/token bytes"] = tokens.bytes
    figures[f"{name}/token messages"] = tokens.messages + sent["counts"].messages
    besides = [sent[kind] for kind in ("sums", "rows", "sizes")]
    figures[f"{name}/solver bytes"] = sum(kind.bytes for kind in besides)
    figures[f"{name}/solver messages"] = sum(kind.messages for kind in besides)
    figures[f"{name}/seconds"] = _best(step, ranks, options["repeats"])


def _measure_exchange(ranks: Ranks, options: dict[str, Any], figures: dict[str, float]) -> None:
    """Times the exchange of one exactly balanced batch with equal splits, and as if nobody had promised them."""
    layer, dispatcher = _layer("gm-iw", ranks, options, hidden_dim=8)
    x = _rows(ranks, options)
    with torch.no_grad():
        routing: Any = layer.router(x)
        groups, _ = dispatcher._local.dispatch(x, routing)

    def exchange(send: Callable[..., Any]) -> None:
        with torch.no_grad():
            send(groups)

    calls: dict[str, Callable[[], object]] = {
        "equal": lambda: exchange(dispatcher._send_equal),
        "uneven": lambda: exchange(dispatcher._send_uneven),
        "agreement": lambda: ranks.gather_numbers([1, 1, 1])(),
    }
    for name, call in calls.items():
        figures[f"exchange/{name}"] = _best(call, ranks, options["repeats"])


def _measure_assignment(ranks: Ranks, options: dict[str, Any], figures: dict[str, float]) -> None:
    """Times the assignment of a rank's own rows and of all rows, and counts contested rows and the value of each."""
    generator = torch.Generator().manual_seed(options["seed"] + ranks.rank)
    n, k = options["rows"], options["experts"]
    popular = torch.randn(k, generator=torch.Generator().manual_seed(options["seed"]))
    own_taste = torch.randn(k, generator=generator)
    noise = torch.randn(n, k, generator=generator) + draw_gumbel([n, k], generator=generator)
    scope = MeshScope(ranks, shared=True)
    for name, scores in (("alike", noise + popular), ("different", noise + own_taste)):
        slots = -(-n * ranks.size // k)
        local, shared = eq.assign(scores), scope.assign(scores, slots)
        free = ranks.all_reduce(scores.amax(1).sum().double())
        total = n * ranks.size
        figures[f"value/{name}/free"] = float(free) / total
        figures[f"value/{name}/local"] = float(ranks.all_reduce(local.value)) / total
        figures[f"value/{name}/global"] = float(shared.value) / total

    scores, repeats = noise + popular, options["repeats"]
    figures["solver/local"] = _best(lambda: eq.assign(scores), ranks, repeats)
    figures["solver/global"] = _best(lambda: scope.assign(scores, slots), ranks, repeats)
    figures["contested/global"] = _contested(ranks, scores, slots)
    figures["solver/contested number"] = _seconds_of_contested(popular, repeats)
    figures["solver/pass number"] = _seconds_of_pass(noise, ranks, repeats)
    small = torch.zeros(k)
    figures["message"] = _best(lambda: RankExchange(ranks).reduce(small), ranks, repeats)


def _contested(ranks: Ranks, scores: torch.Tensor, slots: int) -> float:
    """Counts the rows of all ranks that travel while the assignment of all rows is solved."""
    capacity = torch.full([1, scores.shape[1]], slots)
    meter = Meter()
    settle(Problem(scores.unsqueeze(0), None, capacity, 1), None, RankExchange(ranks), meter)
    return meter.traffic().rows_copied


def _seconds_of_contested(popular: torch.Tensor, repeats: int) -> float:
    """Times the exact solver on the twentieth of rows that is nearest to a tie at the optimal prices, a number."""
    n, k = _CONTESTED_OF, popular.shape[0]
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(n, k, generator=generator) + draw_gumbel([n, k], generator=generator) + popular
    a = eq.assign(scores)
    best = (scores - a.prices).topk(2, dim=-1).values
    contested = (best[:, 0] - best[:, 1]).argsort()[: max(n // 20, 1)]
    room = torch.bincount(a.z[contested], minlength=k)
    part = scores[contested]
    taken = min(_time(lambda: eq.assign(part, room)) for _ in range(repeats + 1))
    return taken / part.numel()


def _seconds_of_pass(scores: torch.Tensor, ranks: Ranks, repeats: int) -> float:
    """Times what a price step does with each number: a softmax and its product with itself."""

    def step() -> None:
        p = torch.softmax(scores, -1)
        _ = p.T @ p

    return _best(step, ranks, repeats) / scores.numel()


def _time(call: Callable[[], object]) -> float:
    """The processor's time of this thread, whatever else the machine does."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def _layer(router: str, ranks: Ranks, options: dict[str, Any], *, hidden_dim: int, scope: str = "local") -> Any:
    """Builds a layer that is spread over the ranks; returns it and its dispatcher."""
    torch.manual_seed(options["seed"])
    layer = eq.nn.MoE(options["dim"], options["experts"], hidden_dim=hidden_dim, router=router, capacity_factor=1.0)
    eq.distributed.parallelize(layer, ranks.mesh, scope=scope)
    return layer, layer.dispatcher


def _rows(ranks: Ranks, options: dict[str, Any]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(options["seed"] + ranks.rank)
    return torch.randn(options["rows"], options["dim"], generator=generator)


def _best(call: Callable[[], object], ranks: Ranks, repeats: int) -> float:
    """The best over repetitions of the time of the slowest rank."""
    best = float("inf")
    for _ in range(repeats + 1):  # the first may compile
        dist.barrier()
        start = time.perf_counter()
        call()
        taken = ranks.all_reduce(torch.tensor(time.perf_counter() - start), "max")
        best = min(best, float(taken))
    return best


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
