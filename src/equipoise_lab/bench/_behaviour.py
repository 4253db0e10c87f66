# SPDX-License-Identifier: Apache-2.0
"""Beyond a single cold call: growth with the rows, batches, warm starts, threads, memory, start-up."""

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

import equipoise as eq
from equipoise_lab._timing import best_in_turns, best_of_each, num_threads
from equipoise_lab.bench._assign import AssignBench
from equipoise_lab.bench._benchmark import Measurement
from equipoise_lab.bench._families import draw_scores
from equipoise_lab.bench._probes import FIRST_CALL, IMPORT, MEMORY, ask

_BATCH, _BATCH_ROWS, _BATCH_EXPERTS = 4096, 100, 2
_GROWTH_ROWS, _GROWTH_EXPERTS = (16384, 262144), 64
# n, k and the capacity factor of problems that are solved again with other noise.
_WARM_PROBLEMS = tuple((n, k, c) for n, k in ((4096, 16), (4096, 64), (16384, 64), (65536, 64)) for c in (1.0, 1.05))
_WARM_ROUNDS = 8  # for each repetition of other measurements


class Behaviour(NamedTuple):
    """What is measured, and its limit: of the seconds where the unit is "s", else of the figure "ratio"."""

    measure: Callable[[AssignBench], Measurement]
    title: str
    limit: float
    unit: str = "x"


def _small_problems(seed: int) -> Float[Tensor, "batch n k"]:
    """The shape of the paper's experiment: thousands of problems with 100 rows and two experts."""
    flat = draw_scores("gumbel", _BATCH * _BATCH_ROWS, _BATCH_EXPERTS, seed)
    return flat.reshape(_BATCH, _BATCH_ROWS, _BATCH_EXPERTS)


def _growth(bench: AssignBench) -> Measurement:
    scores = {n: draw_scores("gumbel", n, _GROWTH_EXPERTS, bench.seed) for n in _GROWTH_ROWS}
    calls = {str(n): partial(eq.assign, scores[n]) for n in scores}
    seconds = best_of_each(calls, bench.repeats, threads=bench.threads)
    few, many = (seconds[str(n)] / n for n in _GROWTH_ROWS)
    return Measurement(repeats=bench.repeats, figures={**seconds, "ratio": many / few})


def _batch(bench: AssignBench) -> Measurement:
    timing = bench.time({"batch": partial(eq.assign, _small_problems(bench.seed))})["batch"]
    return Measurement(seconds=timing.seconds, repeats=timing.repeats)


def _warm_start(bench: AssignBench) -> Measurement:
    """Two draws of noise on the same logits, as in successive evaluations of one batch: the second, cold and warm."""
    figures, ratios, doubts = dict[str, float](), dict[str, float](), list[float]()
    for n, k, factor in _WARM_PROBLEMS:
        logits, capacity = draw_scores("logits", n, k, bench.seed), math.ceil(factor * n / k)
        logits += torch.randn(k, generator=torch.Generator().manual_seed(bench.seed))  # experts of unequal popularity
        # The family adds logits of its own; only its noise is wanted here.
        previous, scores = (
            logits + draw_scores("gumbel", n, k, seed) - draw_scores("logits", n, k, seed)
            for seed in (bench.seed + 1, bench.seed + 2)
        )
        cold = partial(eq.assign, scores, capacity)
        # One after the other, which differ by little; a cold call twice, to know by how little.
        calls = {"cold": cold, "warm": partial(cold, prices=eq.assign(previous, capacity).prices), "again": cold}
        timings = best_in_turns(calls, _WARM_ROUNDS * bench.repeats, threads=bench.threads)
        label = f"{n}x{k}, capacity {capacity}"
        figures |= {f"{name} {label}": timings[name].seconds for name in ("cold", "warm")}
        ratios[label] = _median_ratio(timings["warm"].times, timings["cold"].times)
        doubts.append(abs(_median_ratio(timings["again"].times, timings["cold"].times) - 1.0))
    worst = max(ratios, key=ratios.__getitem__)
    figures |= {"ratio": ratios[worst], "resolution": max(doubts)}
    note = (
        f"median of calls side by side, the least favourable of {len(ratios)}: {worst}; "
        f"cold calls differ from each other by up to {max(doubts):.1%}"
    )
    return Measurement(repeats=bench.repeats, figures=figures, note=note)


def _median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(time / other for time, other in zip(times, others, strict=True))


def _two_threads(bench: AssignBench) -> Measurement:
    if (os.cpu_count() or 1) < 2:
        return Measurement(status="skipped", note="this machine has one core")
    problems = {"65536x64": draw_scores("gumbel", 65536, 64, bench.seed), "batch": _small_problems(bench.seed)}
    figures: dict[str, float] = {}
    for label, scores in problems.items():
        figures |= best_of_each({f"{t} {label}": partial(_assign_on, t, scores) for t in (1, 2)}, bench.repeats)
    figures["ratio"] = max(figures[f"2 {label}"] / figures[f"1 {label}"] for label in problems)
    note = "the least favourable of a large problem and a batch"
    return Measurement(repeats=bench.repeats, figures=figures, note=note)


def _assign_on(threads: int, scores: Float[Tensor, "*batch n k"]) -> eq.Assignment:
    with num_threads(threads):
        return eq.assign(scores)


def _memory(bench: AssignBench) -> Measurement:
    figures: dict[str, float] = {name: ask(MEMORY, name, threads=bench.threads) for name in ("float32", "float64")}
    return Measurement(repeats=1, figures={**figures, "ratio": max(figures.values())})


def _first_call(bench: AssignBench) -> Measurement:
    # The process before these may have compiled the kernels; theirs load them from disk.
    seconds = [ask(FIRST_CALL, threads=bench.threads) for _ in range(3)]
    return Measurement(seconds=min(seconds), repeats=len(seconds))


def _import(bench: AssignBench) -> Measurement:
    base, own = zip(*(ask(IMPORT, threads=bench.threads) for _ in range(3)), strict=True)
    return Measurement(seconds=min(own), repeats=len(own), figures={"torch": min(base)})


BEHAVIOURS: Mapping[str, Behaviour] = {
    "growth": Behaviour(_growth, "time per row at k = 64, n = 262,144 against 16,384", 1.3),
    "batch": Behaviour(_batch, "4,096 problems of 100 x 2", 0.025, "s"),
    "warm-start": Behaviour(_warm_start, "warm start from the previous draw's prices against cold", 1.0),
    "threads": Behaviour(_two_threads, "two threads against one", 1.0),
    "memory": Behaviour(_memory, "extra peak memory against the score matrix", 1.0),
    "first-call": Behaviour(_first_call, "first call in a fresh process, above import", 2.0, "s"),
    "import": Behaviour(_import, "import equipoise, above import torch", 1.0, "s"),
}
"""The further checks, by name."""
