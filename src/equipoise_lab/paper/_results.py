# SPDX-License-Identifier: Apache-2.0
"""Training runs and their outcomes, and `results.csv`, which holds them."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from equipoise_lab._ledger import write_whole

THRESHOLD = 0.02
"""A run has solved the task when its mean squared error is below this."""

MAIN_BALANCE_WEIGHT = {"reinforce": 0.0, "gating": 0.01}
"""The weight of the balance loss in the six panels of the paper."""

MAIN_LEARNING_RATE = 0.1

Loss = Literal["reinforce", "gating"]
Variant = Literal["plain", "sinkhorn", "no-iw"]
Baseline = Literal["ema", "none"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
VARIANTS: tuple[Variant, ...] = get_args(Variant)
BASELINES: tuple[Baseline, ...] = get_args(Baseline)

MAIN_BASELINE: dict[Loss, Baseline] = {"reinforce": "ema", "gating": "none"}
"""What the paper subtracts from the losses: a moving average with REINFORCE; gating has no use for one."""


# Variants and methods that are others under another name. Without importance weights, what Gumbel-Matching would weigh
# with does not matter. Sinkhorn first adds a number to each column of the scores. Two experts that must take n/2 rows
# each take the same ones whatever that number is, so it changes only the weights of biased Gumbel-Matching, which are
# then those of SH.
SAME: dict[tuple[str, str], tuple[Variant, str]] = {
    ("no-iw", "gm-iw"): ("no-iw", "gm"),
    ("no-iw", "gm-sh"): ("no-iw", "gm"),
    ("sinkhorn", "gm-iw"): ("plain", "gm-iw"),
    ("sinkhorn", "gm-sh"): ("plain", "gm-sh"),
    ("sinkhorn", "gm"): ("plain", "gm-sh"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run."""

    loss: Loss  # how the router learns: "reinforce" or "gating"
    variant: Variant  # "plain", "sinkhorn" (Sinkhorn before sampling) or "no-iw" (no importance weights)
    method: str  # a strategy's name
    temperature: float  # of the proposal
    seed: int  # of the initial parameters and the noise; and of the data, unless all seeds share them
    balance_weight: float  # of the load-balance loss
    learning_rate: float  # of Adam
    baseline: Baseline  # what REINFORCE subtracts: "ema", the moving average of past losses, or "none"

    @property
    def trained_as(self) -> "Run":
        """The run that this one is under another name, or itself."""
        same = SAME.get((self.variant, self.method))
        return self if same is None else replace(self, variant=same[0], method=same[1])

    @property
    def unit(self) -> str:
        """The runs that are trained together, in batches: they sample alike; weights and losses may differ."""
        run = self.trained_as
        sampling = "sinkhorn" if run.variant == "sinkhorn" else "direct"
        return f"{sampling}-{run.method}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result(Run):
    """A run and its outcome; the fields are the columns of `results.csv`, in this order."""

    mse: float  # mean squared error at the end; nan or inf where the run diverged
    mse_expected: float  # the same in expectation over the router
    solved: bool  # whether the run solved the task

    @property
    def run(self) -> Run:
        """The run alone."""
        return Run(**{field.name: getattr(self, field.name) for field in fields(Run)})


COLUMNS = tuple(field.name for field in fields(Result))


def write_results(path: Path, results: Iterable[Result]) -> None:
    """Writes results in the order given, so that a reader, or an interruption, never meets half a file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_to_row(result) for result in results)
    write_whole(path, text.getvalue())


def _to_row(result: Result) -> list[str]:
    """Writes floats so that they read back as the same number, and truth as true or false."""
    return [str(value).lower() if isinstance(value, bool) else str(value) for value in astuple(result)]


def read_results(path: Path) -> list[Result]:
    """Reads what `write_results` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        header = tuple(next(reader, ()))
        if header != COLUMNS:
            raise ValueError(
                f"{path.name} must have the columns {','.join(COLUMNS)}, got {','.join(header) or 'none'}: "
                "remove the file, or write results elsewhere with --out"
            )
        return [_from_row(row, path.name, number) for number, row in enumerate(reader, start=2)]


def _from_row(row: Sequence[str], name: str, number: int) -> Result:
    try:
        return Result(**{field.name: _parse(field.type, text) for field, text in zip(fields(Result), row, strict=True)})
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{name} must hold one run a line, got {','.join(row)!r} in line {number}: "
            "remove that line to repeat its run"
        ) from error


def _parse(kind: Any, text: str) -> Any:
    """Reads a value of a column: one of several words, truth, or a number."""
    known = {word: word for word in get_args(kind)} or ({"true": True, "false": False} if kind is bool else {})
    return known[text] if known else kind(text)


def select(results: Iterable[Result], **equals: object) -> list[Result]:
    """Keeps the runs whose columns equal the given values; numbers that differ by rounding are equal.

    Example:
        >>> select([], loss="reinforce", variant="plain", method="sample", temperature=1.0)
        []
    """
    unknown = sorted(set(equals) - set(COLUMNS))
    if unknown:
        raise ValueError(f"columns must be among {', '.join(COLUMNS)}, got {', '.join(unknown)}: see Result")
    return [r for r in results if all(_same(getattr(r, column), value) for column, value in equals.items())]


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


def select_main(results: Iterable[Result], *, baseline: Baseline = "ema") -> list[Result]:
    """Keeps the runs of the paper's six panels, REINFORCE with a baseline or none, and leaves those of the sweeps.

    They have learning rate 0.1, REINFORCE no balance loss, and gating one of weight 0.01.
    """
    runs = select(results, learning_rate=MAIN_LEARNING_RATE)
    reinforce = select(runs, loss="reinforce", baseline=baseline, balance_weight=MAIN_BALANCE_WEIGHT["reinforce"])
    return reinforce + select(runs, loss="gating", balance_weight=MAIN_BALANCE_WEIGHT["gating"])
