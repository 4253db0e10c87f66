# SPDX-License-Identifier: Apache-2.0
"""The layer against a dense one, against itself with other routers, and against its peer.

Legend: T tokens, E experts, K experts a token.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text
from torch import Tensor

from equipoise.nn import ROUTERS
from equipoise_lab._style import INK, new_figure, row
from equipoise_lab._tables import format_seconds, name_threads, new_table
from equipoise_lab._timing import best_in_turns
from equipoise_lab.bench import _layer_models as models
from equipoise_lab.bench._benchmark import Benchmark, Measurement, Records, Report, Step, check_run, need
from equipoise_lab.bench._layer_models import CONTENDERS, MEMORY, LayerSize
from equipoise_lab.bench._probes import LAYER_MEMORY, ask
from equipoise_lab.bench._verdicts import Verdict, judge, limit_table, ratio, ratio_text, record_of, worst_of

# The size that limits are stated for, and the limits.
LIMIT_SIZE = LayerSize(tokens=8192, dim=512, hidden_dim=2048, num_experts=16)
LIMITS = {"times_switch": 1.05, "router_share": 0.08, "times_transformers": 1.0}
MEMORY_LIMIT = 1.6
_OURS = tuple(name for name in CONTENDERS if name != "switch")
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


def layer_steps(bench: LayerBench) -> list[Step]:
    """Lists the measurements of a run, in order."""
    steps: list[Step] = []
    for threads in bench.threads:
        measures = {"contenders": ("dense, switch, gm-iw, skip-iw", partial(_contenders, bench, threads))}
        for name in bench.routers:
            measures[f"router {name}"] = f"share of the router {name}", partial(_router_share, bench, threads, name)
        for k in bench.top_ks:
            measures[f"peer {k}"] = f"topk, K = {k}, and transformers", partial(_peers, bench, threads, k)
        label = f"{threads} thread{'s' if threads > 1 else ''}"
        steps += [Step(f"{threads} threads/{what}", f"{label}: {t}", m) for what, (t, m) in measures.items()]
    names = dict.fromkeys([*MEMORY.values(), *MEMORY]) if bench.memory else ()
    return steps + [Step(f"memory {name}", f"memory of {name}", partial(_memory, bench, name)) for name in names]


def _contenders(bench: LayerBench, threads: int) -> Measurement:
    """Times a training step of each contender and of the dense layer, in turns."""
    x, grad = _batch(bench)
    calls = {"dense": partial(models.plain_step, models.named_layer("dense", bench.size, bench.seed), x, grad)}
    for name in CONTENDERS:
        calls[name] = partial(models.training_step, models.build_moe(bench.size, bench.seed, router=name), x, grad)
    return Measurement(repeats=bench.repeats, figures=_timed(bench, threads, calls))


def _router_share(bench: LayerBench, threads: int, name: str) -> Measurement:
    """Times the router alone, gate included, forward and backward, beside the layer that it is part of."""
    x, grad = _batch(bench)
    layer = models.build_moe(bench.size, bench.seed, router=name)
    # All experts on every token take E times as long: their router is held against a layer of the usual cost.
    whole = models.build_moe(bench.size, bench.seed, router="switch") if name == "dense" else layer
    calls = {"router": partial(models.routing_step, layer, x), "layer": partial(models.training_step, whole, x, grad)}
    return Measurement(repeats=bench.repeats, figures=_timed(bench, threads, calls))


def _peers(bench: LayerBench, threads: int, k: int) -> Measurement:
    """Times `topk` and the peer's block with the same parameters, in each of its modes that can run."""
    need("transformers", "transformers")
    x, grad = _batch(bench)
    ours = models.named_layer(f"topk-{k}", bench.size, bench.seed)
    copied = math.prod((bench.size.tokens, k, 3, bench.size.hidden_dim, bench.size.dim, 4))
    blocks = {m: models.build_peer(ours, m) for m in PEER_MODES if m != "batched_mm" or copied <= _PEER_BYTES}
    calls = {name: partial(models.plain_step, layer, x, grad) for name, layer in {"ours": ours, **blocks}.items()}
    figures = _timed(bench, threads, calls)
    figures["difference"] = max(models.difference(ours, block, x) for block in blocks.values())
    note = "" if len(blocks) == len(PEER_MODES) else f"batched_mm would copy {copied / 1e9:.0f} GB"
    return Measurement(repeats=bench.repeats, figures=figures, note=note)


