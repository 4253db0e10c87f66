# SPDX-License-Identifier: Apache-2.0
"""The assignment benchmark: its options and limits, and the steps that time solvers and families.

Legend: n rows (datapoints), k columns (experts), K experts a row.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import equipoise as eq
from equipoise._core import check_one_of
from equipoise_lab._tables import name_size
from equipoise_lab._timing import Timing, best_in_turns
from equipoise_lab.bench._benchmark import Measurement, Size, Step, check_run, need
from equipoise_lab.bench._families import FAMILIES, draw_scores
from equipoise_lab.bench._solvers import FLOW, OURS, SOLVERS, Solver, prepare_flow
from equipoise_lab.bench._verdicts import over_budget

Several = tuple[int, int, int]  # n, k, K
CAPACITY_FACTOR = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignBench:
    """One run of the assignment benchmark."""

    sizes: tuple[Size, ...]  # problems n x k in order: a solver skips what earlier ones show to exceed the budget
    robust_size: Size  # the problem at which every family is tried
    several: tuple[Several, ...]  # problems n x k with K experts a row
    behaviours: tuple[str, ...]  # names of the further checks (threads, memory, start-up, ...) to run
    family: str = "popular"  # of the score matrices of the sizes
    threads: int = 1  # for torch and for us; the peers use one
    repeats: int = 5  # of which the best counts
    seed: int = 0  # of the first score matrix
    budget: float = 10.0  # seconds that one call may take

    def __post_init__(self) -> None:
        """Refuses a run that cannot be made."""
        check_one_of("family", self.family, list(FAMILIES))
        check_run(self)

    @property
    def judged(self) -> bool:
        """Whether the limits apply: they are stated for experts of unequal popularity and one thread."""
        return self.family == "popular" and self.threads == 1

    def time(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Timing]:
        """Times calls in turns, with the options of the run."""
        return best_in_turns(calls, self.repeats, budget=self.budget, threads=self.threads)


def grid_key(point: Size | Several, solver: str) -> str:
    """Names the measurement of a solver at a size, or with K experts a row."""
    grid = f"several/{point[0]}x{point[1]}/K{point[2]}" if len(point) == 3 else f"grid/{point[0]}x{point[1]}"
    return f"{grid}/{solver}"


def name_several(point: Several) -> str:
    """Writes a size and K."""
    return f"{name_size(point[:2])}, K = {point[2]}"


def assign_steps(bench: AssignBench) -> list[Step]:
    """A step that compiles the kernels (or loads them), one for each size and solver, family, and several experts."""
    steps = [Step("compile", "compile kernels", _compile)]
    for size in bench.sizes:
        for solver in SOLVERS:
            keys = {each: grid_key(each, solver.name) for each in bench.sizes}
            skip = partial(over_budget, bench.budget, keys, size, solver.growth)
            measure = partial(_measure_solver, bench, size, solver)
            steps.append(Step(keys[size], f"{name_size(size)}  {solver.title}", measure, skip))
    steps += [Step(f"family/{name}", f"family {name}", partial(_measure_family, bench, name)) for name in FAMILIES]
    for point in bench.several:
        floor, flow = (partial(measure, bench, point) for measure in (_measure_topk, _measure_flow))
        steps.append(Step(grid_key(point, "topk"), f"{name_several(point)}  torch.topk", floor))
        steps.append(Step(grid_key(point, FLOW.name), f"{name_several(point)}  {FLOW.title}", flow))
    return steps


def _compile() -> Measurement:
    scores = draw_scores("gumbel", 4096, 64, seed=0)
    start = time.perf_counter()
    prices = eq.assign(scores).prices
    eq.assign(scores, 80, prices=prices)
    eq.assign(scores.reshape(64, 64, 64))
    return Measurement(seconds=time.perf_counter() - start, repeats=1, note="first calls in this process")


def _measure_solver(bench: AssignBench, size: Size, solver: Solver) -> Measurement:
    if solver.package is not None:
        need(solver.package, "peers")
    scores = _problem(bench.family, *size, bench.seed)
    prepared = solver.prepare(scores)
    # In turns with ours, which every solver is compared with: the machine may be faster now than a minute ago.
    timings = bench.time({solver.name: prepared.call, OURS: lambda: eq.assign(scores)})
    timing = timings[solver.name]
    z = prepared.read(timing.result)
    n, k = size
    if solver.role != "floor" and not bool((torch.bincount(z, minlength=k) == n // k).all()):
        return Measurement(status="failed", seconds=timing.seconds, note="the assignment is not balanced")
    return Measurement(
        seconds=timing.seconds,
        repeats=timing.repeats,
        value=float(scores.double().gather(1, z[:, None]).sum()),
        certificate=float(timing.result.gap) if isinstance(timing.result, eq.Assignment) else None,
        figures={"largest": _largest(scores), "ours": timings[OURS].seconds},
    )


def _measure_family(bench: AssignBench, family: str) -> Measurement:
    """Times torch.argmax, the tight problem and the problem with slack, in turns."""
    n, k = bench.robust_size
    scores = draw_scores(family, n, k, bench.seed)
    slack = math.ceil(CAPACITY_FACTOR * n / k)
    ours = partial(eq.assign, scores)
    timings = bench.time({"argmax": partial(torch.argmax, scores, -1), "tight": ours, "slack": partial(ours, slack)})
    figures = {name: timing.seconds for name, timing in timings.items()}
    for kind in ("tight", "slack"):
        found: eq.Assignment = timings[kind].result
        figures[f"{kind}_gap"] = float(found.gap) / max(abs(float(found.value)), _largest(scores), 1e-300)
    return Measurement(seconds=timings["tight"].seconds, repeats=timings["tight"].repeats, figures=figures)


def _measure_topk(bench: AssignBench, point: Several) -> Measurement:
    """Times torch.topk in turns with ours."""
    n, k, top_k = point
    scores = draw_scores(bench.family, n, k, bench.seed)
    calls = {"topk": partial(torch.topk, scores, top_k), "ours": partial(eq.assign, scores, top_k=top_k)}
    floor, ours = bench.time(calls).values()
    certificate, figures = float(ours.result.gap), {"ours": ours.seconds}
    return Measurement(seconds=floor.seconds, repeats=floor.repeats, certificate=certificate, figures=figures)


def _measure_flow(bench: AssignBench, point: Several) -> Measurement:
    """Times one call of OR-tools, however long it takes, between repetitions of ours."""
    need("ortools", "peers")
    n, k, top_k = point
    scores = draw_scores(bench.family, n, k, bench.seed)
    prepared = prepare_flow(scores, top_k)
    ours = {"ours": partial(eq.assign, scores, top_k=top_k)}
    before = bench.time(ours)["ours"]
    start = time.perf_counter()
    result = prepared.call()
    seconds = time.perf_counter() - start
    after = bench.time(ours)["ours"]
    z = prepared.read(result).reshape(n, top_k)
    gap = float(before.result.value - scores.double().gather(1, z).sum()) / n
    if abs(gap) > top_k * FLOW.relative_tolerance * _largest(scores):
        return Measurement(status="failed", seconds=seconds, note=f"its value differs from ours by {gap:.1e} a row")
    figures = {"ours": min(before.seconds, after.seconds), "gap_per_row": gap}
    return Measurement(seconds=seconds, repeats=1, figures=figures)


def _largest(scores: Float[Tensor, "n k"]) -> float:
    return float(scores[torch.isfinite(scores)].abs().max())


@lru_cache(maxsize=1)
def _problem(family: str, n: int, k: int, seed: int) -> Float[Tensor, "n k"]:
    """The score matrix of a size: kept until the next size is drawn, because all solvers share it."""
    return draw_scores(family, n, k, seed)
