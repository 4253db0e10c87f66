# SPDX-License-Identifier: Apache-2.0
"""Balancing in expectation against torch.softmax, the floor, and POT's Sinkhorn at equal accuracy.

Legend: n rows (datapoints), k columns (experts).
"""

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from rich.text import Text
from torch import Tensor

from equipoise._core import check_positive
from equipoise.balancing import Balanced, ConvergenceWarning, sinkhorn
from equipoise_lab._style import add_grid, name_ticks, new_figure, plot_known
from equipoise_lab._tables import format_seconds, name_size, name_threads, new_table
from equipoise_lab._timing import best_in_turns, best_of
from equipoise_lab.bench._benchmark import Benchmark, Measurement, Records, Report, Size, Step, check_run, need
from equipoise_lab.bench._verdicts import Verdict, judge, limit_table, over_budget, ratio, ratio_text, record_of

CAPACITY_FACTOR = 1.25
# Multiples of torch.softmax on the same matrix, by standard deviation of the logits, at this size.
LIMIT_SIZE = (65536, 64)
SOFTMAX_LIMITS: Mapping[float, float] = {1.0: 40.0, 10.0: 80.0}
# Ours may not be slower than POT anywhere.
POT_LIMIT = 1.0
# Where POT stops, in decades of its own error; the first that meets the tolerance is what it is timed with.
_POT_THRESHOLDS = tuple(10.0**-decade for decade in range(2, 12))
_POT_ITERATIONS = 10_000
_CURVES = (
    ("pot", "POT sinkhorn_log", "#8c2d04", "^", "-"),
    ("backward", "eq.sinkhorn with backward", "#7fb3dd", "D", "-"),
    ("tight", "eq.sinkhorn", "#0b3c6f", "o", "-"),
    ("slack", f"eq.sinkhorn, uneven logits,\ncapacity factor {CAPACITY_FACTOR:g}", "#2f7fc1", "s", "--"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkhornBench:
    """One run of the balancing benchmark."""

    sizes: tuple[Size, ...]  # problems n x k in order: POT skips a size that an earlier one shows to exceed the budget
    deviations: tuple[float, ...] = (0.1, 1.0, 10.0, 30.0)  # standard deviations of the logits, from flat to sharp
    threads: int = 1  # for torch, and so for us; POT uses what numpy's libraries were given
    repeats: int = 5  # of which the best counts
    seed: int = 0  # of the logits
    tolerance: float = 1e-6  # relative column error that everybody has to reach
    budget: float = 20.0  # seconds that one call of POT may take

    def __post_init__(self) -> None:
        """Refuses a run that cannot be made."""
        check_run(self)
        check_positive("tolerance", self.tolerance)

    def cells(self) -> list[tuple[Size, float]]:
        """Lists every size with every deviation."""
        return [(size, deviation) for size in self.sizes for deviation in self.deviations]


def sinkhorn_key(size: Size, deviation: float, who: str) -> str:
    """Names the measurement of `who` ("ours" or "pot") at a size and standard deviation."""
    return f"{size[0]}x{size[1]}/sd {deviation:g}/{who}"


def sinkhorn_steps(bench: SinkhornBench) -> list[Step]:
    """Lists the measurements of a run, in order."""
    steps: list[Step] = []
    for size, deviation in bench.cells():
        keys = {size: sinkhorn_key(size, deviation, "pot") for size in bench.sizes}
        title = f"{name_size(size)}  sd {deviation:g}  "
        ours, pot = (partial(measure, bench, size, deviation) for measure in (_measure_ours, _measure_pot))
        skip = partial(over_budget, bench.budget, keys, size, (1.0, 1.0))
        steps.append(Step(sinkhorn_key(size, deviation, "ours"), title + "eq.sinkhorn", ours))
        steps.append(Step(keys[size], title + "POT sinkhorn_log", pot, skip))
    return steps


def _measure_ours(bench: SinkhornBench, size: Size, deviation: float) -> Measurement:
    """Times torch.softmax and ours in turns: tight, with the backward pass, and with slack that some experts use up."""
    logits = _logits(size, deviation, bench.seed)
    capacity = math.ceil(CAPACITY_FACTOR * size[0] / size[1])
    popular = logits + logits[:1]
    leaf, weight = logits.clone().requires_grad_(), torch.ones_like(logits)

    def with_backward() -> Any:
        return torch.autograd.grad(sinkhorn(leaf, tolerance=bench.tolerance).log_p, leaf, weight)

    calls: dict[str, Callable[[], Any]] = {
        "softmax": lambda: torch.softmax(logits, -1),
        "tight": lambda: sinkhorn(logits, tolerance=bench.tolerance),
        "slack": lambda: sinkhorn(popular, capacity, tolerance=bench.tolerance),
        "backward": with_backward,
    }
    with warnings.catch_warnings():
        # Whether it converged is among the figures.
        warnings.simplefilter("ignore", ConvergenceWarning)
        timings = best_in_turns(calls, bench.repeats, threads=bench.threads)
    balanced: Balanced = timings["tight"].result
    error, seconds = _column_error(balanced.log_p.double().exp()), {name: t.seconds for name, t in timings.items()}
    figures = {**seconds, "iterations": float(balanced.iterations), "error": error}
    if error > 2 * bench.tolerance or not bool(balanced.converged):
        return Measurement(status="failed", figures=figures, note=f"relative column error {error:.1e}")
    return Measurement(seconds=seconds["tight"], repeats=bench.repeats, figures=figures)


def _measure_pot(bench: SinkhornBench, size: Size, deviation: float) -> Measurement:
    """Times POT with the loosest of its thresholds that meets the tolerance; float64, as float32 does not reach it."""
    need("ot", "peers", name="POT")
    import ot

    n, k = size
    costs = -_logits(size, deviation, bench.seed).double().numpy()
    rows, columns = torch.full((n,), 1 / n).double().numpy(), torch.full((k,), 1 / k).double().numpy()
    solve = partial(ot.bregman.sinkhorn_log, rows, columns, costs, 1.0, numItermax=_POT_ITERATIONS, warn=False)
    threshold, error, seconds = 0.0, math.inf, 0.0
    for threshold in _POT_THRESHOLDS:
        start = time.perf_counter()
        plan = torch.from_numpy(solve(stopThr=threshold))
        seconds = time.perf_counter() - start
        error = _column_error(plan * n)
        if error <= bench.tolerance or seconds > bench.budget:
            break
    figures = {"error": error, "threshold": threshold}
    if error > bench.tolerance:
        note = f"relative column error {error:.1e} after {seconds:.3g} s"
        return Measurement(status="failed", seconds=seconds, figures=figures, note=note)
    timing = best_of(partial(solve, stopThr=threshold), bench.repeats, budget=bench.budget / bench.repeats)
    return Measurement(seconds=timing.seconds, repeats=timing.repeats, figures=figures)


def _column_error(p: Float[Tensor, "n k"]) -> float:
    target = p.shape[0] / p.shape[1]
    return float((p.sum(0) / target - 1).abs().max())


@lru_cache(maxsize=1)
def _logits(size: Size, deviation: float, seed: int) -> Float[Tensor, "n k"]:
    """The logits of a size, float32: kept until the next are drawn, because all solvers share them."""
    return deviation * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def _both(records: Records, size: Size, deviation: float) -> tuple[Measurement, Measurement]:
    ours, pot = (record_of(records, sinkhorn_key(size, deviation, who)) for who in ("ours", "pot"))
    return ours, pot


def times_softmax(records: Records, size: Size, deviation: float, what: str = "tight") -> float | None:
    """A time ("tight", "slack", "backward" or "pot") divided by that of torch.softmax on the same matrix."""
    ours, pot = _both(records, size, deviation)
    return ratio(pot.seconds if what == "pot" else ours.figures.get(what), ours.figures.get("softmax"))


def times_faster_than_pot(records: Records, size: Size, deviation: float) -> float | None:
    """POT's time divided by ours; None unless both reached the tolerance."""
    ours, pot = _both(records, size, deviation)
    return ratio(pot.seconds, ours.seconds) if pot.status == "measured" else None


def sinkhorn_verdicts(bench: SinkhornBench, records: Records) -> list[Verdict]:
    """Holds softmax times and the closest race with POT against their limits; not judged with more than one thread."""
    found: list[Verdict] = []
    for deviation, limit in SOFTMAX_LIMITS.items():
        title = f"{name_size(LIMIT_SIZE)}, sd {deviation:g}: times torch.softmax"
        found.append(Verdict("size", title, times_softmax(records, LIMIT_SIZE, deviation), limit))
    races = [times_faster_than_pot(records, *cell) for cell in bench.cells()]
    closest = min((race for race in races if race is not None), default=None)
    title = "times faster than POT, at least, over all sizes and deviations"
    return judge([*found, Verdict("peer", title, closest, POT_LIMIT, at_least=True)], when=bench.threads == 1)


def _report(bench: SinkhornBench, records: Records) -> Report:
    headings = ("n x k", "sd", "softmax", "ours", "ours", "passes", "error", f"slack\n{CAPACITY_FACTOR:g}", "backward")
    table = new_table(
        f"Balancing to {bench.tolerance:g}, float32 logits, {name_threads(bench.threads)}, best of {bench.repeats}",
        right=(*headings, "POT", "POT\n/ ours"),
        no_wrap=True,
        caption="In multiples of torch.softmax on the same matrix, except where a unit is given.",
        caption_justify="left",
    )
    ratios: list[dict[str, float | None]] = []
    for size, deviation in bench.cells():
        ours, pot = _both(records, size, deviation)
        tight, slack, backward = (times_softmax(records, size, deviation, w) for w in ("tight", "slack", "backward"))
        race, at = times_faster_than_pot(records, size, deviation), {"n": size[0], "k": size[1], "deviation": deviation}
        ratios.append({**at, "times_softmax": tight, "times_faster_than_pot": race})
        cells: list[str | Text] = [name_size(size), f"{deviation:g}"]
        if not (figures := ours.figures):
            table.add_row(*cells, Text(ours.status, style="dim"))
            continue
        limit = SOFTMAX_LIMITS.get(deviation) if size == LIMIT_SIZE else None
        cells += [format_seconds(figures["softmax"]), format_seconds(figures["tight"]), ratio_text(tight, ".1f", limit)]
        cells += [f"{figures['iterations']:.0f}", f"{figures['error']:.0e}", f"{slack:.1f}", f"{backward:.1f}"]
        cells += [pot.status if race is None else format_seconds(pot.seconds)]
        table.add_row(*cells, ratio_text(race, ".1f", POT_LIMIT, at_least=True))
    verdicts = sinkhorn_verdicts(bench, records)
    summary = {"ratios": ratios, "verdicts": [asdict(verdict) for verdict in verdicts]}
    return Report(summary=summary, tables=[table, limit_table(verdicts)], figure=_draw(bench, records))


def _draw(bench: SinkhornBench, records: Records) -> Figure:
    """Draws time in multiples of torch.softmax against the deviation of the logits, at the size that has limits."""
    size = LIMIT_SIZE if LIMIT_SIZE in bench.sizes else bench.sizes[-1]
    figure = new_figure(7.2, 4.2)
    axes = figure.add_subplot()
    for what, title, colour, marker, dashes in _CURVES:
        points = ((sd, times_softmax(records, size, sd, what)) for sd in bench.deviations)
        how = {"linestyle": dashes, "color": colour, "marker": marker, "markersize": 4.5}
        plot_known(axes, points, label=title, **how)
    axes.axhline(1.0, color="#555555", linestyle=":", linewidth=1.2, label="torch.softmax")
    axes.set(xscale="log", yscale="log")
    name_ticks(axes, bench.deviations)
    add_grid(axes)
    axes.set(xlabel="standard deviation of the logits", ylabel="time, in multiples of torch.softmax")
    axes.set_title(f"Balancing {name_size(size)} logits to a relative column error of {bench.tolerance:g}")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


_FULL = SinkhornBench(sizes=((64, 8), (512, 16), (4096, 64), (16384, 64), (65536, 64), (65536, 256)))
_QUICK = SinkhornBench(sizes=((512, 16), (4096, 64), (65536, 64)), deviations=(1.0, 10.0), budget=2.0)
SINKHORN = Benchmark(name="sinkhorn", recipes={"full": _FULL, "quick": _QUICK}, steps=sinkhorn_steps, report=_report)
