# SPDX-License-Identifier: Apache-2.0
"""Speed, robustness and balance, measured as ratios within one run."""

from equipoise_lab.bench._assign_report import ASSIGN
from equipoise_lab.bench._balance import BALANCE
from equipoise_lab.bench._benchmark import Benchmark as Benchmark
from equipoise_lab.bench._benchmark import Log as Log
from equipoise_lab.bench._benchmark import Measurement as Measurement
from equipoise_lab.bench._benchmark import Report as Report
from equipoise_lab.bench._benchmark import Step as Step
from equipoise_lab.bench._layer import LAYER
from equipoise_lab.bench._scale import SCALE
from equipoise_lab.bench._sinkhorn import SINKHORN

BENCHMARKS = {benchmark.name: benchmark for benchmark in (ASSIGN, BALANCE, LAYER, SCALE, SINKHORN)}
"""The commands behind `equipoise bench`, by name."""
