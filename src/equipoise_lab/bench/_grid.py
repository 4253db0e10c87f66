# SPDX-License-Identifier: Apache-2.0
"""Steps that time every solver at every size, and every family at one size.

Legend: n rows (datapoints), k columns (experts).
"""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

import equipoise as eq
from equipoise_lab._tables import name_size
from equipoise_lab._timing import best_in_turns, num_threads
from equipoise_lab.bench._benchmark import Measurement, Records, Step, foresee
from equipoise_lab.bench._families import FAMILIES, draw_scores
from equipoise_lab.bench._recipe import CAPACITY_FACTOR, AssignBench, Size
from equipoise_lab.bench._solvers import OURS, SOLVERS, Solver


def grid_key(size: Size, solver: str) -> str:
    """Names the measurement of a solver at a size."""
    return f"grid/{size[0]}x{size[1]}/{solver}"


def family_key(family: str) -> str:
    """Names the measurement of a family."""
    return f"family/{family}"


def compile_step() -> Step:
    """The step that compiles the kernels (or loads them from disk), so that no later figure contains it."""

    def measure(records: Records) -> Measurement:
        del records
        scores = draw_scores("gumbel", 4096, 64, seed=0)
        start = time.perf_counter()
        prices = eq.assign(scores).prices
        eq.assign(scores, 80, prices=prices)
        eq.assign(scores.reshape(64, 64, 64))
        return Measurement(seconds=time.perf_counter() - start, repeats=1, note="first calls in this process")

    return Step(key="compile", title="compile kernels", measure=measure)


def grid_steps(bench: AssignBench) -> list[Step]:
    """One step for each size and solver, smaller problems first."""
    return [
        Step(
            key=grid_key(size, solver.name),
            title=f"{name_size(size)}  {solver.title}",
            measure=functools.partial(_measure_solver, bench, size, solver),
        )
        for size in bench.sizes
        for solver in SOLVERS
    ]


def family_steps(bench: AssignBench) -> list[Step]:
    """One step for each family at the robust size: torch.argmax, the tight problem, the problem with slack."""
    return [
        Step(key=family_key(name), title=f"family {name}", measure=functools.partial(_measure_family, bench, name))
        for name in FAMILIES
    ]


def _measure_solver(bench: AssignBench, size: Size, solver: Solver, records: Records) -> Measurement:
    if not solver.installed():
        return Measurement(status="not installed", note=f"needs {solver.package}: pip install 'equipoise[peers]'")
    expected = foresee(records, bench.sizes, size, lambda size: grid_key(size, solver.name), solver.growth)
    if expected > bench.budget:
        return Measurement(status="skipped", note=f"about {expected:,.1f} s expected, budget {bench.budget:g} s")
    scores = _problem(bench.family, *size, bench.seed)
    with num_threads(bench.threads):
        prepared = solver.prepare(scores)
        # In turns with ours, which every solver is compared with: the machine may be faster now than a minute ago.
        calls = {solver.name: prepared.call, OURS: lambda: eq.assign(scores)}
        try:
            timings = best_in_turns(calls, bench.repeats, budget=bench.budget)
        except RuntimeError as error:
            return Measurement(status="failed", note=str(error))
    timing = timings[solver.name]
    z = prepared.read(timing.result)
    if solver.role != "floor" and not _is_balanced(z, size):
        return Measurement(status="failed", seconds=timing.seconds, note="the assignment is not balanced")
    return Measurement(
        seconds=timing.seconds,
        repeats=timing.repeats,
        value=float(scores.double().gather(1, z[:, None]).sum()),
        certificate=float(timing.result.gap) if isinstance(timing.result, eq.Assignment) else None,
        figures={"largest": float(scores[torch.isfinite(scores)].abs().max()), "ours": timings[OURS].seconds},
    )


def _is_balanced(z: Int[Tensor, " n"], size: Size) -> bool:
    n, k = size
    return bool((torch.bincount(z, minlength=k) == n // k).all())


def _measure_family(bench: AssignBench, family: str, records: Records) -> Measurement:
    del records
    n, k = bench.robust_size
    scores = draw_scores(family, n, k, bench.seed)
    slack = math.ceil(CAPACITY_FACTOR * n / k)
    with num_threads(bench.threads):
        calls: dict[str, Callable[[], Any]] = {
            "argmax": lambda: torch.argmax(scores, -1),
            "tight": lambda: eq.assign(scores),
            "slack": lambda: eq.assign(scores, slack),
        }
        timings = best_in_turns(calls, bench.repeats, budget=bench.budget)
    gaps = {f"{kind}_gap": _relative_gap(scores, timings[kind].result) for kind in ("tight", "slack")}
    return Measurement(
        seconds=timings["tight"].seconds,
        repeats=timings["tight"].repeats,
        figures={**{name: timing.seconds for name, timing in timings.items()}, **gaps},
    )


def _relative_gap(scores: Float[Tensor, "n k"], result: eq.Assignment) -> float:
    """The certificate in the units of its limit: relative to the larger of |value| and the largest finite |score|."""
    largest = float(scores[torch.isfinite(scores)].abs().max())
    return float(result.gap) / max(abs(float(result.value)), largest, 1e-300)


@functools.lru_cache(maxsize=1)
def _problem(family: str, n: int, k: int, seed: int) -> Float[Tensor, "n k"]:
    """The score matrix of a size: kept until the next size is drawn, because all solvers share it."""
    return draw_scores(family, n, k, seed)
