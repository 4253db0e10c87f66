# SPDX-License-Identifier: Apache-2.0
"""The layer against a dense one, against itself with other routers, and against its peer.

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
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text
from torch import Tensor

from equipoise.nn import ROUTERS
from equipoise_lab._style import INK, new_figure, row
from equipoise_lab._tables import format_seconds, name_threads, new_table
from equipoise_lab._timing import best_in_turns, num_threads
from equipoise_lab.bench._benchmark import Benchmark, Measurement, Records, Step, check_run, figures_of, need
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
from equipoise_lab.bench._verdicts import Verdict, judge, limit_table, ratio_text, worst_of

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


SWITCH_LIMIT = 1.05
ROUTER_LIMIT = 0.08
PEER_LIMIT = 1.0
MEMORY_LIMIT = 1.6
_OURS = tuple(name for name in CONTENDERS if name != "switch")


def times_switch(records: Records, threads: int, name: str, *, median: bool = False) -> float | None:
    """The time of a training step of a layer ("dense", "gm-iw", "skip-iw") divided by that of `switch`."""
    figures = _figures(records, layer_key(threads, "contenders"), median=median)
    return figures[name] / figures["switch"] if figures else None


def router_share(records: Records, threads: int, name: str, *, median: bool = False) -> float | None:
    """The time of a router, forward and backward, divided by that of the layer."""
    figures = _figures(records, layer_key(threads, f"router {name}"), median=median)
    return figures["router"] / figures["layer"] if figures else None


def times_peer(records: Records, threads: int, k: int, *, median: bool = False) -> float | None:
    """Our time with `topk` divided by the peer's in the fastest of its modes."""
    figures = _figures(records, layer_key(threads, f"peer {k}"), median=median)
    return figures["ours"] / min(figures[mode] for mode in PEER_MODES if mode in figures) if figures else None


def times_dense_memory(records: Records, name: str, *, parameters: bool = False) -> float | None:
    """The rise of the peak in a training step of a layer, divided by that of the dense layer of the same size.

    The parameters count on request only: the sparse layer has E times as many, so they blur the view.
    """
    found = [_figures(records, f"memory {which}") for which in (name, MEMORY[name])]
    if not all(found):
        return None
    ours, dense = (figures["bytes"] + (figures["parameters"] if parameters else 0.0) for figures in found)
    return ours / dense if dense > 0 else None


def _figures(records: Records, key: str, *, median: bool = False) -> dict[str, float]:
    """The figures of a measurement: the best times and whatever else there is, or the medians under the same names."""
    found = figures_of(records, key)
    return {name.removesuffix(MEDIAN): x for name, x in found.items() if name.endswith(MEDIAN) == median}


def layer_verdicts(bench: LayerBench, records: Records) -> list[Verdict]:
    """Holds every figure of a run against its limit; judged at the size that the limits are stated for.

    Returns:
        One verdict for each limit and number of threads; for the routers' share, of the router with the largest.
    """
    found: list[Verdict] = []
    for threads in bench.threads:
        label = name_threads(threads)
        for name in _OURS:
            title = f"{label}: {name} at capacity factor {CONTENDERS[name]:g}, times switch at {CONTENDERS['switch']:g}"
            found.append(_held(title, SWITCH_LIMIT, partial(times_switch, records, threads, name)))
        worst, _ = worst_of({name: router_share(records, threads, name) for name in bench.routers})
        title = f"{label}: largest share of a router in its layer" + (f" ({worst})" if worst else "")
        found.append(_held(title, ROUTER_LIMIT, partial(router_share, records, threads, worst)))
        for k in bench.top_ks:
            note = records.get(layer_key(threads, f"peer {k}"), Measurement()).note
            title = f"{label}: topk with K = {k}, times transformers in its fastest mode"
            found.append(_held(title, PEER_LIMIT, partial(times_peer, records, threads, k), note))
    for name in MEMORY if bench.memory else ():
        title, ratio = f"peak memory of a step, {name}, times the dense layer", times_dense_memory(records, name)
        found.append(Verdict(group="layer", title=title, figure=ratio, limit=MEMORY_LIMIT))
    return judge(found, when=bench.size == LAYER_RECIPES["full"].size)


def _held(title: str, limit: float, ratio: Callable[..., float | None], note: str = "") -> Verdict:
    """A ratio of best times beside its limit, with the ratio of the medians for a note."""
    middle = ratio(median=True)
    notes = [note, "" if middle is None else f"median {middle:.3g}"]
    return Verdict(group="layer", title=title, figure=ratio(), limit=limit, note="; ".join(filter(None, notes)))


def _summary(bench: LayerBench, records: Records) -> dict[str, Any]:
    """The ratios and verdicts in the form that the results file stores."""

    def ratios(threads: int, prefix: str, median: bool) -> dict[str, dict[str, float | None]]:
        return {
            f"{prefix}times_switch": {n: times_switch(records, threads, n, median=median) for n in ("dense", *_OURS)},
            f"{prefix}router_share": {n: router_share(records, threads, n, median=median) for n in bench.routers},
            f"{prefix}times_transformers": {
                str(k): times_peer(records, threads, k, median=median) for k in bench.top_ks
            },
        }

    return {
        "ratios": [
            {"threads": threads, **ratios(threads, "", False), **ratios(threads, "median_", True)}
            for threads in bench.threads
        ],
        "times_dense_memory": {name: times_dense_memory(records, name) for name in MEMORY},
        "times_dense_memory_with_parameters": {
            name: times_dense_memory(records, name, parameters=True) for name in MEMORY
        },
        "verdicts": [asdict(verdict) for verdict in layer_verdicts(bench, records)],
    }


