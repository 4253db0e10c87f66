# SPDX-License-Identifier: Apache-2.0
"""Balance of fresh batches, for routers that learn one number for each expert from past ones.

A batch has logits h W + b: rows h of `RANK` standard normal features, a direction W_j and a popularity b_j for each
expert, all of variance 1. With drift d, every step moves W and b by d standard deviations, and back towards 0 by as
little as keeps their variance. Every rule routes a batch, observes it, and next meets logits that have moved. MaxVio is
the largest load over the mean load, minus 1.

Legend: T rows (tokens), E experts, K experts a row.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Generator, Tensor

from equipoise._core import check_at_least, check_one_of
from equipoise.nn import RouteRequest, Routing, RoutingRule, choose_top, expert_bias
from equipoise.nn._bias_rules import LossFree, Priced, Quantile
from equipoise.nn._peer_rules import TopK
from equipoise.ops import log_softmax
from equipoise_lab._style import GREY, INK, Look, add_grid, new_figure, plot_known
from equipoise_lab._tables import new_table
from equipoise_lab.bench._benchmark import Benchmark, Measurement, Records, Report, Step, check_run
from equipoise_lab.bench._verdicts import Verdict, judge, limit_table, ratio, ratio_text, record_of, worst_of

RANK = 16
# In logit units a step. The published 0.001 moves a bias by at most 0.1 in 100 steps; popularities differ by 1.
LOSS_FREE_RATE = 0.05
FLOOR = "floor"
RULES: dict[str, Callable[[int, int], RoutingRule]] = {
    "topk": lambda num_experts, top_k: TopK(top_k),
    "loss-free": lambda num_experts, top_k: LossFree(num_experts, top_k=top_k, rate=LOSS_FREE_RATE),
    "quantile": lambda num_experts, top_k: Quantile(num_experts, top_k=top_k),
    "priced": lambda num_experts, top_k: Priced(num_experts, top_k=top_k),
}
"""From E and K to a router's rule, by the router's name."""
# Where priced is held against the floor: so many batches of so many rows, so many experts, logits that stay.
LIMIT_BATCHES, LIMIT_ROWS, LIMIT_EXPERTS = 20, 4096, 64
FLOOR_LIMIT = 1.25
QUANTILE_LIMIT = 1.0
LOOKS = {
    "topk": Look(colour=GREY, marker="P", dashes=":"),
    "loss-free": Look(colour="#cc6a1b", marker="v", dashes="--", filled=False),
    "quantile": Look(colour="#5b9bd0", marker="D", dashes="--"),
    "priced": Look(colour="#0b3c6f", marker="o"),
    FLOOR: Look(colour=INK, marker="", dashes=":"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceBench:
    """One run of the balance benchmark."""

    rows: int = 4096  # T, of every batch
    experts: tuple[int, ...] = (64, 128)  # numbers of experts, E
    top_ks: tuple[int, ...] = (1, 2, 8)  # numbers of experts a row, K
    drifts: tuple[float, ...] = (0.0, 0.01)  # standard deviations by which logits move in a step
    steps: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100)  # batches after which balance is measured, increasing
    routers: tuple[str, ...] = tuple(RULES)
    trials: int = 3  # other logits, noise and drift for each; results are means
    fresh: int = 4  # batches that balance is measured on, each time
    floor_rows: int = 131_072  # of the batch whose prices set the floor
    seed: int = 0  # of the first trial

    def __post_init__(self) -> None:
        """Refuses a run that cannot be made."""
        for name in ("rows", "fresh", "floor_rows"):
            check_at_least(name, getattr(self, name), 1)
        for router in self.routers:
            check_one_of("router", router, list(RULES))
        for top_k in self.top_ks:
            if not 1 <= top_k < min(self.experts):
                raise ValueError(f"top_k must be from 1 to {min(self.experts) - 1}, got {top_k}: add experts")
        check_run(self)

    def settings(self) -> list["Setting"]:
        """Lists the settings of a run."""
        return [Setting(e, k, drift) for e in self.experts for k in self.top_ks for drift in self.drifts]


@dataclass(frozen=True, slots=True)
class Setting:
    """Experts, experts a row, and drift of the logits."""

    num_experts: int
    top_k: int
    drift: float

    def __str__(self) -> str:
        """In words."""
        drift = f"drift {self.drift:g}" if self.drift else "no drift"
        return f"E = {self.num_experts}, K = {self.top_k}, {drift}"

    def key(self, trial: int) -> str:
        """Names the measurement of all routers in one trial."""
        return f"{self.num_experts} experts/K {self.top_k}/drift {self.drift:g}/trial {trial}"


def balance_steps(bench: BalanceBench) -> list[Step]:
    """Lists the measurements of a run; one whole trial after the other, so that early results cover all settings."""
    return [
        Step(
            at.key(trial),
            f"trial {trial}  {at.num_experts} experts  K = {at.top_k}  drift {at.drift:g}",
            partial(_measure, bench, at, trial),
        )
        for trial in range(bench.trials)
        for at in bench.settings()
    ]


class _Source:
    """Logits that drift: batches of one distribution, until it moves."""

    def __init__(self, num_experts: int, drift: float, seed: int) -> None:
        self.drift, self.generator = drift, Generator().manual_seed(seed)
        self.size = (RANK + 1, num_experts)  # directions, and popularity as the weight of a feature that is 1
        self.weight = self._normal()

    def _normal(self) -> Float[Tensor, "features E"]:
        weight = torch.randn(self.size, generator=self.generator)
        weight[:RANK] /= math.sqrt(RANK)
        return weight

    def draw(self, rows: int) -> Float[Tensor, "T E"]:
        """Draws a batch of logits."""
        features = torch.randn(rows, RANK, generator=self.generator)
        return features @ self.weight[:RANK] + self.weight[RANK]

    def move(self) -> None:
        """Moves the distribution by one step."""
        if self.drift:
            self.weight = math.sqrt(1 - self.drift**2) * self.weight + self.drift * self._normal()


def _measure(bench: BalanceBench, at: Setting, trial: int) -> Measurement:
    """Feeds the same batches to all rules and measures MaxVio on the same fresh ones, which no rule observes."""
    source = _Source(at.num_experts, at.drift, bench.seed + trial)
    rules = {name: RULES[name](at.num_experts, at.top_k) for name in bench.routers}
    figures: dict[str, float] = {}
    bias = None
    for step in range(1, bench.steps[-1] + 1):
        batch = _request(source.draw(bench.rows))
        for rule in rules.values():
            observe: Callable[[Routing], object] | None = getattr(rule, "observe", None)
            if observe is not None:
                observe(rule(batch.logits, batch))
        source.move()
        if step not in bench.steps:
            continue
        if bias is None or at.drift:
            bias = expert_bias(source.draw(bench.floor_rows), at.top_k)
        fresh = [_request(source.draw(bench.rows)) for _ in range(bench.fresh)]
        for name, rule in rules.items():
            figures[f"{name} {step}"] = _mean_violation([rule(batch.logits, batch) for batch in fresh])
        floor = [choose_top(batch.logits + bias, batch, top_k=at.top_k) for batch in fresh]
        figures[f"{FLOOR} {step}"] = _mean_violation(floor)
    return Measurement(repeats=bench.fresh, figures=figures)


def _mean_violation(routings: list[Routing]) -> float:
    return float(torch.stack([routing.stats.max_violation for routing in routings]).mean())


def _request(logits: Float[Tensor, "T E"]) -> RouteRequest:
    return RouteRequest(
        logits=logits,
        log_p=log_softmax(logits),
        capacity=None,
        mask=None,
        token_ids=None,
        positions=torch.arange(len(logits)),
        training=True,
        temperature=1.0,
        generator=None,
    )


def _means(bench: BalanceBench, records: Records) -> dict[Setting, dict[str, float]]:
    """MaxVio by setting, and by router (or floor) and number of batches: the mean over the trials that there are."""
    means: dict[Setting, dict[str, float]] = {}
    for at in bench.settings():
        trials = [record_of(records, at.key(trial)).figures for trial in range(bench.trials)]
        names = dict.fromkeys(name for figures in trials for name in figures)
        means[at] = {name: fmean(figures[name] for figures in trials if name in figures) for name in names}
    return means


def _times(means: Mapping[str, float], other: str, steps: Sequence[int]) -> float | None:
    """MaxVio of `priced` divided by that of another router or the floor, each the mean over so many batches."""
    ours, others = ([means.get(f"{who} {step}") for step in steps] for who in ("priced", other))
    if None in ours or None in others:
        return None
    return ratio(sum(filter(None, ours)), sum(filter(None, others)))


def balance_verdicts(bench: BalanceBench, records: Records) -> list[Verdict]:
    """Holds `priced` against the floor and against `quantile`.

    Returns:
        Of each setting with 64 experts whether `priced` is near the floor after 20 batches; of all settings whether it
        is above `quantile` from then on, and at any single point.
    """
    means = _means(bench, records)
    found: list[Verdict] = []
    for at in means if bench.rows == LIMIT_ROWS and LIMIT_BATCHES in bench.steps else ():
        if at.num_experts == LIMIT_EXPERTS:
            title = f"{at}: priced after {LIMIT_BATCHES} batches, times the floor"
            found.append(Verdict("floor", title, _times(means[at], FLOOR, [LIMIT_BATCHES]), FLOOR_LIMIT))
    late = [step for step in bench.steps if step >= LIMIT_BATCHES] or list(bench.steps[-1:])
    spans = {
        f"mean from {late[0]} batches on": {"": late},
        "after any number of batches": {f", after {step}": [step] for step in bench.steps},
    }
    for when, each in spans.items():
        # Where `priced` is nearest to `quantile`, or furthest above it.
        ratios = {f"{at}{x}": _times(means[at], "quantile", steps) for at in means for x, steps in each.items()}
        worst, figure = worst_of(ratios)
        found.append(Verdict("peer", f"priced, times quantile, {when}, at most", figure, QUANTILE_LIMIT, note=worst))
    return judge(found)


def _report(bench: BalanceBench, records: Records) -> Report:
    """MaxVio of every setting for the file; at the start, after 20 batches and at the end for the table; limits."""
    shown, means = (*bench.routers, FLOOR), _means(bench, records)
    table = new_table(
        f"MaxVio on fresh batches of {bench.rows:,} rows, mean of {bench.trials} trials",
        right=("E", "K", "drift", "batches", *shown, "priced\n/ floor"),
        no_wrap=True,
        caption=f"drift: standard deviations that logits move in a step. loss-free: rate {LOSS_FREE_RATE:g}.",
        caption_justify="left",
    )
    for at, found in means.items():
        names = [f"{at.num_experts}", f"{at.top_k}", f"{at.drift:g}"]
        for step in (step for step in bench.steps if step in (bench.steps[0], LIMIT_BATCHES, bench.steps[-1])):
            figures = [found.get(f"{who} {step}") for who in shown]
            limit = FLOOR_LIMIT if step == LIMIT_BATCHES else None
            table.add_row(
                *(names if step == bench.steps[0] else [""] * 3),
                *(f"{step}", *("-" if figure is None else f"{figure:.3f}" for figure in figures)),
                ratio_text(_times(found, FLOOR, [step]), ".2f", limit),
            )
    verdicts = balance_verdicts(bench, records)
    stored = [
        {
            **asdict(at),
            "steps": bench.steps,
            **{who: [found.get(f"{who} {step}") for step in bench.steps] for who in shown},
        }
        for at, found in means.items()
    ]
    return Report(
        summary={"max_violation": stored, "verdicts": [asdict(verdict) for verdict in verdicts]},
        tables=[table, limit_table(verdicts, notes=True)],
        figure=_draw(bench, means),
    )


def _draw(bench: BalanceBench, means: Mapping[Setting, Mapping[str, float]]) -> Figure:
    """Draws MaxVio against the number of batches: a row of panels for each E and drift, a column for each K."""
    rows = [(e, drift) for e in bench.experts for drift in bench.drifts]
    figure = new_figure(3.2 * len(bench.top_ks) + 1.4, 2.3 * len(rows) + 0.6)
    panels = figure.subplots(len(rows), len(bench.top_ks), squeeze=False, sharex=True, sharey=True)
    for line, (num_experts, drift) in zip(panels, rows, strict=True):
        for axes, top_k in zip(line, bench.top_ks, strict=True):
            at = Setting(num_experts, top_k, drift)
            for who in (*bench.routers, FLOOR):
                points = ((step, means[at].get(f"{who} {step}")) for step in bench.steps)
                plot_known(axes, points, label=who, **LOOKS[who].line)
            axes.set(xscale="log", yscale="log", title=str(at))
            axes.set_xticks(list(bench.steps), [str(step) for step in bench.steps])
            axes.yaxis.set_major_formatter("{x:g}")
            axes.xaxis.minorticks_off()
            add_grid(axes)
        line[0].set_ylabel("MaxVio")
    for axes in panels[-1]:
        axes.set_xlabel("batches observed")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper")
    return figure


_QUICK = BalanceBench(experts=(64,), top_ks=(1, 8), steps=(1, 2, 5, 10, 20), trials=1)
BALANCE = Benchmark(
    name="balance", recipes={"full": BalanceBench(), "quick": _QUICK}, steps=balance_steps, report=_report
)
