# SPDX-License-Identifier: Apache-2.0
"""The assignment benchmark: its options and limits, and the steps that time every solver and every family.

Legend: n rows (datapoints), k columns (experts).
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

import equipoise as eq
from equipoise._core import check_one_of
from equipoise_lab._tables import name_size
from equipoise_lab._timing import best_in_turns, num_threads
from equipoise_lab.bench._benchmark import Measurement, Size, Step, check_run, need, over_budget
from equipoise_lab.bench._families import FAMILIES, draw_scores
from equipoise_lab.bench._solvers import OURS, SOLVERS, Solver

# At least so many times faster than the better peer (None: no limit), and at most so many times torch.argmax.
SIZE_LIMITS: Mapping[Size, tuple[float | None, float]] = {
    (4096, 16): (25.0, 4.5),
    (4096, 64): (25.0, 4.5),
    (16384, 64): (100.0, 2.5),
    (65536, 64): (None, 2.2),
    (65536, 256): (None, 2.0),
}
# With K experts a row, at every size: the same against OR-tools and torch.topk.
SEVERAL_LIMIT = (30.0, 5.0)
# Any family, tight or with slack, in multiples of torch.argmax at the robust size.
FAMILY_LIMIT = 60.0
# An exact result has a gap of at most this, relative to the larger of |value| and the largest finite |score|.
GAP_LIMIT = 1e-9
CAPACITY_FACTOR = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignBench:
    """One run of the assignment benchmark."""

    sizes: tuple[Size, ...]  # problems n x k in order: a solver skips what earlier ones show to exceed the budget
    robust_size: Size  # the problem at which every family is tried
    several: tuple[tuple[int, int, int], ...]  # problems n x k with K experts a row
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


_FULL = AssignBench(
    sizes=(
        *((1024, 64), (2048, 64), (4096, 16), (4096, 64), (8192, 64)),
        *((16384, 64), (32768, 64), (65536, 64), (65536, 256), (262144, 64)),
    ),
    robust_size=(16384, 64),
    several=((16384, 64, 2), (16384, 64, 8), (65536, 128, 2), (65536, 128, 8)),
    behaviours=("growth", "batch", "warm-start", "threads", "memory", "first-call", "import"),
)
ASSIGN_RECIPES = {
    "full": _FULL,
    "quick": replace(
        _FULL,
        sizes=((1024, 64), (4096, 16), (4096, 64), (16384, 64)),
        several=((16384, 64, 2), (16384, 64, 8)),
        behaviours=("batch", "first-call", "import"),
        budget=2.0,
    ),
}


def grid_key(size: Size, solver: str) -> str:
    """Names the measurement of a solver at a size."""
    return f"grid/{size[0]}x{size[1]}/{solver}"


def family_key(family: str) -> str:
    """Names the measurement of a family."""
    return f"family/{family}"


def grid_steps(bench: AssignBench) -> list[Step]:
    """A step that compiles the kernels (or loads them), one for each size and solver, one for each family."""
    keys = {solver.name: {size: grid_key(size, solver.name) for size in bench.sizes} for solver in SOLVERS}
    timed = [
        Step(
            keys[solver.name][size],
            f"{name_size(size)}  {solver.title}",
            partial(_measure_solver, bench, size, solver),
            skip=partial(over_budget, bench.budget, keys[solver.name], size, solver.growth),
        )
        for size in bench.sizes
        for solver in SOLVERS
    ]
    tried = [Step(family_key(name), f"family {name}", partial(_measure_family, bench, name)) for name in FAMILIES]
    return [Step("compile", "compile kernels", _compile), *timed, *tried]


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
    with num_threads(bench.threads):
        prepared = solver.prepare(scores)
        # In turns with ours, which every solver is compared with: the machine may be faster now than a minute ago.
        calls = {solver.name: prepared.call, OURS: lambda: eq.assign(scores)}
        timings = best_in_turns(calls, bench.repeats, budget=bench.budget)
    timing = timings[solver.name]
    z = prepared.read(timing.result)
    if solver.role != "floor" and not _is_balanced(z, size):
        return Measurement(status="failed", seconds=timing.seconds, note="the assignment is not balanced")
    return Measurement(
        seconds=timing.seconds,
        repeats=timing.repeats,
        value=float(scores.double().gather(1, z[:, None]).sum()),
        certificate=float(timing.result.gap) if isinstance(timing.result, eq.Assignment) else None,
        figures={"largest": _largest(scores), "ours": timings[OURS].seconds},
    )


def _is_balanced(z: Int[Tensor, " n"], size: Size) -> bool:
    n, k = size
    return bool((torch.bincount(z, minlength=k) == n // k).all())


def _measure_family(bench: AssignBench, family: str) -> Measurement:
    """Times torch.argmax, the tight problem and the problem with slack, in turns."""
    n, k = bench.robust_size
    scores = draw_scores(family, n, k, bench.seed)
    slack = math.ceil(CAPACITY_FACTOR * n / k)
    calls: dict[str, Callable[[], Any]] = {
        "argmax": lambda: torch.argmax(scores, -1),
        "tight": lambda: eq.assign(scores),
        "slack": lambda: eq.assign(scores, slack),
    }
    with num_threads(bench.threads):
        timings = best_in_turns(calls, bench.repeats, budget=bench.budget)
    gaps = {f"{kind}_gap": _relative_gap(scores, timings[kind].result) for kind in ("tight", "slack")}
    return Measurement(
        seconds=timings["tight"].seconds,
        repeats=timings["tight"].repeats,
        figures={**{name: timing.seconds for name, timing in timings.items()}, **gaps},
    )


def _relative_gap(scores: Float[Tensor, "n k"], result: eq.Assignment) -> float:
    """The certificate in the units of its limit: relative to the larger of |value| and the largest finite |score|."""
    return float(result.gap) / max(abs(float(result.value)), _largest(scores), 1e-300)


def _largest(scores: Float[Tensor, "n k"]) -> float:
    return float(scores[torch.isfinite(scores)].abs().max())


@lru_cache(maxsize=1)
def _problem(family: str, n: int, k: int, seed: int) -> Float[Tensor, "n k"]:
    """The score matrix of a size: kept until the next size is drawn, because all solvers share it."""
    return draw_scores(family, n, k, seed)
