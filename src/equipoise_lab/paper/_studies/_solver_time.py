# SPDX-License-Identifier: Apache-2.0
"""The time of the paper's solver against that of the Hungarian algorithm (App. D.2).

The scores are those of Gumbel-Matching: standard normal logits plus Gumbel noise. The Hungarian algorithm (scipy's,
compiled) needs an n x n problem, so each expert's column is repeated once for each of its slots, outside the timer. The
paper's solver is `equipoise.assign(method="cycle-cancelling")`, tensor operations from Python with a fixed cost of some
milliseconds, and `primal-dual` is the compiled solver that the library uses by default. All on one thread, in processor
time.

Legend: n rows (datapoints), k columns (experts), c = n / k slots for each.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from equipoise.assignment import assign
from equipoise.assignment._auction import auction_start
from equipoise.assignment._cycle_cancelling import to_grid
from equipoise.assignment._cycles import find_moves
from equipoise.ops import draw_gumbel
from equipoise_lab._style import Look, add_grid, name_ticks, new_figure, plot_known, row, stack, tick_seconds
from equipoise_lab._timing import num_threads
from equipoise_lab.paper._rules import NOT_RUN, Part, Study, decided, finite
from equipoise_lab.paper._studies._maximum_entropy import ordered_looks

ROWS = (64, 256, 512, 1024, 2048, 4096)
QUICK_ROWS = (64, 256, 1024)
EXPERTS = (2, 4, 8, 16)
# For contrast: as many experts as rows, where nothing is gained by k being small.
SQUARE = (16, 64)
# A Hungarian call that is foreseen to take longer is left out.
_BUDGET_SECONDS = 1.5
_TOLERANCE = 1e-9
# "Much faster" is this many times, and k << n is this many rows for each expert. Below the least number of rows, what
# is compared is the fixed cost of a call.
_MUCH, _ROWS_EACH, _LEAST_ROWS = 5.0, 64, 1024
_SOLVERS = (
    ("hungarian", "Hungarian (scipy)", Look(colour="#cc6a1b", marker="P")),
    ("cycle_cancelling", "cycle cancelling", Look(colour="#1f66ad", marker="s")),
    ("primal_dual", "primal-dual", Look(colour="#08306b", marker="o", dashes="--", filled=False)),
)
_NOTE = (
    "Normal logits of standard deviation 1 plus Gumbel noise, one thread, processor time. Cycle cancelling runs as "
    "tensor operations from Python; scipy's Hungarian algorithm and primal-dual are compiled."
)
_NO_SCIPY = "The Hungarian algorithm was left out: scipy is not installed (pip install 'equipoise[peers]')."


def run(*, quick: bool = False, seed: int = 0) -> dict[str, Any]:
    """Times the solvers over sizes, and counts the improvements that the paper's solver makes after its auction.

    Returns:
        `sizes`, a record for each (n, k): `problems`; `cycle_cancelling_ms`, `hungarian_ms` and `primal_dual_ms`, the
        median over problems of the best time of a call; `improvements`, the mean number of cycles cancelled when each
        moves one row an edge, as in the paper, and `improvements_batched`, when it moves as many as pay, as the timed
        solver does; `agree`, whether all solvers found the same value. `hungarian_ms` is None where a call would exceed
        the budget (`hungarian_over_budget`) or scipy is missing. `note` says how it was measured, and what was left
        out. Everything but the times is the same for the same seed.
    """
    generator = torch.Generator().manual_seed(seed)
    square, experts, rows = (SQUARE[:1], EXPERTS[:2], QUICK_ROWS) if quick else (SQUARE, EXPERTS, ROWS)
    shapes = [(n, n) for n in square] + [(n, k) for k in experts for n in rows]
    sizes: list[dict[str, Any]] = []
    spent: dict[int, tuple[int, float]] = {}
    with num_threads(1):
        _time_all(_draw_scores(16, 4, generator), hungarian=True)  # compiles and loads what the first call needs
        for n, k in shapes:
            last_n, last_seconds = spent.get(k, (n, 0.0))
            over_budget = last_seconds * (n / last_n) ** 3 > _BUDGET_SECONDS
            record = _measure(n, k, 2 if quick else 3, generator, hungarian=not over_budget)
            sizes.append(record | {"hungarian_over_budget": over_budget})
            if record["hungarian_ms"] is not None and n > k:
                spent[k] = (n, 1e-3 * record["hungarian_ms"])
    note = _NOTE if _has_scipy() else f"{_NOTE} {_NO_SCIPY}"
    return {"quick": quick, "seed": seed, "scipy": _has_scipy(), "note": note, "sizes": sizes}


def _measure(n: int, k: int, problems: int, generator: torch.Generator, *, hungarian: bool) -> dict[str, Any]:
    """Makes the record of one size, as `run` documents it."""
    scores = torch.stack([_draw_scores(n, k, generator) for _ in range(problems)])
    capacity = torch.full([problems, k], n // k)
    timed = [_time_all(problem, hungarian=hungarian) for problem in scores]
    record: dict[str, Any] = {"n": n, "k": k, "problems": problems}
    for name, *_ in _SOLVERS:
        times = [1e3 * result[name][0] for result in timed if name in result]
        record[f"{name}_ms"] = statistics.median(times) if times else None
    values = [[value for _, value in result.values()] for result in timed]
    record["agree"] = all(max(v) - min(v) <= _TOLERANCE * abs(v[0]) for v in values)
    record["improvements"] = float(count_cycles(scores, capacity, most=1).double().mean())
    record["improvements_batched"] = float(count_cycles(scores, capacity).double().mean())
    return record


def count_cycles(
    scores: Float[Tensor, "b n k"], capacity: Int[Tensor, "b k"], *, most: int | None = None
) -> Int[Tensor, " b"]:
    """Counts the negative cycles that cycle cancelling cancels after the auction, in each problem.

    Args:
        scores: any floating dtype; -inf forbids a pair.
        capacity: rows that each expert may take, enough for all rows together.
        most: rows that a cycle moves out of each of its experts: 1 is the paper's step; None, what the solver does, is
            as many as it pays for.

    Example:
        >>> scores = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
        >>> count_cycles(scores, torch.ones(1, 2, dtype=torch.int64))  # the auction's start is optimal
        tensor([0])
    """
    z, _ = auction_start(scores, capacity, torch.ones_like(scores[..., 0], dtype=torch.bool), None)
    grid = to_grid(scores.double())
    cycles = torch.zeros_like(capacity[:, 0])
    while True:
        moves = find_moves(grid, z, capacity)
        if not bool((moves.units > 0).any()):
            return cycles
        moves = moves._replace(units=moves.units.clamp_max(len(z[0]) if most is None else most))
        z = moves.apply(z)
        cycles += torch.tensor([_number_of_cycles(successor) for successor in moves.successor.tolist()])


def _number_of_cycles(successor: list[int]) -> int:
    """Counts the cycles of a graph whose every node has one successor on its cycle, or none: one of number k."""
    left, number = {j for j, following in enumerate(successor) if following < len(successor)}, 0
    while left:
        j, number = left.pop(), number + 1
        while (j := successor[j]) in left:
            left.remove(j)
    return number


def _draw_scores(n: int, k: int, generator: torch.Generator) -> Float[Tensor, "n k"]:
    """Draws the scores a + g of eq. (4) at temperature 1."""
    logits = torch.randn(n, k, generator=generator, dtype=torch.float64)
    return logits + draw_gumbel([n, k], generator=generator, dtype=torch.float64)


def _time_all(scores: Float[Tensor, "n k"], *, hungarian: bool) -> dict[str, tuple[float, float]]:
    """Solves one problem with each solver; returns seconds and value of each."""
    solvers: dict[str, Callable[[], float]] = {
        "cycle_cancelling": lambda: float(assign(scores, method="cycle-cancelling").value),
        "primal_dual": lambda: float(assign(scores, method="primal-dual").value),
    }
    if hungarian and _has_scipy():
        from scipy.optimize import linear_sum_assignment

        n, k = scores.shape
        slots = scores.repeat_interleave(n // k, dim=1).numpy()  # n x n, one column for each slot
        solvers["hungarian"] = lambda: float(slots[linear_sum_assignment(slots, maximize=True)].sum())
    return {name: _best(solve) for name, solve in solvers.items()}


def _best(solve: Callable[[], float]) -> tuple[float, float]:
    """Takes the best of up to five calls, of fewer when they are slow; returns its seconds and the value."""
    best, spent, value = float("inf"), 0.0, float("nan")
    for _ in range(5):
        start = time.thread_time()
        value = solve()
        seconds = time.thread_time() - start
        best, spent = min(best, seconds), spent + seconds
        if spent > 0.05:
            break
    return best, value


def _has_scipy() -> bool:
    return importlib.util.find_spec("scipy") is not None


def judge(study: Study) -> list[Part]:
    """Claim 13: where n >= 1,024 and n >= 64 k, cycle cancelling beats the Hungarian algorithm, in few improvements."""
    sizes: list[Study] = [s for s in study["sizes"] if s["n"] >= max(_ROWS_EACH * s["k"], _LEAST_ROWS)]
    counts = finite(size["improvements"] for size in sizes)
    few = all(count <= max(10.0, size["n"] / 100) for size, count in zip(sizes, counts, strict=True))
    figures = {f"improvements {s['n']} x {s['k']}": count for s, count in zip(sizes, counts, strict=True)}
    improved = decided(few, f"{min(counts):.3g} to {max(counts):.3g} improvements", figures)
    ratios = {
        f"{s['n']:,} x {s['k']}": s["hungarian_ms"] / s["cycle_cancelling_ms"]
        for s in sizes
        if s["hungarian_ms"] is not None
    }
    if not ratios:  # no scipy
        return [NOT_RUN, improved]
    measured = ", ".join(f"{ratio:.3g} times at {size}" for size, ratio in ratios.items())
    figures = {f"hungarian / cycle-cancelling {size}": ratio for size, ratio in ratios.items()}
    return [decided(min(ratios.values()) >= _MUCH, measured, figures), improved]


def draw(study: Study) -> Figure:
    """Draws the time of each solver against n, one panel for each k, then the number of improvements."""
    sizes = [size for size in study["sizes"] if size["n"] > size["k"]]
    by_experts = {k: [size for size in sizes if size["k"] == k] for k in sorted({size["k"] for size in sizes})}
    figure = new_figure(7.6, 5.0)
    above, below = stack(figure, 1.0, 0.85)
    panels = row(above, len(by_experts), sharey=True)
    for axes, (k, chosen) in zip(panels, by_experts.items(), strict=True):
        for key, name, mark in _SOLVERS:
            times = [(size["n"], size[f"{key}_ms"]) for size in chosen]
            plot_known(axes, [(n, None if ms is None else 1e-3 * ms) for n, ms in times], **mark.line, label=name)
        axes.set(yscale="log", title=f"k = {k} experts")
        axes.yaxis.set_major_formatter(lambda seconds, _: tick_seconds(seconds))
        _rows_axis(axes, sorted({size["n"] for size in chosen})[::2])
    panels[0].set_ylabel("time of one call")
    panels[0].legend(loc="upper left", fontsize=7.5)
    axes = below.subplots()
    for k, look in ordered_looks(by_experts).items():
        n, improvements = zip(*((size["n"], size["improvements"]) for size in by_experts[k]), strict=True)
        axes.plot(n, improvements, **look.line, label=f"k = {k}")
    axes.legend(fontsize=8)
    title = "improvements after the auction's start, one datapoint an edge as in the paper"
    axes.set(ylabel="cycles cancelled", xlabel="datapoints n", title=title)
    _rows_axis(axes, sorted({size["n"] for size in sizes}))
    return figure


def _rows_axis(axes: Axes, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    name_ticks(axes, ticks, ",")
    add_grid(axes)