def _timed(bench: LayerBench, threads: int, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Times calls in turns: the best of each, which counts, and the median, which tells how quiet the machine was."""
    timings = best_in_turns(calls, bench.repeats, threads=threads)
    best = {name: timing.seconds for name, timing in timings.items()}
    return best | {name + MEDIAN: statistics.median(timing.times) for name, timing in timings.items()}


def _memory(bench: LayerBench, name: str) -> Measurement:
    options = (name, json.dumps(asdict(bench.size)), str(bench.seed))
    rise, parameters = map(float, ask(LAYER_MEMORY, *options, threads=bench.threads[0]))
    return Measurement(repeats=1, figures={"bytes": rise, "parameters": parameters})


def _batch(bench: LayerBench) -> tuple[Float[Tensor, "T dim"], Float[Tensor, "T dim"]]:
    """The tokens and the gradient of the output."""
    generator = torch.Generator().manual_seed(bench.seed)
    x, grad = (torch.randn(bench.size.tokens, bench.size.dim, generator=generator) for _ in range(2))
    return x.requires_grad_(), grad


def layer_ratios(bench: LayerBench, records: Records, threads: int) -> dict[str, dict[str, float | None]]:
    """What is compared with a number of threads: of the best times and, under names with "median_", of the medians.

    Returns:
        "times_switch": a training step of a layer ("dense", "gm-iw", "skip-iw") divided by one of `switch`;
        "router_share": the time of a router, forward and backward, divided by that of its layer;
        "times_transformers": our time with `topk`, by K, divided by the peer's in the fastest of its modes.
    """
    ratios: dict[str, dict[str, float | None]] = {}
    for prefix, median in (("", False), ("median_", True)):
        of = partial(_figures, records, threads, median=median)
        ratios |= {
            f"{prefix}times_switch": {n: _times(of("contenders"), n, ["switch"]) for n in ("dense", *_OURS)},
            f"{prefix}router_share": {n: _times(of(f"router {n}"), "router", ["layer"]) for n in bench.routers},
            f"{prefix}times_transformers": {str(k): _times(of(f"peer {k}"), "ours", PEER_MODES) for k in bench.top_ks},
        }
    return ratios


def _figures(records: Records, threads: int, what: str, *, median: bool = False) -> dict[str, float]:
    """The figures of a measurement: the best times and whatever else there is, or the medians under the same names."""
    found = record_of(records, f"{threads} threads/{what}").measured
    return {name.removesuffix(MEDIAN): x for name, x in found.items() if name.endswith(MEDIAN) == median}


def _times(figures: Mapping[str, float], ours: str, others: Sequence[str]) -> float | None:
    return ratio(figures.get(ours), min((figures[name] for name in others if name in figures), default=None))


def times_dense_memory(records: Records, name: str, *, parameters: bool = False) -> float | None:
    """The rise of the peak in a training step of a layer, divided by that of the dense layer of the same size.

    The parameters count on request only: the sparse layer has E times as many, so they blur the view.
    """
    found = [record_of(records, f"memory {which}").measured for which in (name, MEMORY[name])]
    if not all(found):
        return None
    ours, dense = (figures["bytes"] + (figures["parameters"] if parameters else 0.0) for figures in found)
    return ratio(ours, dense)


def layer_verdicts(bench: LayerBench, records: Records) -> list[Verdict]:
    """Holds every figure of a run against its limit; judged at the size that the limits are stated for.

    Returns:
        One verdict for each limit and number of threads; for the routers' share, of the router with the largest.
    """
    found: list[Verdict] = []
    for threads in bench.threads:
        ratios = layer_ratios(bench, records, threads)
        held: list[tuple[str, str, str, str]] = []
        for name in _OURS:
            title = f"{name} at capacity factor {CONTENDERS[name]:g}, times switch at {CONTENDERS['switch']:g}"
            held.append((title, "times_switch", name, ""))
        worst, _ = worst_of(ratios["router_share"])
        title = "largest share of a router in its layer" + (f" ({worst})" if worst else "")
        held.append((title, "router_share", worst, ""))
        for k in bench.top_ks:
            title = f"topk with K = {k}, times transformers in its fastest mode"
            held.append((title, "times_transformers", str(k), record_of(records, f"{threads} threads/peer {k}").note))
        for title, kind, name, note in held:
            middle = ratios[f"median_{kind}"].get(name)
            notes = "; ".join(filter(None, [note, "" if middle is None else f"median {middle:.3g}"]))
            title = f"{name_threads(threads)}: {title}"
            found.append(Verdict("layer", title, ratios[kind].get(name), LIMITS[kind], note=notes))
    for name in MEMORY if bench.memory else ():
        title = f"peak memory of a step, {name}, times the dense layer"
        found.append(Verdict("layer", title, times_dense_memory(records, name), MEMORY_LIMIT))
    return judge(found, when=bench.size == LIMIT_SIZE)


def _report(bench: LayerBench, records: Records) -> Report:
    verdicts = layer_verdicts(bench, records)
    ratios = {threads: layer_ratios(bench, records, threads) for threads in bench.threads}
    memory, whole = ({n: times_dense_memory(records, n, parameters=p) for n in MEMORY} for p in (False, True))
    summary = {
        "ratios": [{"threads": threads, **found} for threads, found in ratios.items()],
        "times_dense_memory": memory,
        "times_dense_memory_with_parameters": whole,
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    tables = _time_tables(bench, records, ratios)
    tables += [_memory_table(records, memory, whole)] if bench.memory else []
    tables += [limit_table(verdicts, title="Limits, for the best of the rounds", notes=True)]
    return Report(summary=summary, tables=tables, figure=_draw(bench, records))


def _time_tables(
    bench: LayerBench, records: Records, ratios: Mapping[int, Mapping[str, Mapping[str, float | None]]]
) -> list[Table]:
    """Layers, routers, peers."""
    size = bench.size
    layers = new_table(
        f"Forward and backward, {size.tokens:,} tokens, dim {size.dim}, hidden {size.hidden_dim:,}, "
        f"{size.num_experts} experts, float32, best of {bench.repeats}",
        ["threads"],
        ["dense", *(f"{n}\nfactor {c:g}" for n, c in CONTENDERS.items()), *(f"{n}\n/ switch" for n in _OURS)],
    )
    peers = new_table(
        "topk with gated experts against MixtralSparseMoeBlock of Hugging Face transformers, same parameters",
        ["threads"],
        ["K", "ours", *PEER_MODES, "ours /\nfastest", "largest\ndifference"],
    )
    for threads, found in ratios.items():
        figures = _figures(records, threads, "contenders")
        times = [format_seconds(figures.get(name)) for name in ("dense", *CONTENDERS)]
        shares = [ratio_text(found["times_switch"][name], ".3f", LIMITS["times_switch"]) for name in _OURS]
        layers.add_row(str(threads), *times, *shares)
        for k, times_peer in found["times_transformers"].items():
            record = record_of(records, f"{threads} threads/peer {k}")
            if not record.figures:
                peers.add_row(str(threads), k, Text(record.note or record.status, style="dim"))
                continue
            times = [format_seconds(record.figures.get(who)) for who in ("ours", *PEER_MODES)]
            share = ratio_text(times_peer, ".3f", LIMITS["times_transformers"])
            peers.add_row(str(threads), k, *times, share, f"{record.figures['difference']:.0e}")
    headings = [f"{what}\n{name_threads(threads)}" for threads in bench.threads for what in ("router", "share")]
    title = "Routers, gate included, forward and backward, and their share of the layer"
    routers = new_table(title, ["router"], headings)
    for name in bench.routers:
        cells: list[str | Text] = []
        for threads, found in ratios.items():
            cells.append(format_seconds(_figures(records, threads, f"router {name}").get("router")))
            cells.append(ratio_text(found["router_share"][name], ".1%", LIMITS["router_share"]))
        routers.add_row(name, *cells)
    return [layers, routers, peers]


def _memory_table(records: Records, memory: Mapping[str, float | None], whole: Mapping[str, float | None]) -> Table:
    headings = ("rise of the peak", "dense of the same\nactive size", "ratio", "with parameters")
    table = new_table("Memory of a training step beyond the parameters, gradients included", ["layer"], headings)
    for name, dense in MEMORY.items():
        sizes = [record_of(records, f"memory {which}").measured.get("bytes") for which in (name, dense)]
        cells = ["-" if size is None else f"{size / 1e6:.0f} MB" for size in sizes]
        with_parameters = "-" if whole[name] is None else f"{whole[name]:.2f}"
        table.add_row(name, *cells, ratio_text(memory[name], ".3f", MEMORY_LIMIT), with_parameters)
    return table


def _draw(bench: LayerBench, records: Records) -> Figure:
    """Draws the time of every layer with a router of ours, split into the router and the rest."""
    figure = new_figure(1.6 + 3.6 * len(bench.threads), 1.0 + 0.2 * len(bench.routers))
    for axes, threads in zip(row(figure, len(bench.threads), sharey=True), bench.threads, strict=True):
        found = {name: _figures(records, threads, f"router {name}") for name in bench.routers}
        known = {name: figures for name, figures in found.items() if figures and name != "dense"}
        routing = [figures["router"] for figures in known.values()]
        rest = [max(figures["layer"] - figures["router"], 0.0) for figures in known.values()]
        axes.barh(list(known), routing, color="#8c2d04")
        axes.barh(list(known), rest, left=routing, color="#a9c8e4")
        dense = _figures(records, threads, "contenders")
        if dense:
            axes.axvline(dense["dense"], color=INK, linestyle=":", linewidth=1.2)
            axes.text(dense["dense"], -0.9, "dense layer ", ha="right")
        if known:
            axes.text(routing[0], 0, "  experts, gathers, loss", va="center")
            axes.text(0.0, -0.9, " router", color="#8c2d04")
        axes.set(xlabel="seconds, forward and backward", ylim=(len(known) - 0.4, -1.4))
        axes.tick_params(axis="y", length=0)
        axes.set_title(f"{name_threads(threads)}, {bench.size.tokens:,} tokens")
    return figure


_QUICK = LayerBench(size=LayerSize(tokens=2048, dim=128, hidden_dim=512, num_experts=16), repeats=3)
LAYER = Benchmark(
    name="layer", recipes={"full": LayerBench(size=LIMIT_SIZE), "quick": _QUICK}, steps=layer_steps, report=_report
)