def _tables(bench: LayerBench, records: Records) -> list[Table]:
    """The tables of a run: layers, routers, peers, memory, limits."""
    limits = limit_table(layer_verdicts(bench, records), title="Limits, for the best of the rounds", notes=True)
    tables = [_layer_table(bench, records), _router_table(bench, records), _peer_table(bench, records)]
    return [*tables, *([_memory_table(records)] if bench.memory else []), limits]


def _layer_table(bench: LayerBench, records: Records) -> Table:
    size = bench.size
    table = new_table(
        f"Forward and backward, {size.tokens:,} tokens, dim {size.dim}, hidden {size.hidden_dim:,}, "
        f"{size.num_experts} experts, float32, best of {bench.repeats}",
        ["threads"],
        ["dense", *(f"{n}\nfactor {c:g}" for n, c in CONTENDERS.items()), *(f"{n}\n/ switch" for n in _OURS)],
    )
    for threads in bench.threads:
        figures = _figures(records, layer_key(threads, "contenders"))
        times = [format_seconds(figures.get(name)) for name in ("dense", *CONTENDERS)]
        ratios = [ratio_text(times_switch(records, threads, name), ".3f", SWITCH_LIMIT) for name in _OURS]
        table.add_row(str(threads), *times, *ratios)
    return table


def _router_table(bench: LayerBench, records: Records) -> Table:
    headings = [f"{what}\n{name_threads(threads)}" for threads in bench.threads for what in ("router", "share")]
    title = "Routers, gate included, forward and backward, and their share of the layer"
    table = new_table(title, ("router",), headings)
    for name in bench.routers:
        cells: list[str | Text] = []
        for threads in bench.threads:
            figures = _figures(records, layer_key(threads, f"router {name}"))
            share = ratio_text(router_share(records, threads, name), ".1%", ROUTER_LIMIT)
            cells += [format_seconds(figures.get("router")), share]
        table.add_row(name, *cells)
    return table


def _peer_table(bench: LayerBench, records: Records) -> Table:
    table = new_table(
        "topk with gated experts against MixtralSparseMoeBlock of Hugging Face transformers, same parameters",
        ["threads"],
        ["K", "ours", *PEER_MODES, "ours /\nfastest", "largest\ndifference"],
    )
    for threads in bench.threads:
        for k in bench.top_ks:
            record = records.get(layer_key(threads, f"peer {k}"), Measurement(status="skipped"))
            if not record.figures:
                table.add_row(str(threads), str(k), Text(record.note or record.status, style="dim"))
                continue
            times = [format_seconds(record.figures.get(who)) for who in ("ours", *PEER_MODES)]
            ratio = ratio_text(times_peer(records, threads, k), ".3f", PEER_LIMIT)
            table.add_row(str(threads), str(k), *times, ratio, f"{record.figures['difference']:.0e}")
    return table


def _memory_table(records: Records) -> Table:
    headings = ("rise of the peak", "dense of the same\nactive size", "ratio", "with parameters")
    table = new_table("Memory of a training step beyond the parameters, gradients included", ["layer"], headings)
    for name, dense in MEMORY.items():
        sizes = [_figures(records, f"memory {which}") for which in (name, dense)]
        cells = [f"{figures['bytes'] / 1e6:.0f} MB" if figures else "-" for figures in sizes]
        whole = times_dense_memory(records, name, parameters=True)
        ratio = ratio_text(times_dense_memory(records, name), ".3f", MEMORY_LIMIT)
        table.add_row(name, *cells, ratio, "-" if whole is None else f"{whole:.2f}")
    return table


def _draw(bench: LayerBench, records: Records) -> Figure:
    """Draws the time of every layer with a router of ours, split into the router and the rest."""
    figure = new_figure(1.6 + 3.6 * len(bench.threads), 1.0 + 0.2 * len(bench.routers))
    for axes, threads in zip(row(figure, len(bench.threads), sharey=True), bench.threads, strict=True):
        found = {name: _figures(records, layer_key(threads, f"router {name}")) for name in bench.routers}
        known = {name: figures for name, figures in found.items() if figures and name != "dense"}
        routing = [figures["router"] for figures in known.values()]
        rest = [max(figures["layer"] - figures["router"], 0.0) for figures in known.values()]
        axes.barh(list(known), routing, color="#8c2d04")
        axes.barh(list(known), rest, left=routing, color="#a9c8e4")
        dense = _figures(records, layer_key(threads, "contenders"))
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


LAYER = Benchmark(name="layer", recipes=LAYER_RECIPES, steps=layer_steps, tables=_tables, summary=_summary, draw=_draw)
