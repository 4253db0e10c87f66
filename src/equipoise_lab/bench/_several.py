# SPDX-License-Identifier: Apache-2.0
"""Steps that time K experts a row against torch.topk and OR-tools, with their verdicts and table.

Legend: n rows (datapoints), k columns (experts), K experts a row.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rich.table import Table

import equipoise as eq
from equipoise_lab._tables import format_seconds, name_size, name_threads, new_table
from equipoise_lab._timing import best_in_turns, num_threads
from equipoise_lab.bench._assign import SEVERAL_LIMIT, AssignBench
from equipoise_lab.bench._benchmark import Measurement, Records, Step, need, times_ours
from equipoise_lab.bench._families import draw_scores
from equipoise_lab.bench._solvers import SOLVERS, prepare_flow
from equipoise_lab.bench._verdicts import Verdict, ratio_text

Several = tuple[int, int, int]
_LEAST, _MOST = SEVERAL_LIMIT
_PEER = next(solver for solver in SOLVERS if solver.name == "ortools")


def several_key(point: Several, solver: str) -> str:
    """Names the measurement of a solver with K experts a row."""
    n, k, top_k = point
    return f"several/{n}x{k}/K{top_k}/{solver}"


def several_steps(bench: AssignBench) -> list[Step]:
    """Two steps for each size and K: torch.topk, and OR-tools' min-cost flow, each in turns with ours."""
    measures = {"topk": _measure_floor, _PEER.name: _measure_peer}
    return [
        Step(
            key=several_key(point, name),
            title=f"{name_size(point[:2])}, K = {point[2]}  {'torch.topk' if name == 'topk' else _PEER.title}",
            measure=partial(measure, bench, point),
        )
        for point in bench.several
        for name, measure in measures.items()
    ]


def _measure_floor(bench: AssignBench, point: Several) -> Measurement:
    n, k, top_k = point
    scores = draw_scores(bench.family, n, k, bench.seed)
    calls: dict[str, Callable[[], Any]] = {
        "topk": lambda: torch.topk(scores, top_k),
        "ours": lambda: eq.assign(scores, top_k=top_k),
    }
    with num_threads(bench.threads):
        timings = best_in_turns(calls, bench.repeats, budget=bench.budget)
    return Measurement(
        seconds=timings["topk"].seconds,
        repeats=timings["topk"].repeats,
        certificate=float(timings["ours"].result.gap),
        figures={"ours": timings["ours"].seconds},
    )


def _measure_peer(bench: AssignBench, point: Several) -> Measurement:
    """Times one call, however long it takes, between repetitions of ours."""
    need("ortools", "peers")
    n, k, top_k = point
    scores = draw_scores(bench.family, n, k, bench.seed)
    prepared = prepare_flow(scores, top_k)
    ours: dict[str, Callable[[], Any]] = {"ours": lambda: eq.assign(scores, top_k=top_k)}
    with num_threads(bench.threads):
        before = best_in_turns(ours, bench.repeats, budget=bench.budget)["ours"]
        start = time.perf_counter()
        result = prepared.call()
        seconds = time.perf_counter() - start
        after = best_in_turns(ours, bench.repeats, budget=bench.budget)["ours"]
    z = prepared.read(result).reshape(n, top_k)
    gap = float(before.result.value - scores.double().gather(1, z).sum()) / n
    largest = float(scores[torch.isfinite(scores)].abs().max())
    if abs(gap) > top_k * _PEER.relative_tolerance * largest:
        return Measurement(status="failed", seconds=seconds, note=f"its value differs from ours by {gap:.1e} a row")
    return Measurement(
        seconds=seconds, repeats=1, figures={"ours": min(before.seconds, after.seconds), "gap_per_row": gap}
    )


def times_topk(records: Records, point: Several) -> float | None:
    """Our time divided by that of torch.topk on the same matrix, in turns."""
    ratio = times_ours(records, several_key(point, "topk"))
    return 1 / ratio if ratio else None


def times_faster_with(records: Records, point: Several) -> float | None:
    """The time of OR-tools divided by ours."""
    return times_ours(records, several_key(point, _PEER.name))


def several_verdicts(bench: AssignBench, records: Records) -> Iterator[Verdict]:
    """Holds both ratios of each size and K against their limits."""
    for point in bench.several:
        name = f"{name_size(point[:2])}, K = {point[2]}"
        yield Verdict(
            group="several", title=f"{name}: times torch.topk", figure=times_topk(records, point), limit=_MOST
        )
        title, faster = f"{name}: times faster than OR-tools", times_faster_with(records, point)
        yield Verdict(group="several", title=title, figure=faster, limit=_LEAST, at_least=True)


def several_table(bench: AssignBench, records: Records) -> Table:
    """The times at each size and K, coloured by their limits."""
    table = new_table(
        f"K experts a row, {bench.family} scores in float32, {name_threads(bench.threads)}",
        ["n x k"],
        ["K", "torch.topk", "primal-dual", _PEER.short, f"{_PEER.short}\n/ ours", "ours\n/ topk"],
        caption=f"Limits: {_LEAST:g} times OR-tools, one call of which is timed; {_MOST:g} times torch.topk.",
        caption_justify="left",
    )
    least, most = SEVERAL_LIMIT if bench.judged else (None, None)
    for point in bench.several:
        floor, peer = (records.get(several_key(point, name)) for name in ("topk", _PEER.name))
        ours = None if floor is None else floor.figures.get("ours")
        table.add_row(
            name_size(point[:2]),
            str(point[2]),
            format_seconds(None if floor is None else floor.seconds),
            format_seconds(ours),
            peer.status if peer and peer.status != "measured" else format_seconds(peer.seconds if peer else None),
            ratio_text(times_faster_with(records, point), ".1f", least, at_least=True),
            ratio_text(times_topk(records, point), ".2f", most),
        )
    return table
