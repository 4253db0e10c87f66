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
from equipoise.assignment._price_steps import rank_offers
from equipoise.assignment._settle import Problem, settle
from equipoise.distributed._ranks import Ranks
from equipoise.distributed._scope import MeshScope
from equipoise.distributed._shared_solvers import RankExchange
from equipoise.ops import draw_gumbel

_TIMEOUT = timedelta(seconds=300)
# Router and scope of the layers that are measured.
_LAYERS = {"equal": ("gm-iw", "local"), "uneven": ("skip-iw", "local"), "global": ("gm-iw", "global")}
# Rows of which a twentieth is solved to learn what a gathered row costs: enough that a call's own cost vanishes.
_CONTESTED_OF = 1 << 15


def main(rank: int, size: int, folder: Path, options: dict[str, Any]) -> None:
    """Measures on all ranks together, with the options of `ScaleBench`; the slowest rank's time counts."""
    torch.set_num_threads(1)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=_TIMEOUT)
    ranks = Ranks(init_device_mesh("cpu", (size,), mesh_dim_names=("expert",)))
    figures: dict[str, float] = {}
    for name, (router, scope) in _LAYERS.items():
        figures |= {f"{name}/{what}": figure for what, figure in _measure_layer(router, scope, ranks, options).items()}
    figures |= _measure_exchange(ranks, options) | _measure_assignment(ranks, options)
    if rank == 0:
        (folder / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def _measure_layer(router: str, scope: str, ranks: Ranks, options: dict[str, Any]) -> dict[str, float]:
    """Times forward and backward of one layer, and counts what it sends."""
    layer, x = _layer_and_rows(router, ranks, options, hidden_dim=options["hidden"], scope=scope)
    x.requires_grad_()
    sent = layer.dispatcher.ranks.sent

    def step() -> None:
        layer(x).sum().backward()

    step()
    for kind in sent.values():
        kind.messages = kind.bytes = 0
    step()
    besides = [sent[kind] for kind in ("sums", "rows", "sizes")]
    return {
        "token bytes": sent["tokens"].bytes,
        "token messages": sent["tokens"].messages + sent["counts"].messages,
        "solver bytes": sum(kind.bytes for kind in besides),
        "solver messages": sum(kind.messages for kind in besides),
        "seconds": _best(step, ranks, options["repeats"]),
    }


@torch.no_grad()
def _measure_exchange(ranks: Ranks, options: dict[str, Any]) -> dict[str, float]:
    """Times the exchange of one exactly balanced batch with equal splits, and as if nobody had promised them."""
    layer, x = _layer_and_rows("gm-iw", ranks, options, hidden_dim=8)
    dispatcher = layer.dispatcher
    groups, _ = dispatcher._local.dispatch(x, layer.router(x))
    calls: dict[str, Callable[[], object]] = {
        "equal": lambda: dispatcher._send_equal(groups),
        "uneven": lambda: dispatcher._send_uneven(groups),
        "agreement": lambda: ranks.gather_numbers([1, 1, 1])(),
    }
    return {f"exchange/{name}": _best(call, ranks, options["repeats"]) for name, call in calls.items()}


def _measure_assignment(ranks: Ranks, options: dict[str, Any]) -> dict[str, float]:
    """Times the assignment of own rows and of all rows, and counts rows that were gathered and the value of each."""
    generator = torch.Generator().manual_seed(options["seed"] + ranks.rank)
    n, k, repeats = options["rows"], options["experts"], options["repeats"]
    total, slots = n * ranks.size, -(-n * ranks.size // k)
    popular = torch.randn(k, generator=torch.Generator().manual_seed(options["seed"]))
    own_taste = torch.randn(k, generator=generator)
    noise = torch.randn(n, k, generator=generator) + draw_gumbel([n, k], generator=generator)
    scope = MeshScope(ranks, shared=True)
    figures: dict[str, float] = {}
    for name, scores in (("alike", noise + popular), ("different", noise + own_taste)):
        free, local = scores.amax(1).sum().double(), eq.assign(scores).value
        figures[f"value/{name}/free"] = float(ranks.all_reduce(free)) / total
        figures[f"value/{name}/local"] = float(ranks.all_reduce(local)) / total
        figures[f"value/{name}/global"] = float(scope.assign(scores, slots).value) / total

    def price_step() -> None:
        """What a price step does with each number: it finds the best two offers."""
        _ = rank_offers(scores.unsqueeze(0), mask, small.unsqueeze(0), 1)

    scores, small, meter, mask = noise + popular, torch.zeros(k), Meter(), torch.ones(1, n, dtype=torch.bool)
    figures["solver/local"] = _best(lambda: eq.assign(scores), ranks, repeats)
    figures["solver/global"] = _best(lambda: scope.assign(scores, slots), ranks, repeats)
    settle(Problem(scores.unsqueeze(0), None, torch.full([1, k], slots), 1), None, RankExchange(ranks), meter)
    figures["gathered/global"] = meter.traffic().rows_copied  # of all ranks, while all rows are assigned
    figures["solver/gathered number"] = _seconds_of_gathered(popular, repeats)
    figures["solver/pass number"] = _best(price_step, ranks, repeats) / noise.numel()
    figures["message"] = _best(lambda: RankExchange(ranks).reduce(small), ranks, repeats)
    return figures


def _seconds_of_gathered(popular: torch.Tensor, repeats: int) -> float:
    """Times the exact solver on the twentieth of rows that is nearest to a tie at the optimal prices, a number."""
    n, k = _CONTESTED_OF, popular.shape[0]
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(n, k, generator=generator) + draw_gumbel([n, k], generator=generator) + popular
    a = eq.assign(scores)
    best = (scores - a.prices).topk(2, dim=-1).values
    contested = (best[:, 0] - best[:, 1]).argsort()[: max(n // 20, 1)]
    room, part = torch.bincount(a.z[contested], minlength=k), scores[contested]
    taken: list[float] = []
    for _ in range(repeats + 1):
        start = time.thread_time()  # of the processor for this thread, whatever else the machine does
        eq.assign(part, room)
        taken.append(time.thread_time() - start)
    return min(taken) / part.numel()


def _layer_and_rows(
    router: str, ranks: Ranks, options: dict[str, Any], *, hidden_dim: int, scope: str = "local"
) -> tuple[Any, torch.Tensor]:
    """Builds a layer that is spread over the ranks, and draws the rows of this one."""
    torch.manual_seed(options["seed"])
    layer = eq.nn.MoE(options["dim"], options["experts"], hidden_dim=hidden_dim, router=router, capacity_factor=1.0)
    eq.distributed.parallelize(layer, ranks.mesh, scope=scope)
    generator = torch.Generator().manual_seed(options["seed"] + ranks.rank)
    return layer, torch.randn(options["rows"], options["dim"], generator=generator)


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
