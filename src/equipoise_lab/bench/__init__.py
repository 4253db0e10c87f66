# SPDX-License-Identifier: Apache-2.0
"""Speed, robustness and balance, measured as ratios within one run."""

from equipoise_lab.bench._assign import assign_benchmark as assign_benchmark
from equipoise_lab.bench._balance import BALANCE_RECIPES as BALANCE_RECIPES
from equipoise_lab.bench._balance import BalanceBench as BalanceBench
from equipoise_lab.bench._balance import balance_steps as balance_steps
from equipoise_lab.bench._balance_report import balance_benchmark as balance_benchmark
from equipoise_lab.bench._balance_report import balance_verdicts as balance_verdicts
from equipoise_lab.bench._benchmark import Benchmark as Benchmark
from equipoise_lab.bench._benchmark import Log as Log
from equipoise_lab.bench._benchmark import Measurement as Measurement
from equipoise_lab.bench._benchmark import Step as Step
from equipoise_lab.bench._benchmark import pick_recipe as pick_recipe
from equipoise_lab.bench._families import FAMILIES as FAMILIES
from equipoise_lab.bench._families import Family as Family
from equipoise_lab.bench._families import draw_scores as draw_scores
from equipoise_lab.bench._layer import LAYER_RECIPES as LAYER_RECIPES
from equipoise_lab.bench._layer import LayerBench as LayerBench
from equipoise_lab.bench._layer import layer_steps as layer_steps
from equipoise_lab.bench._layer_models import LayerSize as LayerSize
from equipoise_lab.bench._layer_report import layer_benchmark as layer_benchmark
from equipoise_lab.bench._layer_report import layer_verdicts as layer_verdicts
from equipoise_lab.bench._recipe import RECIPES as RECIPES
from equipoise_lab.bench._recipe import AssignBench as AssignBench
from equipoise_lab.bench._scale import SCALE_RECIPES as SCALE_RECIPES
from equipoise_lab.bench._scale import ScaleBench as ScaleBench
from equipoise_lab.bench._scale_report import scale_benchmark as scale_benchmark
from equipoise_lab.bench._sinkhorn import SINKHORN_RECIPES as SINKHORN_RECIPES
from equipoise_lab.bench._sinkhorn import SinkhornBench as SinkhornBench
from equipoise_lab.bench._sinkhorn import sinkhorn_steps as sinkhorn_steps
from equipoise_lab.bench._sinkhorn_report import sinkhorn_benchmark as sinkhorn_benchmark
from equipoise_lab.bench._sinkhorn_report import sinkhorn_verdicts as sinkhorn_verdicts
