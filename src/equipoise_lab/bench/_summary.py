# SPDX-License-Identifier: Apache-2.0
"""From measurements to ratios and verdicts: pure functions of the records."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from equipoise_lab._tables import name_size
from equipoise_lab.bench._behaviour import behaviour_key
from equipoise_lab.bench._benchmark import Measurement, Records
from equipoise_lab.bench._families import FAMILIES
from equipoise_lab.bench._grid import family_key, grid_key
from equipoise_lab.bench._recipe import CAPACITY_FACTOR, FAMILY_LIMIT, GAP_LIMIT, SIZE_LIMITS, AssignBench, Size
from equipoise_lab.bench._several import several_verdicts, times_faster_with, times_topk
from equipoise_lab.bench._solvers import OURS, SOLVERS
from equipoise_lab.bench._verdicts import Verdict

# The peers that solve the n x k problem itself; scipy solves the n x n one and is shown for scale.
_RIVALS = ("pot", "ortools")


def gap_per_row(records: Records, size: Size, solver: str) -> float | None:
    """How much better our exact value is than a solver's, per row; negative if the solver found a better one."""
    ours, theirs = records.get(grid_key(size, OURS)), records.get(grid_key(size, solver))
    if ours is None or theirs is None or ours.value is None or theirs.value is None:
        return None
    return (ours.value - theirs.value) / size[0]


def is_exact(records: Records, size: Size, solver: str) -> bool | None:
    """Whether a solver's value equals ours up to the precision of its costs; None when either is missing."""
    gap, record = gap_per_row(records, size, solver), records.get(grid_key(size, solver))
    if gap is None or record is None:
        return None
    tolerance = next(s.relative_tolerance for s in SOLVERS if s.name == solver)
    return abs(gap) <= tolerance * record.figures["largest"]


def times_faster(records: Records, size: Size) -> float | None:
    """The time of the better exact peer divided by ours, which took turns with it."""
    peers = [_times_ours(records, size, name) for name in _RIVALS if is_exact(records, size, name)]
    return min((ratio for ratio in peers if ratio is not None), default=None)


def times_floor(records: Records, size: Size) -> float | None:
    """Our time divided by that of torch.argmax on the same matrix, in turns."""
    floor = _times_ours(records, size, "argmax")
    return 1 / floor if floor else None


def _times_ours(records: Records, size: Size, solver: str) -> float | None:
    ours, record = records.get(grid_key(size, OURS)), records.get(grid_key(size, solver))
    if ours is None or ours.status != "measured" or record is None or record.status != "measured":
        return None
    return None if record.seconds is None else record.seconds / record.figures["ours"]


def verdicts(bench: AssignBench, records: Records) -> list[Verdict]:
    """Holds every figure of a run against its limit.

    Returns:
        One verdict for each limit that the run's sizes and behaviours touch.
    """
    found = [
        *_size_verdicts(bench, records),
        *several_verdicts(bench, records),
        *_family_verdicts(records),
        *_behaviour_verdicts(bench, records),
    ]
    return [verdict.judged() if bench.judged else verdict for verdict in found]


def summary(bench: AssignBench, records: Records) -> dict[str, Any]:
    """The ratios and verdicts in the form that the results file stores."""
    return {
        "ratios": [
            {
                "n": size[0],
                "k": size[1],
                "times_faster_than_better_peer": times_faster(records, size),
                "times_argmax": times_floor(records, size),
                "gap_per_row": {s.name: gap_per_row(records, size, s.name) for s in SOLVERS if s.role != "floor"},
            }
            for size in bench.sizes
        ],
        "several": [
            {
                **dict(zip(("n", "k", "top_k"), point, strict=True)),
                "times_faster_than_ortools": times_faster_with(records, point),
                "times_topk": times_topk(records, point),
            }
            for point in bench.several
        ],
        "limits": [asdict(verdict) for verdict in verdicts(bench, records)],
    }


def _size_verdicts(bench: AssignBench, records: Records) -> Iterator[Verdict]:
    for size in bench.sizes:
        limit, name = SIZE_LIMITS.get(size), name_size(size)
        if limit is None:
            continue
        if limit.peer is not None:
            yield Verdict(
                group="size",
                title=f"{name}: times faster than the better exact peer",
                figure=times_faster(records, size),
                limit=limit.peer,
                at_least=True,
            )
        yield Verdict(
            group="size", title=f"{name}: times torch.argmax", figure=times_floor(records, size), limit=limit.floor
        )


def _family_verdicts(records: Records) -> Iterator[Verdict]:
    for name in FAMILIES:
        record = records.get(family_key(name))
        for kind, label in (("tight", "tight"), ("slack", f"capacity factor {CAPACITY_FACTOR:g}")):
            figure = None if record is None else record.figures[kind] / record.figures["argmax"]
            yield Verdict(
                group="family", title=f"{name}, {label}: times torch.argmax", figure=figure, limit=FAMILY_LIMIT
            )
    gaps = [r.figures[kind] for r in _families(records) for kind in ("tight_gap", "slack_gap")]
    yield Verdict(
        group="family",
        title="largest relative gap over all families",
        figure=max(gaps, default=None),
        limit=GAP_LIMIT,
        unit="",
    )


def _behaviour_verdicts(bench: AssignBench, records: Records) -> Iterator[Verdict]:
    normal = records.get(family_key("gumbel"))
    slack = None if normal is None else normal.figures["slack"] / normal.figures["tight"]
    yield Verdict(group="behaviour", title="capacity factor 1.25 against tight", figure=slack, limit=1.5)
    for name in bench.behaviours:
        title, limit, unit = _BEHAVIOUR_LIMITS[name]
        record = records.get(behaviour_key(name), Measurement(status="skipped", note="not measured"))
        figure = record.seconds if unit == "s" else record.figures.get("ratio")
        limit += record.figures.get("resolution", 0.0)  # what the clock cannot tell, where that was measured
        yield Verdict(group="behaviour", title=title, figure=figure, limit=limit, unit=unit, note=record.note)


_BEHAVIOUR_LIMITS = {
    "growth": ("time per row at k = 64, n = 262,144 against 16,384", 1.3, "x"),
    "batch": ("4,096 problems of 100 x 2", 0.025, "s"),
    "warm-start": ("warm start from the previous draw's prices against cold", 1.0, "x"),
    "threads": ("two threads against one", 1.0, "x"),
    "memory": ("extra peak memory against the score matrix", 1.0, "x"),
    "first-call": ("first call in a fresh process, above import", 2.0, "s"),
    "import": ("import equipoise, above import torch", 1.0, "s"),
}


def _families(records: Records) -> list[Measurement]:
    return [records[family_key(name)] for name in FAMILIES if family_key(name) in records]
