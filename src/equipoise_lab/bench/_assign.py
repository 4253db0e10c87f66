# SPDX-License-Identifier: Apache-2.0
"""The assignment benchmark as a whole."""

from dataclasses import asdict
from functools import partial

from equipoise_lab.bench._behaviour import behaviour_steps
from equipoise_lab.bench._benchmark import Benchmark
from equipoise_lab.bench._figure import save_assign_figure
from equipoise_lab.bench._grid import compile_step, family_steps, grid_steps
from equipoise_lab.bench._recipe import AssignBench
from equipoise_lab.bench._summary import summary
from equipoise_lab.bench._tables import assign_tables


def assign_benchmark(bench: AssignBench) -> Benchmark:
    """Plans a run.

    Args:
        bench: its options.

    Returns:
        The benchmark.
    """
    return Benchmark(
        name="assign",
        options=asdict(bench),
        steps=[compile_step(), *grid_steps(bench), *family_steps(bench), *behaviour_steps(bench)],
        tables=partial(assign_tables, bench),
        summary=partial(summary, bench),
        draw=partial(save_assign_figure, bench),
    )
